"""How two independent samples differ: by how much, how surely, and how often one beats the other.

shift: Hodges and Lehmann's estimate, the median of all differences between a value of one sample
and one of the other; its interval comes from the ranks of these differences at which the
Mann-Whitney test stops to reject (normal approximation, with the correction for ties). No
distribution is assumed but that both have about one shape. superiority: the probability that a
value of the first sample is larger than one of the second, ties counted half (Vargha and Delaney's
A): 0.5 is no difference, 0.56 small, 0.64 medium, 0.71 large.

The n * m differences are never formed. How many of them are at most d is a search in the sorted
reference for each value, and halving the range of d finds the difference of any rank.

A censored value counts as infinite: larger than all that are known to the end, and equal to the
other censored ones. A shift or limit among those is not known.

Sources: Hodges and Lehmann, Annals of Mathematical Statistics 34 (1963), 598-611; Hollander and
Wolfe, Nonparametric Statistical Methods, section 4.2-4.3; Vargha and Delaney, Journal of
Educational and Behavioral Statistics 25 (2000), 101-132; censored values as largest ranks: Gehan,
Biometrika 52 (1965), 203-223.

The values of one sample are taken for independent of each other; those of one run share its
weather. Where there are rounds, `paired` is the more honest answer.
"""

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from harness.analysis.distributions import normal_quantile
from harness.analysis.figure import Sample
from harness.analysis.stats import Floats
from harness.differences import Shift

FEWEST: Final = 5  # of each sample: with fewer the test's approximation is no good
_HALVINGS: Final = 200  # at most: of the range of all differences, down to neighbouring floats


def ranked(sample: Sample) -> Floats:
    """The values of a sample, infinite where they are censored."""
    if sample.censored is None:
        return sample.values
    return np.where(sample.censored, np.inf, sample.values)


def shift_between(values: Floats, reference: Floats) -> Shift:
    """Compare two samples, in which censored values are infinite."""
    n, m = len(values), len(reference)
    counted = Shift(
        n=n,
        n_reference=m,
        n_censored=int(np.isinf(values).sum()),
        n_reference_censored=int(np.isinf(reference).sum()),
    )
    if min(n, m) < FEWEST:
        note = f"not enough data: {n} and {m} values, and at least {FEWEST} of each are needed"
        return msgspec.structs.replace(counted, note=note)
    differences = _Differences(mine=np.sort(values), theirs=np.sort(reference))
    middle = [differences.ranked(rank) for rank in ((n * m - 1) // 2, n * m // 2)]
    rank = _lower_rank(values, reference)
    limits = differences.ranked(rank), differences.ranked(n * m - 1 - rank)
    is_known = bool(np.isfinite(middle).all())
    return msgspec.structs.replace(
        counted,
        shift=sum(middle) / 2 if is_known else None,
        shift_ci95=limits if np.isfinite(limits).all() else None,
        superiority=differences.superiority(),
        note=None if is_known else "too many of the values are only known to exceed a time",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Differences:
    """All differences between a value of one sorted sample and one of the other."""

    mine: Floats
    theirs: Floats

    def superiority(self) -> float:
        """The share of differences above 0, and half of those that are 0."""
        below = np.searchsorted(self.theirs, self.mine, side="left").sum()
        not_above = np.searchsorted(self.theirs, self.mine, side="right").sum()
        return float(below + not_above) / 2 / (len(self.mine) * len(self.theirs))

    def ranked(self, rank: int) -> float:
        """The difference of this rank, from 0; infinite if it lies among those with a censored
        value."""
        known = self._finite()
        endless = len(self.theirs) - len(known.theirs)  # in the reference: differences of -inf
        below, ties = len(known.mine) * endless, (len(self.mine) - len(known.mine)) * endless
        inside, num_known = rank - below, len(known.mine) * len(known.theirs)
        if inside < 0:
            return -np.inf
        negative = known._below_zero()
        if negative <= inside < negative + ties:
            return 0.0
        if inside >= negative:
            inside -= ties
        return known._ranked(inside) if inside < num_known else np.inf

    def _finite(self) -> "_Differences":
        return _Differences(
            mine=self.mine[np.isfinite(self.mine)], theirs=self.theirs[np.isfinite(self.theirs)]
        )

    def _ranked(self, rank: int) -> float:
        """Of finite values: halve between a limit that too few do not exceed, and one that enough
        do not."""
        low = float(self.mine[0] - self.theirs[-1])
        high = float(self.mine[-1] - self.theirs[0])
        if self._at_most(low) > rank:
            return low
        for _ in range(_HALVINGS):
            middle = low + (high - low) / 2
            if not low < middle < high:
                break
            if self._at_most(middle) > rank:
                high = middle
            else:
                low = middle
        return self._nearest(high)

    def _nearest(self, limit: float) -> float:
        """The difference that lies nearest: halving ends within a rounding of it."""
        after = np.searchsorted(self.theirs, self.mine - limit)
        last = len(self.theirs) - 1
        near = np.concatenate(
            [self.mine - self.theirs[np.clip(after + step, 0, last)] for step in (-1, 0)]
        )
        return float(near[np.argmin(np.abs(near - limit))])

    def _below_zero(self) -> int:
        return int((len(self.theirs) - np.searchsorted(self.theirs, self.mine, "right")).sum())

    def _at_most(self, limit: float) -> int:
        """How many differences do not exceed the limit: those with theirs >= mine - limit."""
        smaller = np.searchsorted(self.theirs, self.mine - limit, side="left")
        return int((len(self.theirs) - smaller).sum())


def _lower_rank(mine: Floats, theirs: Floats) -> int:
    """The rank at which the interval begins; it ends as far from the largest difference."""
    n, m = len(mine), len(theirs)
    _, ties = np.unique(np.concatenate([mine, theirs]), return_counts=True)
    tie_term = float((ties.astype(float) ** 3 - ties).sum()) / ((n + m) * (n + m - 1))
    spread = np.sqrt(n * m / 12 * ((n + m + 1) - tie_term))
    rank = int(np.floor(n * m / 2 - normal_quantile(0.975) * spread))
    return min(max(rank, 0), (n * m - 1) // 2)
