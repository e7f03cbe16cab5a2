"""A run's folder: its files and their names.

The load's NDJSON shards are removed only after their rows are saved as parquet. Small JSON files
are replaced atomically: a reader sees the old or the new one. pandas and pyarrow take half a second
to import, so they are imported when rows are first read or written.
"""

import json
import os
import shutil
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from harness.errors import ConfigError, check_text, in_words
from harness.records import (
    SCHEMA_VERSION,
    ArmsSummary,
    ClientSample,
    CpuSample,
    GpuSample,
    LifecycleEvent,
    MetricSample,
    RequestRow,
    StepRow,
    Summary,
)
from harness.store.finite import AnySummary, finite
from harness.store.manifest import Manifest
from harness.store.output import cannot_write

if TYPE_CHECKING:
    import pandas as pd

    from harness.store.frames import RunFrames
    from harness.store.parquet import Sent

RECORDS: Final[dict[str, type[msgspec.Struct]]] = {
    "requests": RequestRow,
    "lifecycle": LifecycleEvent,
    "steps": StepRow,
    "server_metrics": MetricSample,
    "cpu": CpuSample,
    "gpu": GpuSample,
    "client": ClientSample,
}
WHOLE_FILES: Final = "a run whose files are whole"
SINCE_0_1_0: Final = "kills"  # a key of every manifest since the first release
NO_RUN: Final = "is not a run's folder (it has no manifest.json and no rows)"
FILES_OF_A_RUN: Final = ("manifest.json", "summary.json", "requests.parquet", "shards", "rounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """All rows of a run, of the load and of the collector; each may be a lazy iterator."""

    requests: Iterable[RequestRow] = ()
    client: Iterable[ClientSample] = ()
    lifecycle: Iterable[LifecycleEvent] = ()
    steps: Iterable[StepRow] = ()
    server_metrics: Iterable[MetricSample] = ()
    cpu: Iterable[CpuSample] = ()
    gpu: Iterable[GpuSample] = ()


class UnusableRunError(ConfigError):
    """A run that cannot be read: the `reason`, and a `remedy`."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; what would help: {remedy}")
        self.reason = reason
        self.remedy = remedy


class OtherVersionError(UnusableRunError):
    """A walkaway of another schema version wrote it."""


