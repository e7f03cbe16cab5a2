"""After how many tokens a user leaves: one draw from a distribution, below a limit; pure.

What reaches beyond the answer is no plan to leave it, so the open-ended distributions are cut off
there: the draw is from the part of the distribution that lies below the limit, by the inverse of
its distribution function.
"""

import math
import random
from statistics import NormalDist
from typing import Final

_NORMAL: Final = NormalDist()
_LARGEST_SHARE: Final = 1 - 2**-53  # the inverse of the normal distribution ends before 1


def geometric(rng: random.Random, *, mean: float, limit: int) -> int:
    """From 1 to `limit` - 1: P(N > k) is (1 - 1 / mean)^k where nothing is cut off."""
    if mean <= 1:
        return 1
    decay = math.log1p(-1 / mean)
    reach = -math.expm1(decay * (limit - 1))  # the share that lies below the limit
    drawn = 1 + math.floor(math.log1p(-rng.random() * reach) / decay)
    return min(drawn, limit - 1)


def lognormal(rng: random.Random, *, median: float, sigma: float, limit: int) -> int:
    """From 1 to `limit` - 1, rounded to the nearest."""
    if sigma == 0:
        return min(max(1, round(median)), limit - 1)
    highest = math.log(limit - 0.5)  # what would be rounded to the limit
    reach = _NORMAL.cdf((highest - math.log(median)) / sigma)
    share = min(max(rng.random() * reach, math.ulp(0.0)), _LARGEST_SHARE)
    drawn = round(median * math.exp(sigma * _NORMAL.inv_cdf(share)))
    return min(max(1, drawn), limit - 1)
