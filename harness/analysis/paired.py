"""One arm against another, round by round.

The two runs of a round share a seed and follow each other closely, so what is compared is not two
heaps of runs but the pairs: what differs between rounds is in both of a pair and drops out.

Difference: mean of (arm - reference), with Student's t interval of paired differences.
Ratio: geometric mean of (arm / reference): the same on the logarithms, and back. A ratio is as
often halved as doubled by chance, which only its logarithm shows evenly.
Sources: Student, Biometrika 6 (1908), 1-25; Bland and Altman, BMJ 312 (1996), 1153.

Both intervals take the rounds for independent and about normal: they are as honest as that, and
with a handful of rounds nobody can check it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from harness.analysis.figure import Sample
from harness.analysis.stats import Floats, mean_ci95, normal_quantile
from harness.records import Difference, Shift

FEWEST_ROUNDS: Final = 3


def compare(
    arm: str,
    reference: str,
    values: Sequence[float | None],
    reference_values: Sequence[float | None],
) -> Difference:
    """Compare two arms by one value a round each; null where a round has none."""
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(values, reference_values, strict=True)
        if mine is not None and theirs is not None
    ]
    n = len(pairs)
    if not n:
        note = "no round has a value of both arms"
        return Difference(arm=arm, reference=reference, n=0, note=note)
    mine, theirs = np.array(pairs, dtype=float).T
    is_positive = bool((mine > 0).all() and (theirs > 0).all())
    ratio, ratio_ci95 = _ratio(mine, theirs) if is_positive else (None, None)
    return Difference(
        arm=arm,
        reference=reference,
        n=n,
        difference=float((mine - theirs).mean()),
        difference_ci95=_interval(mine - theirs),
        ratio=ratio,
        ratio_ci95=ratio_ci95,
        note=_note(n, len(values) - n, is_positive=is_positive),
    )


def is_certain(one: Difference) -> bool:
    """Does the ratio's interval leave out 1, or without one, the difference's interval 0?"""
    limits, same = one.ratio_ci95, 1.0
    if limits is None:
        limits, same = one.difference_ci95, 0.0
    return limits is not None and not limits[0] <= same <= limits[1]


def _ratio(mine: Floats, theirs: Floats) -> tuple[float, tuple[float, float] | None]:
    logs = np.log(mine) - np.log(theirs)
    limits = _interval(logs)
    ratio = float(np.exp(logs.mean()))
    return ratio, None if limits is None else (float(np.exp(limits[0])), float(np.exp(limits[1])))


def _interval(values: Floats) -> tuple[float, float] | None:
    return mean_ci95(values) if len(values) >= FEWEST_ROUNDS else None


def _note(n: int, num_left_out: int, *, is_positive: bool) -> str | None:
    """Why something is null, and how many rounds could not be compared."""
    said = []
    if n < FEWEST_ROUNDS:
        said.append(f"not enough data for an interval: {n} of at least {FEWEST_ROUNDS} rounds")
    elif not is_positive:
        said.append("not enough data for a ratio: a round has a value of zero, or below")
    if num_left_out:
        said.append(f"{num_left_out} of {n + num_left_out} rounds have no value of both arms")
    return "; ".join(said) or None


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
