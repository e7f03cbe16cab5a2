"""A run's folder: the only place that knows which file holds what.

Parquet schemas are derived from the records, so a file without rows still has its columns. The
load's NDJSON shards are removed only once their rows are on the disk as parquet. Small JSON files
are replaced atomically: a reader sees the old one or the new one, never a half.
"""

import json
import types
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self, Union, get_args, get_origin, get_type_hints

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError
from harness.records import (
    SCHEMA_VERSION,
    ClientSample,
    CpuSample,
    GpuSample,
    LifecycleEvent,
    MetricSample,
    RequestRow,
    Role,
    StepRow,
)
from harness.store.frames import RunFrames
from harness.store.manifest import Manifest

RECORDS: Final[dict[str, type[msgspec.Struct]]] = {
    "requests": RequestRow,
    "lifecycle": LifecycleEvent,
    "steps": StepRow,
    "server_metrics": MetricSample,
    "cpu": CpuSample,
    "gpu": GpuSample,
    "client": ClientSample,
}

ROWS_AT_ONCE: Final = 10_000

# As many as there are tokens: in memory they stay as arrow has them, without an object for each.
TOKEN_LISTS: Final = {
    "token_times_ns": pa.list_(pa.int64()),
    "event_tokens": pa.list_(pa.int32()),
}

# Step maps are stored as aligned lists: parquet's own map type reads back as a list of pairs.
STEP_LISTS: Final = [
    pa.field("request_ids", pa.list_(pa.string()), nullable=False),
    pa.field("scheduled_tokens", pa.list_(pa.int32()), nullable=False),
    pa.field("sampled_tokens", pa.list_(pa.int32()), nullable=False),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """All rows of a run, which may come one by one: what the load wrote, and what the collector
    gathered."""

    requests: Iterable[RequestRow] = ()
    client: Iterable[ClientSample] = ()
    lifecycle: Iterable[LifecycleEvent] = ()
    steps: Iterable[StepRow] = ()
    server_metrics: Iterable[MetricSample] = ()
    cpu: Iterable[CpuSample] = ()
    gpu: Iterable[GpuSample] = ()


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the folder, ready for a load's rows. Raises ConfigError like `claim`."""
        folder = cls.claim(path)
        folder.shards.mkdir()
        return folder

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Make the folder. One that holds anything already is refused: runs do not mix."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            occupied = any(path.iterdir())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made: {error}") from error
        if occupied:
            raise ConfigError(f"{path}: is not empty; name a new folder with --out")
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def shards(self) -> Path:
        return self.path / "shards"

    @property
    def load_plan(self) -> Path:
        return self.path / "load_plan.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def rounds(self) -> Path:
        """Where the runs of a workload with arms lie, each in a folder of its own."""
        return self.path / "rounds"

    @property
    def has_arms(self) -> bool:
        return self.rounds.is_dir()

    def runs(self) -> list[Path]:
        """The folders of the runs of all rounds and arms, round by round."""
        return sorted(self.rounds.iterdir(), key=lambda path: int(path.name.partition("-")[0]))

    def may_have_requests(self) -> bool:
        """Does it hold any, as rows or as a load left them? One that cannot be read may."""
        parts = [RunFolder(path) for path in self.runs()] if self.has_arms else [self]
        return any(part._may_have_requests() for part in parts)

    def _may_have_requests(self) -> bool:
        path = self.path / "requests.parquet"
        if not path.is_file():
            return any(shard.stat().st_size for shard in self.shards.glob("requests-*.ndjson"))
        try:
            return bool(pq.read_metadata(path).num_rows)
        except (OSError, pa.ArrowException):
            return True

    @property
    def traceback(self) -> Path:
        return self.path / "traceback.txt"

    def log(self, process: str) -> Path:
        return self.path / f"{process}.log"

    def write_manifest(self, manifest: Manifest) -> None:
        _replace(self.path / "manifest.json", msgspec.json.encode(manifest))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        _replace(self.path / "summary.json", json.dumps(summary, allow_nan=False).encode())

    def read_manifest(self) -> dict[str, Any]:
        return self._read_json("manifest.json")

    def read_summary(self) -> dict[str, Any]:
        return self._read_json("summary.json")

    def write_rows(self, rows: RunRows) -> None:
        """Write every parquet file, with no more than a part of `rows` in memory."""
        for name in RECORDS:
            self._write_table(name, getattr(rows, name))

    def remove_shards(self) -> None:
        """To be called once their rows are on the disk."""
        for shard in self.shards.glob("*.ndjson*"):
            shard.unlink()
        if self.shards.is_dir() and not any(self.shards.iterdir()):
            self.shards.rmdir()

    def write_all_requests(self, requests: pd.DataFrame) -> None:
        """All rows of all arms, for whoever wants them in one file."""
        path = self.path / "requests.parquet"
        requests.to_parquet(path, index=False, write_page_checksum=True)

    def frames(self) -> RunFrames:
        """Read the whole run. Raises ConfigError where a file is missing or damaged."""
        frames = {name: self._read_frame(name) for name in RECORDS}
        return RunFrames(manifest=self.read_manifest(), **frames)

    def frames_without_tokens(self) -> RunFrames:
        """The same without the times of single tokens, which are most of a large run."""
        frames = {name: self._read_frame(name, without=TOKEN_LISTS) for name in RECORDS}
        return RunFrames(manifest=self.read_manifest(), **frames)

    def read_sent(self) -> list[tuple[int, int, int]]:
        """Of each user's request: user, intended start and end, on the monotonic clock (ns)."""
        names = ["user", "intended_start_ns", "ended_ns"]
        is_users = [("role", "=", Role.USER.value)]
        table = pq.read_table(self.path / "requests.parquet", columns=names, filters=is_users)
        columns = [table[name].to_pylist() for name in names]
        return list(zip(*columns, strict=True))

    def _write_table(self, name: str, rows: Iterable[msgspec.Struct]) -> None:
        schema = schema_of(RECORDS[name])
        path = self.path / f"{name}.parquet"
        part = path.with_suffix(".part")
        some_left = iter(rows)
        with pq.ParquetWriter(part, schema, write_page_checksum=True) as writer:
            while some := list(islice(some_left, ROWS_AT_ONCE)):
                columns = zip(_columns(RECORDS[name], some), schema, strict=True)
                arrays = [pa.array(column, type=field.type) for column, field in columns]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        part.replace(path)

    def _read_frame(self, name: str, *, without: Container[str] = ()) -> pd.DataFrame:
        """Column by column, so that of a large run little more than its frame is held at a time."""
        path = self.path / f"{name}.parquet"
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                fields = [field for field in file.schema_arrow if field.name not in without]
                columns = {field.name: _read_column(file, field) for field in fields}
        except (OSError, pa.ArrowInvalid) as error:
            raise ConfigError(
                f"{path}: cannot be read: {error}; is {self.path} a finished run's folder?"
            ) from error
        return pd.DataFrame(columns)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: cannot be read: {error}; is {self.path} a run's folder?"
            ) from error
        return content


