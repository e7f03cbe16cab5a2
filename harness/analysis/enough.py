"""How many observations a figure needs, so that "not enough data" says how many would be enough."""

import math
from functools import cache

from harness.analysis.distributions import binomial_quantile


@cache
def fewest_for_quantile(share: float) -> int:
    """The fewest observations with which a quantile has a 95 % interval from order statistics.

    By the rule of `stats.quantile_ci95`: both ranks must exist. p50 needs 6, p99 needs 368.
    """
    n = 2
    while not _has_interval(n, share):
        n += 1
    return n


def fewest_for_rate_below(rate: float) -> int:
    """How many trials without a single hit show, at 95 %, that a rate is below this one.

    (1 - rate)^n <= 0.05, so n >= ln 0.05 / ln(1 - rate): 299 for 1 %, 2,995 for 0.1 %.
    """
    return math.ceil(math.log(0.05) / math.log1p(-rate))


def _has_interval(n: int, share: float) -> bool:
    low = binomial_quantile(0.025, n, share)
    high = binomial_quantile(0.975, n, share) + 1
    return low >= 1 and high <= n
