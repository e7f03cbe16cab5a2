"""What a trend is made from: all runs of a folder, by question and server, in the order of time.

Only small files are read. What is no run, or a damaged one, keeps nobody from being drawn: it is
listed with its reason. Runs of one question against one kind of server and model are a group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.analysis.comparable import manifest_remarks
from harness.errors import ConfigError
from harness.gate.measured import Measured
from harness.gate.run_folder import read_run
from harness.store import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One run. `flaw`: why its figures are not to be joined with others, if they are not."""

    name: str
    at: datetime
    measured: Measured
    manifest: Mapping[str, Any]

    @property
    def flaw(self) -> str | None:
        if self.measured.invalid:
            return f"invalid: {self.measured.invalid[0]}"
        if self.measured.is_wedged:
            return "wedged: the server answered nobody in the end"
        if self.measured.status != "complete":
            return self.measured.status.replace("_", " ")
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs with one question of one kind of server and model, the oldest first."""

    workload: str
    engine: str
    model: str
    nights: tuple[Night, ...]

    def changes(self) -> list[tuple[Night, str]]:
        """Each run of which the manifest says that it is not like the one before, and how."""
        found = []
        for before, night in pairwise(self.nights):
            said = [one.text for one in manifest_remarks(before.manifest, night.manifest)]
            if said:
                found.append((night, "; ".join(said)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Nights:
    """All of a folder. `skipped`: what is not in any group, by name, and why."""

    groups: tuple[Group, ...]
    skipped: tuple[tuple[str, str], ...]


def read_nights(folder: Path) -> Nights:
    """Raises ConfigError where the folder itself cannot be read."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from error
    nights, skipped = [], []
    for path in paths:
        try:
            nights.append(read_night(path))
        except ConfigError as error:
            skipped.append((path.name, str(error)))
    return Nights(groups=tuple(_groups(nights)), skipped=tuple(skipped))


def read_night(path: Path) -> Night:
    """Raises ConfigError where the run cannot be read."""
    measured = read_run(path)
    try:
        at = datetime.fromisoformat(measured.created_at)
    except ValueError as error:
        raise ConfigError(f"{path}: created_at is no date: {measured.created_at}") from error
    return Night(
        name=path.name,
        at=at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC),
        measured=measured,
        manifest=_without_seed(RunFolder(path)),
    )


def _without_seed(folder: RunFolder) -> dict[str, Any]:
    """The manifest, with the server where only the runs of the arms know it. Another seed every
    night is no change."""
    manifest = folder.read_manifest()
    if manifest.get("target") is None and folder.has_arms:
        first = RunFolder(folder.runs()[0])
        manifest["target"] = first.read_manifest().get("target")
    return manifest | {"seed": None}


def _groups(nights: Sequence[Night]) -> Iterator[Group]:
    by_key: dict[tuple[str, str, str], list[Night]] = {}
    for night in nights:
        of = night.measured.conditions
        key = (of.workload, of.engine or "not known", of.model or "not known")
        by_key.setdefault(key, []).append(night)
    for (workload, engine, model), those in sorted(by_key.items()):
        in_order = sorted(those, key=lambda night: (night.at, night.name))
        yield Group(workload=workload, engine=engine, model=model, nights=tuple(in_order))
