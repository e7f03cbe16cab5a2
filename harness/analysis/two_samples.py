"""How two independent samples differ: by how much, how surely, and how often one beats the other.

shift: Hodges and Lehmann's estimate, the median of all differences between a value of one sample
and one of the other; its interval comes from the ranks of these differences at which the
Mann-Whitney test stops to reject (normal approximation, with the correction for ties). No
distribution is assumed but that both have about one shape. superiority: the probability that a
value of the first sample is larger than one of the second, ties counted half (Vargha and Delaney's
A): 0.5 is no difference, 0.56 small, 0.64 medium, 0.71 large.

Sources: Hodges and Lehmann, Annals of Mathematical Statistics 34 (1963), 598-611; Hollander and
Wolfe, Nonparametric Statistical Methods, section 4.2-4.3; Vargha and Delaney, Journal of
Educational and Behavioral Statistics 25 (2000), 101-132.

The values of one sample are taken for independent of each other; those of one run share its
weather. Where there are rounds, `paired` is the more honest answer.
"""

from typing import Final

import msgspec
import numpy as np
from scipy import stats

from harness.analysis.stats import Floats

FEWEST: Final = 5  # of each sample: with fewer the test's approximation is no good
MOST: Final = (
    2000  # of each sample: above it every k-th of the sorted values stands for its neighbours
)


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """The first sample against the second. What is null is not known; `note` says why then."""

    n: int
    n_reference: int
    shift: float | None = None
    shift_ci95: tuple[float, float] | None = None
    superiority: float | None = None
    note: str | None = None


def shift_between(values: Floats, reference: Floats) -> Shift:
    """Compare two samples."""
    n, m = len(values), len(reference)
    if min(n, m) < FEWEST:
        note = f"not enough data: {n} and {m} values, and at least {FEWEST} of each are needed"
        return Shift(n=n, n_reference=m, note=note)
    mine, theirs = _thinned(values), _thinned(reference)
    differences = np.sort((mine[:, None] - theirs[None, :]).ravel())
    return Shift(
        n=n,
        n_reference=m,
        shift=float(np.median(differences)),
        shift_ci95=_interval(differences, mine, theirs),
        superiority=float((differences > 0).mean() + (differences == 0).mean() / 2),
    )


def _interval(differences: Floats, mine: Floats, theirs: Floats) -> tuple[float, float]:
    n, m = len(mine), len(theirs)
    _, ties = np.unique(np.concatenate([mine, theirs]), return_counts=True)
    tie_term = float((ties.astype(float) ** 3 - ties).sum()) / ((n + m) * (n + m - 1))
    spread = np.sqrt(n * m / 12 * ((n + m + 1) - tie_term))
    rank = int(np.floor(n * m / 2 - float(stats.norm.ppf(0.975)) * spread))
    rank = min(max(rank, 0), (n * m - 1) // 2)
    return float(differences[rank]), float(differences[n * m - 1 - rank])


def _thinned(values: Floats) -> Floats:
    """At most `MOST` values with the same quantiles."""
    ordered = np.sort(values)
    if len(ordered) <= MOST:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, MOST).astype(np.int64)]
