"""The change point of a figure's runs over time: since when it is at another level.

The rule is the change-point model, a control chart for figures whose level and spread nobody knows
beforehand: Hawkins, Qiu and Kang, Journal of Quality Technology 35 (2003), 355-366. Split the runs
in two, wherever that is possible. Student's t says how far apart the two means are for the spread
of the runs around them:

    t = (mean since - mean before) / (spread * sqrt(1 / runs before + 1 / runs since))

The split with the largest t is a change if t is beyond its quantile at 1 - 0.01 / (2 * splits).
So at most one in a hundred histories without a change shows one (Bonferroni's inequality; that it
loses little here: Worsley, Journal of the American Statistical Association 74 (1979), 365-367).

- The last 8 runs are searched first, then the last 16, 32 ... and all, so that an old change, or
  one wild run long ago, does not hide a new one. The splits of all these windows count.
- Figures above 0 are compared by their logarithms: the spread of times grows with the times.
- The spread is at least what the runs' own intervals say. With no ghost in nine runs, one ghost in
  the tenth is no change.
- A value that is only known to exceed a number counts as that number, and only on the higher side.

The runs are taken for independent. A slow drift is found as a change in its middle.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from harness.compare.pairs import Limits
from harness.intervals import Z95, t_quantile
from harness.stats import Bools, Floats

FALSE_ALARMS: Final = 0.01  # of histories without a change, at most
FEWEST_RUNS: Final = 3  # for a spread
FIRST_WINDOW: Final = 8
LEAST: Final = 0.01  # of the figure: a smaller change is of no use to a reader


class RunReading(NamedTuple):
    """A figure in one run. `is_more`: it is only known to exceed `value`."""

    value: float
    limits: Limits | None = None
    is_more: bool = False


class Change(NamedTuple):
    """Places in the list of readings: the level before begins at `start`, the level since at
    `first`. `before` and `since` are the median readings of the two.
    """

    start: int
    first: int
    before: RunReading
    since: RunReading

    @property
    def is_rise(self) -> bool:
        return self.since.value > self.before.value


def last_change(readings: Sequence[RunReading]) -> Change | None:
    """The readings in the order of their runs."""
    n = len(readings)
    windows = _windows(n)
    splits = sum(size - 1 for size in windows)
    for size in windows:
        start = n - size
        at = _change_point(readings[start:], splits)
        if at is not None:
            first = start + at
            before, since = _median(readings[start:first]), _median(readings[first:])
            return Change(start, first, before, since)
    return None


def _windows(n: int) -> list[int]:
    if n < FEWEST_RUNS:
        return []
    doublings = range(max(0, (n - 1) // FIRST_WINDOW).bit_length())
    return [*(FIRST_WINDOW << power for power in doublings), n]


def _change_point(readings: Sequence[RunReading], splits: int) -> int | None:
    """How many readings lie before the change."""
    n = len(readings)
    values, own_spread = _on_scale(readings)
    before = np.arange(1, n)
    sums = np.cumsum(values)
    of_before, of_since = sums[:-1] / before, (sums[-1] - sums[:-1]) / (n - before)
    gaps = of_since - of_before
    around = (values**2).sum() - before * of_before**2 - (n - before) * of_since**2
    spread = np.sqrt(np.maximum(around.clip(0) / (n - 2), own_spread**2))
    error = spread * np.sqrt(1 / before + 1 / (n - before))
    can_be = _can_be(readings, gaps)
    found = np.divide(abs(gaps), error, out=np.full(n - 1, np.inf), where=error > 0)
    found[~can_be] = 0.0
    at = int(found.argmax())
    return at + 1 if found[at] > _most_by_chance(n, splits) else None


@cache
def _most_by_chance(n: int, splits: int) -> float:
    return t_quantile(1 - FALSE_ALARMS / (2 * splits), n - 2)


def _on_scale(readings: Sequence[RunReading]) -> tuple[Floats, float]:
    """The values less the first, as logarithms if all are above 0, and the runs' own spread."""
    values = np.array([one.value for one in readings])
    half_widths = [
        (one.limits[1] - one.limits[0]) / 2 / (one.value if values.min() > 0 else 1.0)
        for one in readings
        if one.limits is not None
    ]
    if values.min() > 0:
        values = np.log(values)
    squares = np.square(half_widths) / Z95**2
    return values - values[0], math.sqrt(squares.mean()) if half_widths else 0.0


def _can_be(readings: Sequence[RunReading], gaps: Floats) -> Bools:
    """Which splits are large enough to be of use, with every open value on the higher side."""
    n, values = len(readings), np.array([one.value for one in readings])
    least = math.log1p(LEAST) if values.min() > 0 else LEAST * float(abs(values).max())
    is_open = [place for place, one in enumerate(readings) if one.is_more]
    first, last = min(is_open, default=n), max(is_open, default=-1)
    before = np.arange(1, n)
    may = np.where(gaps > 0, before <= first, before > last)
    return np.asarray(may & (gaps != 0) & (abs(gaps) >= least))


def _median(readings: Sequence[RunReading]) -> RunReading:
    """The lower one of the two in the middle: a value that a run had."""
    ordered = sorted(readings, key=lambda one: (one.value, one.is_more))
    return ordered[(len(ordered) - 1) // 2]
