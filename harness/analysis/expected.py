"""What earlier runs lead one to expect of the next, if nothing changes.

The interval of one run tells how finely it measured, not how much runs differ from night to night.
That only the runs before it can tell:

    mean ± t(0.975, n - 1) * s * sqrt(1 + 1/n)

of n earlier values with the standard deviation s holds the next one with 95 %, where runs vary
about normally. Source: Hahn and Meeker, Statistical Intervals (1991), chapter 4.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from harness.analysis.distributions import t_quantile
from harness.analysis.figure_pairs import Limits

FEWEST_EARLIER: Final = 5
MOST_EARLIER: Final = 30  # older ones are history


def expected(earlier: Sequence[float]) -> Limits | None:
    """Between which values the next one is to be expected; None of too few. The last are the
    latest."""
    values = np.array(earlier[-MOST_EARLIER:], dtype=float)
    n = len(values)
    if n < FEWEST_EARLIER:
        return None
    middle, spread = float(values.mean()), float(values.std(ddof=1))
    half = t_quantile(0.975, n - 1) * spread * math.sqrt(1 + 1 / n)
    return middle - half, middle + half
