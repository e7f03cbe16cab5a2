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
from harness.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One run. `manifests`: by side (as in `measured`), that of a run of it, which knows its server
    and its own load. `flaw`: why its figures are not to be joined with others, if they are not."""

    name: str
    at: datetime
    measured: Measured
    workload: Mapping[str, Any]
    manifests: Mapping[str, Mapping[str, Any]]

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
            if said := list(_changes(before, night)):
                found.append((night, "; ".join(said)))
        return found


def _changes(before: Night, after: Night) -> Iterator[str]:
    """What the manifests of two runs say; what only some arms say, with their names."""
    both = [side for side in after.manifests if side in before.manifests]
    sides: dict[str, list[str]] = {}
    for side in both:
        for one in manifest_remarks(before.manifests[side], after.manifests[side]):
            sides.setdefault(one.text, []).append(side)
    for text, of in sides.items():
        yield text if of == both else f"{', '.join(of)}: {text}"


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
    measured, folder = read_run(path), RunFolder(path)
    manifest = folder.read_manifest()
    try:
        at = datetime.fromisoformat(measured.created_at)
    except ValueError as error:
        raise ConfigError(f"{path}: created_at is no date: {measured.created_at}") from error
    return Night(
        name=path.name,
        at=at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC),
        measured=measured,
        workload=manifest["workload"],
        manifests=_of_sides(folder, manifest, list(measured.sides)),
    )


def _of_sides(
    folder: RunFolder, manifest: Mapping[str, Any], sides: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Of an arm, that of its first round, where the rounds were kept; else the run's own. Another
    seed every night is no change."""
    first: dict[str, Path] = {}
    for path in folder.runs() if folder.has_arms else []:
        first.setdefault(path.name.partition("-")[2], path)
    return {
        side: (RunFolder(first[side]).read_manifest() if side in first else dict(manifest))
        | {"seed": None}
        for side in sides
    }


def _groups(nights: Sequence[Night]) -> Iterator[Group]:
    by_key: dict[tuple[str, str, str], list[Night]] = {}
    for night in nights:
        of = night.measured.conditions
        key = (of.workload, of.engine or "not known", of.model or "not known")
        by_key.setdefault(key, []).append(night)
    for (workload, engine, model), those in sorted(by_key.items()):
        in_order = sorted(those, key=lambda night: (night.at, night.name))
        yield Group(workload=workload, engine=engine, model=model, nights=tuple(in_order))
