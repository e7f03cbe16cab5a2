"""Leaves one at a time, by the memory that a server shows as held: did it fall by what ours held?

A stream of ours holds far more than the other users change between three readings, so a leave is
seen by itself: as a fall between three readings in a row, of at least 0.6 of what it holds. Three,
since blocks may be given back while a page is made. What happens over a longer time does not
count: the others move more in it.

A leave without a fall is a ghost if a fall comes when its answer must end. If none comes then,
another user may have taken the memory at that moment. Such leaves are reported separately, and
count as forgotten only as far as leaves lack a fall more often than answers that end by themselves.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.intervals import Interval, rate_interval
from harness.stats import interval_ranks

Array = NDArray[np.float64]

ENOUGH: Final = 0.6  # of what ours holds: a fall
_SPREADS: Final = 6  # of the others' changes, that ours must hold
_RARE: Final = 0.999  # of the others' changes are within the rest that a fall may lack
_FEWEST_CHANGES: Final = 50


class Falls(NamedTuple):
    """`sizes`: between a reading and the next but one. `since_s`, `until_s`: the readings around
    the larger of its two changes: a page may take long, and then they are far apart."""

    since_s: Array
    until_s: Array
    sizes: Array

    @classmethod
    def of(cls, times_s: Array, values: Array) -> "Falls":
        if len(times_s) < 3:
            return cls(*[np.empty(0)] * 3)
        steps = values[:-1] - values[1:]
        is_later = steps[1:] > steps[:-1]
        since_s = np.where(is_later, times_s[1:-1], times_s[:-2])
        until_s = np.where(is_later, times_s[2:], times_s[1:-1])
        return cls(since_s, until_s, values[:-2] - values[2:])

    def within(self, span: Interval) -> "Falls":
        is_in = (self.since_s >= span.low) & (self.until_s <= span.high)
        return Falls(*(part[is_in] for part in self))

    def first(self, since_s: float, until_s: float, held: float) -> float | None:
        """The time at which what holds `held` was given back; None: not in this time. It is the
        larger of the falls that share a reading: another's may have come right before."""
        is_in = (self.until_s >= since_s) & (self.since_s <= until_s)
        fell = np.flatnonzero(is_in & (self.sizes >= ENOUGH * held))
        if not len(fell):
            return None
        near = fell[fell <= fell[0] + 1]
        found = near[self.sizes[near].argmax()]
        return float(self.since_s[found] + self.until_s[found]) / 2


class Needed(NamedTuple):
    """What a stream has to hold for its leave to be seen among the changes of the other users.
    `least`: six times the scatter of these changes; `ample`: enough that hardly any of these
    changes makes a fall or hides one."""

    least: float
    ample: float


def needed(changes: Array) -> Needed | None:
    """None: too few changes were seen."""
    if len(changes) < _FEWEST_CHANGES:
        return None
    least = _SPREADS * float(changes.std())
    rare = float(np.quantile(np.abs(changes), _RARE))
    return Needed(least, max(least, rare / (1 - ENOUGH)))


class Mistaken(NamedTuple):
    """The time in which nothing of ours moves, and how often others then looked like a leave."""

    seconds: float = 0.0
    times: int = 0

    def also(self, falls: Falls, span: Interval, held: float) -> "Mistaken":
        is_like = np.concatenate([[False], falls.within(span).sizes >= ENOUGH * held])
        times = int((is_like[1:] & ~is_like[:-1]).sum())
        return Mistaken(self.seconds + span.width, self.times + times)

    def share(self, window_s: float) -> float:
        """The share of windows without a leave that seem to show one."""
        return min(1.0, self.times * window_s / self.seconds) if self.seconds else 0.0


def median_interval(values: Sequence[float]) -> Interval:
    """The 95 % interval of the median, by ranks; the range of the values if there are too few."""
    ordered, n = sorted(values), len(values)
    low, high = interval_ranks(n, 0.5)
    return Interval(ordered[max(low, 1) - 1], ordered[min(high, n) - 1])


class FallTally(NamedTuple):
    """`held`: leaves after which the memory fell only when the answer ended. `unclear`: leaves
    after which it fell neither then nor before. `ends`: answers that ended by themselves;
    `missed`: how many of these showed no fall."""

    leaves: int
    held: int
    unclear: int
    ends: int
    missed: int

    def loses(self, risk: float) -> bool:
        """Whether leaves bring no memory back that ends do (Fisher's exact test, one-sided)."""
        without, n = self.unclear + self.missed, self.leaves + self.ends
        as_many = range(self.unclear, min(self.leaves, without) + 1)
        ways = sum(math.comb(self.leaves, k) * math.comb(self.ends, without - k) for k in as_many)
        return ways / math.comb(n, without) < risk

    @property
    def rate(self) -> float:
        low, high = self.interval()
        return min(high, max(low, self.held / self.leaves))

    def interval(self, level: float = 0.95) -> Interval:
        """The interval of the share of forgotten leaves."""
        low, _ = rate_interval(self.held, self.leaves, level)
        fewest, most = rate_interval(self.held + self.unclear, self.leaves, level)
        _, by_chance = rate_interval(self.missed, self.ends, level)
        return Interval(max(low, fewest - by_chance), most)
