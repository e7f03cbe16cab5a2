"""All runs of a folder over time: by question and server, and each figure as a track.

A line joins two neighbours only if their figures can be compared: the same demand, model, number
of slots, injected faults and method, and for a figure in seconds the same machine. Versions and
other settings of the server break no line: a trend exists to show their effect on the figures.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from harness.compare.comparable import Conditions, ends_line, manifest_remarks, why_not_figures
from harness.compare.pairs import Limits, limits_of
from harness.errors import ConfigError, in_words
from harness.gate.judge import Measured
from harness.gate.run import read_run
from harness.metrics import METRICS, headline_figures
from harness.records import Metric
from harness.store.run_folder import NO_RUN, RunFolder, is_run

TRACKED: Final = [one.name for one in METRICS.values() if one.good is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One run. `manifests`: for each side (as in `measured`) the manifest of its first run, which
    has its server and its own load. Without arms, or if the rounds were not kept, it is the
    manifest of the run itself.
    `flaw`: why its figures are not joined with others.
    """

    name: str
    at: datetime
    measured: Measured
    workload: Mapping[str, Any]
    manifests: Mapping[str, Mapping[str, Any]]

    @property
    def flaw(self) -> str | None:
        if self.measured.invalid:
            return f"invalid: {self.measured.invalid[0]}"
        if self.measured.is_silent:
            return "after the load the server answered no request"
        if self.measured.status != "complete":
            return self.measured.status.replace("_", " ")
        return None


@dataclass(frozen=True, slots=True)
class RunGroup:
    workload: str
    engine: str
    model: str
    runs: tuple[PastRun, ...]

    def changes(self) -> list[tuple[PastRun, str]]:
        found = []
        for before, run in pairwise(self.runs):
            if said := list(_changes(before, run)):
                found.append((run, "; ".join(said)))
        return found


def _changes(before: PastRun, after: PastRun) -> Iterator[str]:
    both = [side for side in after.manifests if side in before.manifests]
    sides: dict[str, list[str]] = {}
    for side in both:
        for one in manifest_remarks(before.manifests[side], after.manifests[side]):
            sides.setdefault(one.text, []).append(side)
    for text, of in sides.items():
        yield text if of == both else f"{', '.join(of)}: {text}"


def read_history(
    folder: Path, *, watch: Callable[[int, int], object] = lambda _done, _num: None
) -> tuple[list[RunGroup], list[tuple[str, str]]]:
    """The runs by question and server, and what was skipped, each with the reason. `watch` is
    called before each run, with how many were read and how many there are."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {in_words(error)}") from error
    by_key: dict[tuple[str, str, str], list[PastRun]] = {}
    skipped = []
    for number, path in enumerate(paths):
        watch(number, len(paths))
        if not is_run(path):
            skipped.append((path.name, f"{path}: {NO_RUN}"))
            continue
        try:
            run = read_past_run(path)
        except ConfigError as error:
            skipped.append((path.name, str(error)))
            continue
        of = run.measured.conditions
        key = (of.workload, of.engine or "not known", of.model or "not known")
        by_key.setdefault(key, []).append(run)
    groups = [
        RunGroup(*key, runs=tuple(sorted(runs, key=lambda run: (run.at, run.name))))
        for key, runs in sorted(by_key.items())
    ]
    return groups, skipped


def read_past_run(path: Path) -> PastRun:
    measured, folder = read_run(path), RunFolder(path)
    manifest = folder.read_manifest()
    try:
        at = datetime.fromisoformat(measured.created_at)
    except ValueError as error:
        raise ConfigError(f"{path}: created_at is no date: {measured.created_at}") from error
    first = folder.first_runs()
    return PastRun(
        name=path.name,
        at=at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC),
        measured=measured,
        workload=manifest["workload"],
        manifests={  # another seed is no change
            side: (first[side].read_manifest() if side in first else manifest) | {"seed": None}
            for side in measured.sides
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The figure in one run. `config`: the settings of this side's server. `more_than`: the figure
    is known only to exceed this number, and `value` is None.
    """

    run: PastRun
    conditions: Conditions
    config: Mapping[str, Any]
    metric: Metric
    counting: str | None
    value: float | None
    more_than: float | None
    limits: Limits | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """`stretches`: the points of sound runs, in parts in which all can be compared."""

    metric: str
    figure: str
    unit: str
    side: str
    points: tuple[Point, ...]
    stretches: tuple[tuple[Point, ...], ...]


def _stretches(metric: str, points: Iterable[Point]) -> tuple[tuple[Point, ...], ...]:
    found: list[list[Point]] = []
    for point in points:
        if point.run.flaw is not None:
            continue
        if found and may_be_joined(metric, found[-1][-1], point):
            found[-1].append(point)
        else:
            found.append([point])
    return tuple(tuple(part) for part in found)


def may_be_joined(metric: str, before: Point, after: Point) -> bool:
    counting, configs = (before.counting, after.counting), (before.config, after.config)
    if why_not_figures(metric, before.metric, after.metric, counting):
        return False
    return not ends_line(before.conditions, after.conditions, configs, after.metric.unit)


def tracks(runs: Sequence[PastRun]) -> dict[tuple[str, str], list[Track]]:
    metrics = {
        f"{number} {side}": of.metrics
        for number, run in enumerate(runs)
        for side, of in run.measured.sides.items()
    }
    sides = list(dict.fromkeys(side for one in runs for side in one.measured.sides))
    found = {}
    for metric, figure in headline_figures(metrics, TRACKED):
        if metric not in TRACKED:
            continue
        points = {side: tuple(_points(runs, side, metric, figure)) for side in sides}
        drawn = [
            Track(
                metric=metric,
                figure=figure,
                unit=METRICS[metric].unit,
                side=side,
                points=of_side,
                stretches=_stretches(metric, of_side),
            )
            for side, of_side in points.items()
            if of_side
        ]
        if drawn:
            found[metric, figure] = drawn
    return found


def _points(runs: Sequence[PastRun], side: str, metric: str, figure: str) -> Iterator[Point]:
    for run in runs:
        of = run.measured.sides.get(side)
        if of is None or metric not in of.metrics:
            continue
        one = of.metrics[metric]
        value, more_than = getattr(one, figure), one.lower_bounds.get(figure)
        if value is not None or more_than is not None:
            target = run.manifests[side].get("target") or {}
            yield Point(
                run=run,
                conditions=of.conditions,
                config=target.get("config") or {},
                metric=one,
                counting=of.token_counting,
                value=value,
                more_than=None if value is not None else more_than,
                limits=None if value is None else limits_of(one, figure),
            )
