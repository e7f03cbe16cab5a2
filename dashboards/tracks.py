"""One figure over many runs: its points, which of them may be joined, and what is expected next.

A line joins two neighbours only where their figures can be compared: of the same demand, model and
slots, without or with the same injected faults, by the same method; and where the figure is a time,
of one machine, which a simulated model's step cost belongs to. Versions and other settings of the
server break no line: what they do to the figures is what a trend is looked at for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboards.nights import Group, Night
from harness.analysis.comparable import (
    Conditions,
    depends_on_machine,
    other_machine,
    why_not_conditions,
    why_not_figures,
)
from harness.analysis.compare import Limits, expected, limits_of
from harness.metrics import METRICS, headline_figures
from harness.records import Metric

TRACKED: Final = [one.name for one in METRICS.values() if one.good is not None]
# Of what the server tells of itself: these make its speed, as the machine does.
OF_SPEED: Final = ("runner", "step_cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The figure in one run. `config`: what the server of this side tells of itself. `more_than`:
    it is known only to exceed that, and `value` is None."""

    night: Night
    conditions: Conditions
    config: Mapping[str, Any]
    metric: Metric
    counting: str | None
    value: float | None
    more_than: float | None
    limits: Limits | None

    @property
    def is_joined(self) -> bool:
        return self.value is not None and self.night.flaw is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A figure of one side (an arm; "run" where there are none) in every run that knows it."""

    metric: str
    figure: str
    unit: str
    side: str
    points: tuple[Point, ...]

    def stretches(self) -> list[list[Point]]:
        """Points that may be joined, stretch by stretch."""
        found: list[list[Point]] = []
        for point in self.points:
            if not point.is_joined:
                continue
            if found and may_be_joined(self.metric, found[-1][-1], point):
                found[-1].append(point)
            else:
                found.append([point])
        return found

    def expected(self) -> Limits | None:
        """Where the newest run's value was to be expected by those that it may be joined with."""
        stretches = self.stretches()
        if not stretches or stretches[-1][-1] is not self.points[-1]:
            return None
        return expected([point.value for point in stretches[-1][:-1] if point.value is not None])


def may_be_joined(metric: str, before: Point, after: Point) -> bool:
    """Whether the figures of two runs can be compared."""
    first, second = before.conditions, after.conditions
    counting = before.counting, after.counting
    if why_not_figures(metric, before.metric, after.metric, counting):
        return False
    if why_not_conditions(second, first):
        return False
    if _faults(before.config) != _faults(after.config):
        return False
    is_as_fast = other_machine(second, first) is None and all(
        before.config.get(key) == after.config.get(key) for key in OF_SPEED
    )
    return is_as_fast or not depends_on_machine(after.metric.unit)


def _faults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are on: a newer engine knows more of them."""
    return {name: value for name, value in (config.get("faults") or {}).items() if value}


def tracks(group: Group) -> dict[tuple[str, str], list[Track]]:
    """By metric and figure, a track for each side that has it."""
    metrics = {
        f"{number} {side}": of.metrics
        for number, night in enumerate(group.nights)
        for side, of in night.measured.sides.items()
    }
    sides = list(dict.fromkeys(side for one in group.nights for side in one.measured.sides))
    found = {}
    for metric, figure in headline_figures(metrics, TRACKED):
        if metric in TRACKED:
            of = [_track(group.nights, side, metric, figure) for side in sides]
            found[metric, figure] = [one for one in of if one.points]
    return {key: of for key, of in found.items() if of}


def _track(nights: Sequence[Night], side: str, metric: str, figure: str) -> Track:
    points = tuple(_points(nights, side, metric, figure))
    unit = points[-1].metric.unit if points else ""
    return Track(metric=metric, figure=figure, unit=unit, side=side, points=points)


def _points(nights: Sequence[Night], side: str, metric: str, figure: str) -> Iterator[Point]:
    for night in nights:
        of = night.measured.sides.get(side)
        one = of.metrics.get(metric) if of is not None else None
        if of is None or one is None:
            continue
        value, more_than = getattr(one, figure), one.lower_bounds.get(figure)
        if value is not None or more_than is not None:
            target = night.manifests[side].get("target") or {}
            yield Point(
                night=night,
                conditions=of.conditions,
                config=target.get("config") or {},
                metric=one,
                counting=of.token_counting,
                value=value,
                more_than=None if value is not None else more_than,
                limits=None if value is None else limits_of(one, figure),
            )
