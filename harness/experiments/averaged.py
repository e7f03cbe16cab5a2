"""What leaves at random moments do to a reading that other users move, too: the average over them.

Who else comes and goes does not depend on our moments, so in the average over leaves only our own
step is left: its place is the time from the leave to the fall, its depth the share of the leaves
that had any effect. Readings are moments, not holds: between two of them a straight line is drawn,
which moves no fall to either side, so that neither a poll nor a bin makes the place late.

The other users are all but a random walk, so levels are averaged over a short time on either side
of a fall, and no slope is fitted within a window: it would take most of what a leave shows. A
drifting load is seen in the levels before the leaves, over the whole time, and taken off.

The depth is read at a place that the other leaves gave (five groups in turn). The place of the
deepest fall is that of the worst luck, too: read there, noise alone has a depth.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from harness.intervals import Interval, t_quantile

Array = NDArray[np.float64]

FEWEST: Final = 5  # leaves: of fewer nothing is said
_GRID_S: Final = 0.005
_SHORTEST_LEVEL_S: Final = 0.08
LEVEL_STEPS: Final = 4
_GROUPS: Final = 5
_DRAWS: Final = 400
_MISSED: Final = 6  # polls in a row without a reading, and the window is left out


class LeaveWindow(NamedTuple):
    """The times around t0, in seconds. `poll_s`: between two readings. `level_s`: over which a
    level is averaged. `after_s`: the longest time from a leave to its fall that is looked for."""

    poll_s: float
    level_s: float
    after_s: float

    @classmethod
    def of(
        cls, *, poll_s: float, step_s: float, after_s: float, level_steps: int = LEVEL_STEPS
    ) -> Self:
        level_s = max(2 * poll_s, level_steps * step_s, _SHORTEST_LEVEL_S)
        return cls(poll_s, level_s, after_s)

    @property
    def before_s(self) -> float:
        """The time before t0 in which nothing of ours may begin."""
        return self.poll_s + self.level_s

    @property
    def whole_after_s(self) -> float:
        """The time after t0 in which nothing of ours may begin or end by itself."""
        return self.after_s + self.poll_s + self.level_s


class Leave(NamedTuple):
    """`streams` were asked for at `asked_s`, ran from `began_s` on, and left together at `t0_s`;
    nothing else of ours came or went meanwhile."""

    asked_s: float
    began_s: float
    t0_s: float
    streams: int = 1


def arrays(columns: Iterable[Sequence[float]]) -> tuple[Array, Array]:
    """The times and values of `Readings.columns`."""
    times_s, values = map(np.asarray, columns)
    return times_s, values


class MeanEstimate(NamedTuple):
    """A mean of `n` values and its standard error."""

    mean: float
    error: float
    n: int

    @classmethod
    def of(cls, values: Array) -> Self:
        return cls(
            float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5, len(values)
        )

    def interval(self, level: float = 0.95) -> Interval:
        half = t_quantile((1 + level) / 2, self.n - 1) * self.error
        return Interval(self.mean - half, self.mean + half)


class Averaged(NamedTuple):
    """`place_s`: from t0 to the fall, with the interval of 95 %. `freed`: the share of the leaving
    streams that had gone from the reading between t0 and `seen_by_s` after it. `at_once`: the share
    that went right at the place, which the others disturb less; never more than went in all.
    `at_last`: the share that had gone by the window's end, which the others disturb more.
    `control`: `freed` at random moments without a leave, where there was room; it should be 0.
    `seen`: by how much the reading rose as a stream began: without that no leave can be seen."""

    leaves: int
    streams: int
    place_s: float
    place_ci95: Interval
    seen_by_s: float
    freed: MeanEstimate
    at_once: MeanEstimate
    at_last: MeanEstimate
    control: MeanEstimate | None
    seen: MeanEstimate | None


def average(
    leaves: Sequence[Leave],
    times_s: Array,
    values: Array,
    window: LeaveWindow,
    rng: np.random.Generator,
) -> Averaged | None:
    """`values`: of the reading at `times_s`, in the unit in which one stream counts 1, and in which
    a leave lowers it. None if fewer than five windows were read without a gap."""
    whole = [one for one in leaves if _is_read(one.t0_s, times_s, window)]
    if len(whole) < FEWEST:
        return None
    curves = _Curves(whole, times_s, values, window)
    place_s = curves.place(curves.mean)
    draws = rng.multinomial(len(whole), np.full(len(whole), 1 / len(whole)), _DRAWS) / len(whole)
    freed, at_once = curves.depths()
    low, high = np.percentile(curves.place(draws @ curves.by_leave), (2.5, 97.5))
    return Averaged(
        leaves=len(whole),
        streams=sum(one.streams for one in whole),
        place_s=max(0.0, float(place_s)),
        place_ci95=Interval(max(0.0, float(low)), max(0.0, float(high))),
        seen_by_s=max(0.0, float(place_s)) + window.poll_s + window.level_s,
        freed=MeanEstimate.of(freed),
        at_once=MeanEstimate.of(at_once),
        at_last=MeanEstimate.of(curves.depth_at_last()),
        control=_control(whole, max(0.0, float(place_s)), (times_s, values), window, rng),
        seen=_seen(whole, (times_s, values), window),
    )


class _Curves:
    """`by_leave`: the readings around each t0, on one grid, a stream counting 1 and without the
    drift; a row a leave."""

    def __init__(
        self, leaves: Sequence[Leave], times_s: Array, values: Array, window: LeaveWindow
    ) -> None:
        self._window = window
        self._grid = np.arange(-window.before_s, window.whole_after_s, _GRID_S)
        t0s = np.array([one.t0_s for one in leaves])
        streams = np.array([float(one.streams) for one in leaves])
        read = np.interp(self._grid + t0s[:, None], times_s, values)
        slope = _slope(t0s, self._level(read, -window.before_s))
        self.by_leave = (read - slope * self._grid) / streams[:, None]
        self.mean: Array = self.by_leave.mean(axis=0)

    def place(self, curves: Array) -> Array:
        """The deepest fall of each curve: level after less level before is least there."""
        size = max(1, round(self._window.level_s / _GRID_S))
        sums = np.concatenate([np.zeros((*curves.shape[:-1], 1)), curves.cumsum(axis=-1)], axis=-1)
        first = np.arange(size, curves.shape[-1] - size + 1)
        depth = sums[..., first + size] - 2 * sums[..., first] + sums[..., first - size]
        at_s = self._grid[first] - _GRID_S / 2
        may_be = (at_s >= -self._window.poll_s) & (at_s <= self._window.after_s)
        found: Array = at_s[may_be][depth[..., may_be].argmin(axis=-1)]
        return found

    def depths(self) -> tuple[Array, Array]:
        """The depth of each leave, at the place that the leaves of the other groups gave: from
        before t0, and from right before the place."""
        group = np.arange(len(self.by_leave)) % _GROUPS
        poll_s, level_s = self._window.poll_s, self._window.level_s
        depths = np.empty((2, len(self.by_leave)))
        for one in range(_GROUPS):
            own = self.by_leave[group == one]
            place_s = max(0.0, float(self.place(self.by_leave[group != one].mean(axis=0))))
            after = self._level(own, place_s + poll_s)
            depths[0, group == one] = self._level(own, -poll_s - level_s) - after
            depths[1, group == one] = self._level(own, place_s - poll_s - level_s) - after
        return depths[0], depths[1]

    def depth_at_last(self) -> Array:
        """The depth of each leave at the window's end: some may be let go of later than most."""
        poll_s, level_s = self._window.poll_s, self._window.level_s
        before = self._level(self.by_leave, -poll_s - level_s)
        return before - self._level(self.by_leave, self._window.after_s + poll_s)

    def _level(self, curves: Array, since_s: float) -> Array:
        first = round((since_s - self._grid[0]) / _GRID_S)
        size = max(1, round(self._window.level_s / _GRID_S))
        level: Array = curves[:, first : first + size].mean(axis=1)
        return level


