"""Statistics of samples in which some values are only known to be exceeded (right-censored).

A quantile is read off the Kaplan-Meier curve, which without censoring is the plain share of
observations. A quantile that the curve does not reach is only known to exceed the time watched.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import special

from harness.intervals import interval_of_mean, t_quantile

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

NEVER: Final = int(np.iinfo(np.int64).max)  # a time that lies after all others
_OF_A_PRODUCT: Final = 1e-9  # rounding of a running product of up to some million factors
_CELLS: Final = 200  # of Turnbull's estimate
_ROUNDS: Final = 300
_ROUNDING: Final = 1e-12  # P(X <= 3) of 7 at one half is one half, but computed a little less


def binomial_quantile(share: float, n: int, rate: float) -> int:
    reached = share * (1 - _ROUNDING)
    return bisect_left(range(n), reached, key=lambda k: float(special.bdtr(k, n, rate)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A Kaplan-Meier curve over the sorted `times` (see `curve_at` for the exception).

    `censored` is aligned with `times`; at a tie the censored observations come last. `left` is the
    share not known to be done after each of them. It is null without censoring: then it is the
    plain share, and need not be kept for millions of values.
    """

    times: Floats
    censored: Bools
    left: Floats | None

    @property
    def n(self) -> int:
        return len(self.times)

    @property
    def n_censored(self) -> int:
        return int(self.censored.sum())

    @property
    def done(self) -> Floats:
        if self.left is None:
            return np.arange(1, self.n + 1) / self.n
        return np.asarray(1.0 - self.left, dtype=np.float64)

    def first_with(self, share: float) -> int:
        if self.left is None:
            return bisect_left(range(self.n), share, key=lambda i: (i + 1) / self.n)
        return int(np.searchsorted(self.done, share))


def kaplan_meier(values: Floats, censored: Bools) -> Curve:
    """Done(t) = 1 - product over observations up to t of (1 - 1 / number still at risk).

    Source: Kaplan and Meier, Journal of the American Statistical Association 53 (1958), 457-481.
    """
    if not censored.any():
        return Curve(times=np.sort(values), censored=censored, left=None)
    order = np.lexsort((censored, values))
    times, is_censored = values[order], censored[order]
    at_risk = np.arange(len(times), 0, -1)
    left = np.cumprod(np.where(is_censored, 1.0, 1.0 - 1.0 / at_risk), dtype=np.float64)
    return Curve(times=times, censored=is_censored, left=left)


def curve_at(values: Floats, censored: Bools, shares: Iterable[float]) -> Curve:
    """`kaplan_meier`, for these quantiles, their intervals and the last time only.

    Without censoring the times are in order only at the ranks that these need, which is many times
    faster for millions of values.
    """
    if censored.any() or not len(values):
        return kaplan_meier(values, censored)
    plain, n = Curve(times=values, censored=censored, left=None), len(values)
    ranks = [plain.first_with(share - _OF_A_PRODUCT) for share in shares]
    ranks += [rank - 1 for share in shares for rank in interval_ranks(n, share)]
    in_range = {rank for rank in ranks if 0 <= rank < n}
    return replace(plain, times=np.partition(values, sorted({*in_range, n - 1})))


def quantile(curve: Curve, share: float) -> float | None:
    index = curve.first_with(share - _OF_A_PRODUCT)
    return float(curve.times[index]) if index < curve.n else None


def quantile_ci95(curve: Curve, share: float) -> tuple[float, float] | None:
    """95 % interval of a quantile from order statistics; None if an end is not known.

    The number of n observations below the quantile is binomial(n, share), which bounds the ranks
    between which the quantile lies: no distribution is assumed. The ranks are read off the curve as
    shares of n, which is exact without censoring and when all censored observations come last (a
    ghost is censored at the settle time). Observations censored earlier do not count into n.
    Source: Conover, Practical Nonparametric Statistics, section 3.2.
    """
    middle = quantile(curve, share)
    if middle is None:
        return None
    n = curve.n - int(np.count_nonzero(curve.censored & (curve.times < middle)))
    if not _has_interval(n, share):
        return None
    low_rank, high_rank = interval_ranks(n, share)
    low, high = quantile(curve, low_rank / n), quantile(curve, high_rank / n)
    return None if low is None or high is None else (low, high)


def interval_ranks(n: int, share: float) -> tuple[int, int]:
    """Ranks from 1 to n; one that is outside means that n values are too few for an interval."""
    return binomial_quantile(0.025, n, share), binomial_quantile(0.975, n, share) + 1


def mean_ci95(values: Floats) -> tuple[float, float] | None:
    n = len(values)
    return None if n < 2 else interval_of_mean(float(values.mean()), float(values.std(ddof=1)), n)


def clustered_mean_ci95(values: Floats, sizes: Ints) -> tuple[float, float] | None:
    counts = sizes[sizes > 0]
    return ratio_ci95(np.add.reduceat(values, np.cumsum(counts) - counts), counts)


def ratio_ci95(sums: Floats, counts: Ints) -> tuple[float, float] | None:
    """Interval of sum of sums / sum of counts over m >= 2 groups that are independent.

    Its variance is m / (m - 1) * sum of (sum - ratio * count)^2, over (sum of counts)^2. Source:
    Cochran, Sampling Techniques, section 6.3 (ratio estimate).
    """
    m, total = len(counts), int(counts.sum())
    if m < 2 or not total:
        return None
    ratio = float(sums.sum()) / total
    residuals = sums - ratio * counts
    variance = m / (m - 1) * float(np.square(residuals).sum()) / total**2
    half = t_quantile(0.975, m - 1) * math.sqrt(variance)
    return ratio - half, ratio + half


def theil_sen(y: Floats, x: Floats) -> tuple[float, tuple[float, float]]:
    """The median slope of all pairs of points, and its 95 % interval. Source: Sen, Journal of the
    American Statistical Association 63 (1968), 1379-1389."""
    from scipy import stats  # takes a second to import

    slope, _, low, high = stats.theilslopes(y, x, alpha=0.95)
    return float(slope) + 0.0, (float(low), float(high))  # no -0


@cache
def fewest_for_quantile(share: float) -> int:
    n = 2
    while not _has_interval(n, share):
        n += 1
    return n


def _has_interval(n: int, share: float) -> bool:
    low_rank, high_rank = interval_ranks(n, share)
    return low_rank >= 1 and high_rank <= n


def turnbull_median(low: Floats, high: Floats) -> float | None:
    """The median of times that each lie in (low, high], by Turnbull's estimator (expectation
    and maximisation from an even start, so that mass which no end divides stays even). None: beyond
    the last finite end. Ends are rounded up to a grid of 1/200 of their range. A time is
    known if its `low` is its `high`."""
    finite = high[np.isfinite(high)]
    if not len(finite):
        return None
    grid = np.linspace(0.0, float(finite.max()), _CELLS + 1)[1:]
    cells = np.append(grid, np.inf)
    last = _rounded_up(high, grid)[:, None]
    is_in = (cells > low[:, None]) & (cells < last) | (cells == last)
    mass = np.full(len(cells), 1 / len(cells))
    for _ in range(_ROUNDS):
        expected = is_in * mass
        mass = (expected / expected.sum(axis=1, keepdims=True)).mean(axis=0)
    reached = int(np.searchsorted(np.cumsum(mass), 0.5 - _OF_A_PRODUCT))
    return float(cells[reached]) if np.isfinite(cells[reached]) else None


def _rounded_up(values: Floats, grid: Floats) -> Floats:
    place = np.searchsorted(grid, values)
    return np.where(place < len(grid), grid[place.clip(max=len(grid) - 1)], np.inf)