class RunFolder:
    """`rounds` holds the runs of a workload with arms, `shards` the rows of a load in progress."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds = path / "rounds"
        self.shards = path / "shards"
        self.load_plan = path / "load_plan.json"
        self.teacher = path / "teacher.jsonl"
        self.report = path / "report.html"
        self.traceback = path / "traceback.txt"

    @classmethod
    def create(cls, path: Path) -> Self:
        """`claim` a folder with room for a load's shards. Raises ConfigError and StorageError."""
        folder = cls.claim(path)
        try:
            folder.shards.mkdir()
        except OSError as error:
            raise cannot_write(folder.shards, error, what="made") from error
        return folder

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Make the folder. Raises ConfigError if it already holds anything: runs do not mix; and
        StorageError."""
        if path.name.startswith("-"):
            raise ConfigError(f"{path}: is no name for a folder: programs take it for a flag")
        try:
            check_text(str(path.resolve()))  # it stands in files that are text
            path.mkdir(parents=True, exist_ok=True)
            occupied = any(path.iterdir())
        except FileExistsError as error:
            raise ConfigError(f"{path}: is a file; name a new folder with --out") from error
        except OSError as error:
            raise cannot_write(path, error, what="made") from error
        if occupied:
            raise ConfigError(f"{path}: is not empty; name a new folder with --out")
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def probe_phase(self) -> "RunFolder":
        """The run of the probes that `walkaway demo` sends after its load."""
        return RunFolder(self.path / "probe")

    @property
    def has_arms(self) -> bool:
        return self.rounds.is_dir()

    def runs(self) -> list[Path]:
        found = self.rounds.iterdir() if self.has_arms else ()
        return sorted(found, key=lambda path: int(path.name.partition("-")[0]))

    def first_runs(self) -> "dict[str, RunFolder]":
        first: dict[str, RunFolder] = {}
        for path in self.runs():
            first.setdefault(path.name.partition("-")[2], RunFolder(path))
        return first

    def judged_runs(self) -> "list[RunFolder]":
        return [RunFolder(path) for path in self.runs() if (path / "summary.json").is_file()]

    def may_have_requests(self) -> bool:
        """Does it hold any, as rows or as shards? True also for an unreadable file."""
        if self.has_arms:
            return any(RunFolder(path).may_have_requests() for path in self.runs())
        path = self._table("requests")
        if not path.is_file():
            return any(shard.stat().st_size for shard in self.shards.glob("requests-*.ndjson"))
        from harness.store.parquet import may_have_rows

        return may_have_rows(path)

    def log(self, process: str) -> Path:
        return self.path / f"{process}.log"

    def write_manifest(self, manifest: Manifest) -> None:
        _replace(self.path / "manifest.json", msgspec.json.encode(manifest))

    def write_summary(self, summary: AnySummary) -> AnySummary:
        """Returns what was written: the summary without figures that are not finite."""
        written = finite(summary)
        content = msgspec.to_builtins(written)
        _replace(self.path / "summary.json", json.dumps(content, allow_nan=False).encode())
        return written

    def read_manifest(self) -> dict[str, Any]:
        """The manifest as it was written, perhaps by another version. Raises ConfigError."""
        return self._read_json("manifest.json")

    @property
    def repeat_command(self) -> str:
        """The shell line that repeats the run; "" if it is not known."""
        try:
            return str(self.read_manifest().get("repeat") or "")
        except ConfigError:
            return ""

    def load_manifest(self) -> Manifest:
        """Raises OtherVersionError, and ConfigError for a file that is missing or damaged."""
        content = self.read_manifest()
        self.check_version("manifest.json", content)
        try:
            return msgspec.convert(content, Manifest)
        except msgspec.ValidationError as error:
            place = self.path / "manifest.json"
            raise ConfigError(f"{place}: is not as walkaway writes it: {error}") from error

    def read_summary(self) -> Summary | ArmsSummary:
        """Raises OtherVersionError, and UnusableRunError for a file that is missing or damaged."""
        try:
            content = self._read_json("summary.json")
        except ConfigError as error:
            raise UnusableRunError(str(error), self.judged_again) from error
        self.check_version("summary.json", content)
        try:
            return as_summary(content)
        except msgspec.ValidationError as error:
            raise UnusableRunError(
                f"{self.path}: summary.json is not as walkaway writes it: {error}",
                self.judged_again,
            ) from error

    @property
    def judged_again(self) -> str:
        """The remedy for a summary that is damaged."""
        return f"the summary made again: walkaway report {self.path}"

    def check_version(self, name: str, content: Any) -> None:
        said = other_version(content)
        if said is None and name == "manifest.json" and SINCE_0_1_0 not in content:
            said = "was written before version 0.1.0, the oldest that this walkaway reads"
        if said is not None and "schema_version" not in content:
            raise UnusableRunError(
                f"{self.path / name}: is not as walkaway writes it: it has no `schema_version`",
                WHOLE_FILES if name == "manifest.json" else self.judged_again,
            )
        if said is not None:
            raise OtherVersionError(
                f"{self.path / name}: {said}",
                "the walkaway that wrote it (see its `versions`), or a new run",
            )

    def write_rows(self, rows: RunRows) -> None:
        from harness.store.parquet import write_table

        for name, record in RECORDS.items():
            write_table(self._table(name), record, getattr(rows, name))

    def unread_tables(self) -> dict[str, str]:
        """The tables that are missing or damaged, each with the reason."""
        from harness.store.parquet import why_no_table

        whys = {name: why_no_table(self._table(name), of) for name, of in RECORDS.items()}
        return {name: why for name, why in whys.items() if why is not None}

    def empty_table(self, name: str) -> str:
        """Put an empty table there, and what is there aside. Returns what was wrong, in words."""
        from harness.store.parquet import write_table

        table = self._table(name)
        was = self.put_aside(table.name)
        write_table(table, RECORDS[name], ())
        return was

    def put_aside(self, name: str) -> str:
        """Rename a damaged file, whatever it is. Returns what was wrong, in words."""
        place = self.path / name
        if not os.path.lexists(place):
            return f"{name} was missing"
        aside = place.with_name(f"{name}.damaged")
        try:
            if aside.is_dir() and not aside.is_symlink():
                shutil.rmtree(aside)
            place.replace(aside)
        except OSError as error:
            raise cannot_write(aside, error) from error
        return f"{name} is damaged, and now {aside.name}"

    def remove_shards(self) -> None:
        for shard in self.shards.glob("*.ndjson*"):
            shard.unlink()
        if self.shards.is_dir() and not any(self.shards.iterdir()):
            self.shards.rmdir()

    def write_all_requests(self, requests: "pd.DataFrame") -> None:
        requests.to_parquet(self._table("requests"), index=False, write_page_checksum=True)

    def read_sent(self) -> "list[Sent]":
        from harness.store.parquet import read_sent

        return read_sent(self._table("requests"))

    def frames(self, *, with_tokens: bool = True) -> "RunFrames":
        """Read the whole run, or all but its token lists, which are most of a large run.

        Raises ConfigError if a file is missing or damaged.
        """
        from harness.store.frames import RunFrames
        from harness.store.parquet import TOKEN_LISTS

        without = () if with_tokens else TOKEN_LISTS
        tables = {name: self.frame(name, without) for name in RECORDS}
        probes = self.probe_phase
        has_probes = probes._table("requests").is_file()
        return RunFrames(
            manifest=self.read_manifest(),
            probe_phase=probes.frame("requests", without) if has_probes else None,
            **tables,
        )

    def frame(self, name: str, without: Container[str] = ()) -> "pd.DataFrame":
        """One table. Raises ConfigError if its file is missing or damaged."""
        from harness.store.parquet import read_frame

        return read_frame(self._table(name), RECORDS[name], without=without)

    def _table(self, name: str) -> Path:
        return self.path / f"{name}.parquet"

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read: {in_words(error)}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: is not as walkaway writes it: it holds no JSON object")
        return content


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
    part.replace(path)


def open_run(path: Path) -> RunFolder:
    try:
        if not is_run(path):
            raise ConfigError(f"{path}: {_why_no_run(path)}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {in_words(error)}") from error
    return RunFolder(path)


def is_run(path: Path) -> bool:
    """It holds a file of a run, be it damaged."""
    return any(os.path.lexists(path / name) for name in FILES_OF_A_RUN)


def _why_no_run(path: Path) -> str:
    if not path.exists():
        return "there is no such folder; name a folder that `walkaway run` wrote"
    if not path.is_dir():
        return "is a file; name the run's folder"
    if (path / "conform.json").is_file():
        return "is a folder of `walkaway conform`, which has judged: see its index.html"
    if (path / "wire").is_dir():
        return "is a folder of a `walkaway conform` that was cut short: run that again"
    if (one := next(filter(is_run, sorted(path.iterdir())), None)) is not None:
        return f"is not a run's folder itself; name a run's folder in it, such as {one}"
    return f"{NO_RUN}; name a folder that `walkaway run` wrote"


def read_results(folder: RunFolder) -> tuple[dict[str, Any], Summary | ArmsSummary]:
    """Manifest and summary, both of our schema version. Raises UnusableRunError."""
    if not os.path.lexists(folder.path / "summary.json"):
        has_rows, again = folder.may_have_requests(), folder.repeat_command
        saved = f"; for what was saved of this one: walkaway report {folder.path}"
        raise UnusableRunError(
            f"{folder.path}: was cut short before it was judged: there is no summary.json",
            f"a whole run{saved if has_rows else again and f': {again}'}",
        )
    try:
        manifest = folder.read_manifest()
        folder.check_version("manifest.json", manifest)
        return manifest, folder.read_summary()
    except UnusableRunError:
        raise
    except ConfigError as error:
        raise UnusableRunError(str(error), WHOLE_FILES) from error


def as_summary(content: Any) -> Summary | ArmsSummary:
    if isinstance(content, dict) and "arms" in content:
        return msgspec.convert(content, ArmsSummary)
    return msgspec.convert(content, Summary)


def other_version(content: Any) -> str | None:
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found == SCHEMA_VERSION:
        return None
    return f"has schema version {found}, and this walkaway reads version {SCHEMA_VERSION}"
