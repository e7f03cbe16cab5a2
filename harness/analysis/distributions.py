"""Quantiles of the usual distributions.

They come from scipy.special. scipy.stats has them too, but takes a second to load, which every run,
gate and report would have to wait for; so that is only loaded where a slope is looked for.
"""

from bisect import bisect_left
from typing import Final

from scipy import special

_ROUNDING: Final = 1e-12  # P(X <= 3) of 7 at one half is one half, but computed a little less


def normal_quantile(share: float) -> float:
    """Of the standard normal distribution."""
    return float(special.ndtri(share))


def t_quantile(share: float, freedom: float) -> float:
    """Of Student's t distribution."""
    return float(special.stdtrit(freedom, share))


def chi2_quantile(share: float, freedom: float) -> float:
    """Of the chi-squared distribution."""
    return 2 * float(special.gammaincinv(freedom / 2, share))


def beta_quantile(share: float, a: float, b: float) -> float:
    """Of the beta distribution."""
    return float(special.betaincinv(a, b, share))


def binomial_quantile(share: float, n: int, rate: float) -> int:
    """The smallest k with P(X <= k) >= share, for the hits X of n trials."""
    reached = share * (1 - _ROUNDING)
    return bisect_left(range(n), reached, key=lambda k: float(special.bdtr(k, n, rate)))