def _slope(at_s: Array, levels: Array) -> float:
    """The drift of the load over the whole time, per second."""
    apart = at_s - at_s.mean()
    return float((apart * levels).sum() / (apart**2).sum())


def _is_read(t0_s: float, times_s: Array, window: LeaveWindow) -> bool:
    """Whether there is no gap from the last reading before the window to the first after it."""
    first = int(np.searchsorted(times_s, t0_s - window.before_s)) - 1
    last = int(np.searchsorted(times_s, t0_s + window.whole_after_s))
    if first < 0 or last >= len(times_s):
        return False
    return bool(np.diff(times_s[first : last + 1]).max() < _MISSED * window.poll_s)


def _control(
    leaves: Sequence[Leave],
    place_s: float,
    read: tuple[Array, Array],
    window: LeaveWindow,
    rng: np.random.Generator,
) -> MeanEstimate | None:
    """`freed` at a random moment before each leave, while all our streams ran. The drift is not
    taken off: this is to show it."""
    after_s = place_s + window.poll_s + window.level_s
    found = []
    for one in leaves:
        earliest_s, latest_s = one.began_s + window.before_s, one.t0_s - after_s
        if earliest_s < latest_s:
            at_s = rng.uniform(earliest_s, latest_s)
            before = _level(read, at_s - window.before_s, window.level_s)
            after = _level(read, at_s + place_s + window.poll_s, window.level_s)
            found.append((before - after) / one.streams)
    return MeanEstimate.of(np.array(found)) if len(found) >= FEWEST else None


def _seen(
    leaves: Sequence[Leave], read: tuple[Array, Array], window: LeaveWindow
) -> MeanEstimate | None:
    """How much the reading rose, read a little after the beginning: a gauge may be late."""
    found = [
        _level(read, one.began_s + window.before_s, window.level_s)
        - _level(read, one.asked_s - window.before_s, window.level_s)
        for one in leaves
        if _is_read(one.asked_s, read[0], window)
    ]
    streams = [one.streams for one in leaves if _is_read(one.asked_s, read[0], window)]
    return MeanEstimate.of(np.array(found) / np.array(streams)) if len(found) >= FEWEST else None


def _level(read: tuple[Array, Array], since_s: float, span_s: float) -> float:
    return float(np.interp(np.arange(since_s, since_s + span_s, _GRID_S), *read).mean())
