"""A total over blocks of time and the number of those who left in each: what the mean may be.

`balance` tells where the sums come from. Of one run or of several, the mean is that of all who
left: sum of sums / sum of counts. Three things may put it off, and its interval says how far:

    chance   blocks of time differ, see `stats.ratio_ci95`
    grain    few scrapes met anything: the interval is no narrower than if the number met is
             Poisson's (four scrapes that saw nothing do not show that there was nothing). One that
             met many who had left together, or stands for long, counts for all that: the variance
             of such a sum is no less than the sum of the squares of what each scrape adds
    bias     pages are old, by no more than the target's refresh rule allows

Whether there is enough data for a mean at all is judged by the first two. Old pages are no matter
of data: where chance leaves out 0, the mean is shown with the whole interval.

Sources: Garwood, Biometrika 28 (1936), 437-442 (Poisson); Horvitz and Thompson, JASA 47 (1952),
663-685 (a sum of what was met by chance); sum / number as ratio estimate: Cochran, Sampling
Techniques, section 6.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.stats import Floats, Ints, chi2_quantile, normal_quantile, ratio_ci95
from harness.records import Metric

Limits = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A total over the run as sums of blocks of time, beside how many left in each block.

    `edges_ns`: where the blocks begin; the last one ends with the observation. `bias`: how far the
    mean can be off because of old pages (least, most). `met`: how many requests the scrapes met,
    all together, each of which stands for `span_s` on average; `squares`: the sum of the squares of
    (requests met * time that the scrape stands for). `goes_on`: requests are there for
    ever, so that the sum is a lower bound.
    """

    edges_ns: Ints
    sums: Floats
    counts: Ints
    bias: Limits = (0.0, 0.0)
    met: float = 0.0
    span_s: float = 0.0
    squares: float = 0.0
    goes_on: bool = False

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(self.sums.sum()) / self.n

    @property
    def grain(self) -> float:
        """Half the width of Garwood's interval for as many as the scrapes met, and no less than by
        their squares, for each of those who left."""
        most_met = chi2_quantile(0.975, 2 * self.met + 2) / 2
        by_squares = normal_quantile(0.975) * math.sqrt(self.squares)
        return max((most_met - self.met) * self.span_s, by_squares) / self.n

    def block_of(self, t_ns: Ints) -> Ints:
        """The number of the block that each time lies in."""
        return np.searchsorted(self.edges_ns, t_ns, side="right") - 1

    def by_chance(self) -> Limits | None:
        """The interval of the mean without bias; None of a single block."""
        limits = ratio_ci95(self.sums, self.counts)
        if limits is None:
            return None
        return min(limits[0], self.mean - self.grain), max(limits[1], self.mean + self.grain)


def pooled(balances: Sequence[Balance]) -> Balance:
    """Several runs as one: all their blocks; bias and span as those who left meet them."""
    weights = np.array([one.n for one in balances], dtype=float)
    lowest, highest, span_s = (
        float(np.average(values, weights=weights))
        for values in zip(*[(*one.bias, one.span_s) for one in balances], strict=True)
    )
    return Balance(
        edges_ns=np.concatenate([one.edges_ns for one in balances]),
        sums=np.concatenate([one.sums for one in balances]),
        counts=np.concatenate([one.counts for one in balances]),
        bias=(lowest, highest),
        met=sum(one.met for one in balances),
        span_s=span_s,
        squares=sum(one.squares for one in balances),
        goes_on=any(one.goes_on for one in balances),
    )


def as_figure(found: Balance | NotMeasurable, method: str) -> Figure:
    """A cancel latency from a balance; a lower bound where requests are there for ever.

    Where chance alone reaches to 0 there is not enough data for a mean: only `upper95` is told,
    which the mean does not exceed by chance or by old pages, and in `needs` how many would be
    enough. `others.estimate` is what the totals gave; where it lies further below 0 than old pages
    and what the scrapes met by chance explain, they hide more than is known, and there is no limit.
    """
    if isinstance(found, NotMeasurable):
        return found
    by_chance = found.by_chance()
    from_s, to_s = by_chance or (found.mean - found.grain, found.mean + found.grain)
    figure = Metric(unit="s", n=found.n, method=method, others=_parts(found))
    if from_s > 0 or (found.goes_on and found.mean > 0):
        figure.mean, figure.bound = found.mean, "lower" if found.goes_on else "point"
        figure.mean_ci95 = None if by_chance is None else _widened(by_chance, found.bias)
        return figure
    upper, is_explained = to_s - found.bias[0], found.mean + found.grain >= found.bias[0]
    if upper <= 0 or found.goes_on or not is_explained:
        return NotMeasurable(
            f"not enough data: by {method} {figure.n} cancels would have taken {found.mean:.3g} s "
            "on average, which pages no older than the target's description says do not explain"
        )
    figure.bound, figure.upper95 = "upper", upper
    if found.mean > 0:
        figure.needs["mean"] = math.ceil(figure.n * ((to_s - found.mean) / found.mean) ** 2)
    return figure


def _parts(found: Balance) -> dict[str, float]:
    low, high = found.bias
    return {
        "total": float(found.sums.sum()),
        "bias_low": low,
        "bias_high": high,
        "grain": found.grain,
        "estimate": found.mean,
    }


def _widened(limits: Limits, bias: Limits) -> Limits:
    """With what old pages may have added or hidden; no latency is below 0."""
    return max(0.0, limits[0] - bias[1]), limits[1] - bias[0]


def sum_by_block(balance: Balance, t_ns: pd.Series, values: pd.Series) -> Floats:
    """The sum of other values in each block of a balance, by their times."""
    block = balance.block_of(t_ns.to_numpy(dtype=np.int64)).clip(min=0)
    n = len(balance.edges_ns)
    return np.bincount(block, weights=values.to_numpy(dtype=float), minlength=n).astype(float)
