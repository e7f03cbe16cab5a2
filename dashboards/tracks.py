"""One figure over many runs: its points, which of them may be joined, and what is expected next.

A line joins two neighbours only where their figures can be compared: of the same demand, model and
slots, by the same method, and of one machine where the figure is a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.nights import Group, Night
from harness.analysis.expected import expected
from harness.analysis.figure_pairs import Limits, limits_of, unlike
from harness.gate.baseline import depends_on_machine, other_machine, why_not_comparable
from harness.headlines import headline_figures
from harness.records import Metric

# The metrics that are followed, and what is good.
TRACKED: Final = {
    "cancel_latency_s": "flat, at one or two steps of the engine.",
    "cancel_latency_steps": "flat, at one or two; it does not depend on the machine.",
    "ghost_rate": "0 in every run.",
    "wasted_tokens": "flat, at what was on its way and the step in flight.",
    "leaked_slots": "0 in every run.",
    "leaked_blocks": "0 in every run.",
    "slot_recovery_s": "flat, near the wait for an unloaded server.",
    "slot_refill_s": "flat, far below a step.",
    "ttft_s": "flat: those who stay do not pay for those who leave.",
    "itl_s": "flat, at about a step.",
    "throughput_tps": "flat, or rising.",
    "goodput_rps": "flat, or rising.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The figure in one run. `more_than`: it is known only to exceed that, and `value` is None."""

    night: Night
    metric: Metric
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
            if found and may_be_joined(found[-1][-1], point, self.unit):
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


def may_be_joined(before: Point, after: Point, unit: str) -> bool:
    """Whether the figures of two runs can be compared."""
    first, second = before.night.measured.conditions, after.night.measured.conditions
    if unlike(before.metric, after.metric) or why_not_comparable(second, first):
        return False
    return not (depends_on_machine(unit) and other_machine(second, first))


def tracks(group: Group) -> dict[tuple[str, str], list[Track]]:
    """By metric and figure, a track for each side that has it."""
    metrics = {
        f"{number} {side}": of.metrics
        for number, night in enumerate(group.nights)
        for side, of in night.measured.sides.items()
    }
    sides = list(dict.fromkeys(side for one in group.nights for side in one.measured.sides))
    found = {}
    for metric, figure in headline_figures(metrics, list(TRACKED)):
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
        if one is None:
            continue
        value, more_than = getattr(one, figure), one.lower_bounds.get(figure)
        if value is not None or more_than is not None:
            yield Point(
                night=night,
                metric=one,
                value=value,
                more_than=None if value is not None else more_than,
                limits=None if value is None else limits_of(one, figure),
            )