def name_run(now: datetime, workload: str, suffix: str) -> str:
    """`20261121-053012-demo-4f2a`: sorts by time, says what it was, unique."""
    return f"{now:%Y%m%d-%H%M%S}-{workload}-{suffix}"


def schema_of(record: type[msgspec.Struct]) -> pa.Schema:
    """The parquet schema of a record: its fields, null only where the record allows None."""
    hints = get_type_hints(record)
    fields = [
        _field(name, hints[name])
        for name in record.__struct_fields__
        if not (record is StepRow and name in ("scheduled", "sampled"))
    ]
    return pa.schema([*fields, *STEP_LISTS] if record is StepRow else fields)


def _field(name: str, hint: Any) -> pa.Field:
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = [part for part in get_args(hint) if part is not type(None)]
        return pa.field(name, _arrow_type(inner), nullable=True)
    return pa.field(name, _arrow_type(hint), nullable=False)


def _arrow_type(hint: Any) -> pa.DataType:
    if get_origin(hint) is list:
        return pa.list_(_arrow_type(get_args(hint)[0]))
    if issubclass(hint, str):
        return pa.string()
    return {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}[hint]


def _read_column(file: pq.ParquetFile, field: pa.Field) -> pd.Series:
    kind, groups = TOKEN_LISTS.get(field.name, field.type), range(file.num_row_groups)
    parts = [file.read_row_group(n, columns=[field.name])[0].cast(kind) for n in groups]
    whole = pa.chunked_array([chunk for part in parts for chunk in part.chunks], type=kind)
    if field.name in TOKEN_LISTS:
        return pd.Series(pd.arrays.ArrowExtensionArray(whole))
    column: pd.Series = whole.to_pandas(types_mapper=_as_nullable if field.nullable else None)
    return column


def _as_nullable(kind: pa.DataType) -> Any:
    return pd.Int64Dtype() if pa.types.is_int64(kind) else None


def _columns(record: type[msgspec.Struct], rows: Sequence[Any]) -> list[list[Any]]:
    """The rows' values, one list a field of `schema_of(record)`."""
    plain = [field.name for field in schema_of(record) if field not in STEP_LISTS]
    columns = [[_plain(getattr(row, name)) for row in rows] for name in plain]
    if record is StepRow:
        columns.append([list(row.scheduled) for row in rows])
        columns.append([list(row.scheduled.values()) for row in rows])
        columns.append([[row.sampled.get(r, 0) for r in row.scheduled] for row in rows])
    return columns


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
    part.replace(path)


WHOLE_FILES: Final = "a run whose files are whole"


class UnusableRunError(ConfigError):
    """A run that cannot be read as it is: the `reason`, and what would help (`remedy`)."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; what would help: {remedy}")
        self.reason = reason
        self.remedy = remedy


def open_run(path: Path) -> RunFolder:
    """Raises ConfigError where `path` is no run's folder."""
    if not (path / "manifest.json").is_file():
        raise ConfigError(f"{path}: is not a run's folder (it has no manifest.json)")
    return RunFolder(path)


def read_judged(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and summary, both of our schema version. Raises UnusableRunError."""
    if not (folder.path / "summary.json").is_file():
        saved = f"; for what was saved of this one: walkaway report {folder.path}"
        raise UnusableRunError(
            f"{folder.path}: was cut short before it was judged: there is no summary.json",
            f"a whole run{saved if folder.may_have_requests() else ''}",
        )
    try:
        manifest, summary = folder.read_manifest(), folder.read_summary()
    except ConfigError as error:
        raise UnusableRunError(str(error), WHOLE_FILES) from error
    for name, content in (("manifest.json", manifest), ("summary.json", summary)):
        if said := other_version(content):
            raise UnusableRunError(
                f"{folder.path / name}: {said}",
                "the walkaway that wrote it (see its `versions`), or a new run",
            )
    return manifest, summary


def other_version(content: Any) -> str | None:
    """Said of the content of a file that another schema version wrote; None: it is of ours."""
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found == SCHEMA_VERSION:
        return None
    return f"has schema version {found}, and this walkaway reads version {SCHEMA_VERSION}"
