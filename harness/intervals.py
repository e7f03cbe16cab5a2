"""Confidence intervals of means and rates, in plain Python.

scipy has the same quantiles. `walkaway conform` needs nothing else of it, and is installed without
it; so that no figure has two formulas, runs use these, too. Tests hold them to scipy's within 1e-9.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, stdev
from typing import Final, NamedTuple

Z95: Final = NormalDist().inv_cdf(0.975)
_TINY: Final = 1e-300
_SAME: Final = 1e-16
_MOST_TERMS: Final = 10_000


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of their mean, by Student's distribution; None of fewer than two."""
    n = len(values)
    return None if n < 2 else interval_of_mean(fmean(values), stdev(values), n)


def interval_of_mean(mean: float, deviation: float, n: int) -> tuple[float, float]:
    """`deviation`: the standard deviation of a sample of `n`."""
    half = t_quantile(0.975, n - 1) * deviation / math.sqrt(n)
    return mean - half, mean + half


def rate_interval(hits: int, n: int, level: float) -> tuple[float, float]:
    """The exact interval of a rate: at its upper end `hits` or fewer of n are as rare as at its
    lower end `hits` or more. Source: Clopper and Pearson, Biometrika 26 (1934), 404-413."""
    share = (1 + level) / 2
    return 1.0 - _rate_upper(n - hits, n, share), _rate_upper(hits, n, share)


def rate_upper95(hits: int, n: int) -> float:
    """One-sided."""
    return _rate_upper(hits, n, 0.95)


def rate_lower95(hits: int, n: int) -> float:
    """One-sided."""
    return 1.0 - _rate_upper(n - hits, n, 0.95)


@lru_cache(maxsize=1024)  # the runs of a history often have the same counts
def _rate_upper(hits: int, n: int, share: float) -> float:
    return 1.0 if hits >= n else _beta_quantile(share, hits + 1, n - hits)


def fewest_for_rate_below(rate: float) -> int:
    """How many trials without a single hit show, at 95 %, that a rate is below this one.

    (1 - rate)^n <= 0.05, so n >= ln 0.05 / ln(1 - rate): 299 for 1 %, 2,995 for 0.1 %.
    """
    return math.ceil(math.log(0.05) / math.log1p(-rate))


def t_quantile(share: float, freedom: float) -> float:
    """The quantile of Student's distribution, which is symmetric."""
    if share < 0.5:
        return -t_quantile(1 - share, freedom)
    x = _beta_quantile(2 * (1 - share), freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - x) / x)


def _beta_quantile(share: float, a: float, b: float) -> float:
    return _root(lambda x: beta_cdf(x, a, b), share)


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by the continued fraction of DLMF 8.17.22
    (https://dlmf.nist.gov/8.17.v)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # there the fraction of the other tail converges
        return 1 - beta_cdf(1 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x)
    log_front += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction, by Lentz's method."""
    c, d = 1.0, 1 / _off_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            c, d = _off_zero(1 + term / c), 1 / _off_zero(1 + term * d)
            value *= c * d
        if abs(c * d - 1) < _SAME:
            break
    return value


def _off_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _root(rising: Callable[[float], float], target: float) -> float:
    """The argument at which a function that rises over 0 to 1 reaches `target`."""
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return high
