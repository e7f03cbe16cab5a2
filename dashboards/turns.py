"""What got worse in a trend, or better, and since when: the newest change of each figure's level.

`harness.compare.change` says what a change is. It is looked for among the newest runs that can be
compared with one another: another machine or load begins a new search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboards.run_history import PastRun, Point, Track
from harness.compare.change import FEWEST_RUNS, RunReading, last_change
from harness.compare.pairs import Standing
from harness.formatting import DASH, SIGNS, quantity, times
from harness.gate.judge import breaks
from harness.gate.limits import RUN, Limit
from harness.metrics import METRICS, titled

Key = tuple[str, str]  # metric and figure


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendTurn:
    """`before`: the points at the level before, `since`: those at the level of today. The levels
    are median runs.
    """

    track: Track
    before: Sequence[Point]
    since: Sequence[Point]
    level_before: RunReading
    level_since: RunReading

    @property
    def key(self) -> Key:
        return self.track.metric, self.track.figure

    @property
    def name(self) -> str:
        return "-".join(self.key)

    @property
    def is_worse(self) -> bool:
        is_rise = self.level_since.value > self.level_before.value
        return is_rise == (METRICS[self.track.metric].better == "less")

    @property
    def word(self) -> str:
        return (Standing.WORSE if self.is_worse else Standing.BETTER).signed

    @property
    def title(self) -> str:
        name = titled(self.track.metric, self.track.figure)
        return name if self.track.side == RUN else f"{name}, {self.track.side}"

    @property
    def levels(self) -> tuple[str, str]:
        bound = self.since[-1].metric.bound
        return self._level(self.level_before, bound), self._level(self.level_since, bound)

    def _level(self, level: RunReading, bound: str) -> str:
        sign = "> " if level.is_more else SIGNS.get(bound, "")
        return f"{sign}{quantity(level.value, self.track.unit)}"

    @property
    def times(self) -> str:
        before, since = self.level_before, self.level_since
        if min(before.value, since.value) <= 0 or before.is_more or since.is_more:
            return DASH
        return times(since.value / before.value)


def turns(found: Mapping[Key, Sequence[Track]]) -> list[TrendTurn]:
    """What got worse comes first."""
    all_turns = [one for of in found.values() for track in of if (one := _turn(track)) is not None]
    return sorted(all_turns, key=lambda one: not one.is_worse)


def _turn(track: Track) -> TrendTurn | None:
    points = newest(track)
    if METRICS[track.metric].better == "neither":
        return None
    change = last_change([_reading(one) for one in points])
    if change is None:
        return None
    return TrendTurn(
        track=track,
        before=points[change.start : change.first],
        since=points[change.first :],
        level_before=change.before,
        level_since=change.since,
    )


def newest(track: Track) -> tuple[Point, ...]:
    return track.stretches[-1] if track.stretches else ()


def _reading(point: Point) -> RunReading:
    if point.value is not None:
        return RunReading(point.value, point.limits)
    return RunReading(point.more_than or 0.0, is_more=True)


def can_be_judged(found: Mapping[Key, Sequence[Track]]) -> bool:
    return any(len(newest(track)) >= FEWEST_RUNS for of in found.values() for track in of)


def broken_limits(runs: Sequence[PastRun], limits: Sequence[Limit]) -> dict[str, list[Limit]]:
    """The limits that each run is beyond, by its name, as the gate judges it."""
    broken = {run.name: [one for one in limits if _is_beyond(run, one)] for run in runs}
    return {name: of for name, of in broken.items() if of}


def _is_beyond(run: PastRun, limit: Limit) -> bool:
    return limit.arm in run.measured.sides and breaks(run.measured, limit)
