"""A figure of two runs side by side: how far apart, how surely, and what of it is the step time.

The interval of a difference is made from the intervals of the two figures: with a in [l, u] and b
in [l', u'], a - b lies between

    (a - b) - sqrt((a - l)^2 + (u' - b)^2)  and  (a - b) + sqrt((u - a)^2 + (b - l')^2).

It keeps the skew of each, needs no rows, and is for means, quantiles and rates alike; of a rate the
interval is Wilson's, which makes it Newcombe's. The runs are taken for independent of each other.
Sources: Zou and Donner, Statistics in Medicine 27 (2008), 1693-1702; Newcombe, Statistics in
Medicine 17 (1998), 873-890; Wilson, Journal of the American Statistical Association 22 (1927), 209.

The interval of a ratio is the same on logarithms, and back. In steps it is that times the ratio of
the two step times, which are taken as known: each is the median of very many.

A time is also compared in steps of the engine: a server with slower steps lets go later by just
that, which is no fault of its cancelling. Which of the two judges: `harness.analysis.compare`.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from harness.analysis.comparable import why_not_figures
from harness.analysis.stats import normal_quantile, t_quantile
from harness.metrics import METRICS
from harness.records import Metric

Limits = tuple[float, float]

_Z95: Final = normal_quantile(0.975)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One figure (`p50`) of one metric in the baseline and in a candidate.

    `difference` is candidate - baseline with its interval (95 %), `ratio` candidate / baseline with
    its, and `ratio_in_steps` the same of what each is in steps of its own engine. What is null is
    not known; `note` says why the two are not compared.
    """

    metric: str
    figure: str
    unit: str
    baseline: float | None = None
    candidate: float | None = None
    difference: float | None = None
    difference_ci95: Limits | None = None
    ratio: float | None = None
    ratio_ci95: Limits | None = None
    ratio_in_steps: float | None = None
    note: str | None = None

    @property
    def ratio_in_steps_ci95(self) -> Limits | None:
        if self.ratio is None or self.ratio_ci95 is None or self.ratio_in_steps is None:
            return None
        scale = self.ratio_in_steps / self.ratio
        return self.ratio_ci95[0] * scale, self.ratio_ci95[1] * scale


def pair_of(
    name: str,
    figure: str,
    baseline: Metric,
    candidate: Metric,
    *,
    steps_s: tuple[float | None, float | None] = (None, None),
    counting: tuple[str | None, str | None] = (None, None),
) -> Pair:
    """Compare a figure; `steps_s`: how long a step of the baseline and of the candidate takes,
    `counting`: how each counted its tokens."""
    a, b = getattr(candidate, figure), getattr(baseline, figure)
    found = Pair(metric=name, figure=figure, unit=baseline.unit, baseline=b, candidate=a)
    note = why_not_figures(name, baseline, candidate, counting)
    if note is None and (a is None or b is None):
        note = "not known of both"
    if note is not None:
        return msgspec.structs.replace(found, note=note)
    limits = limits_of(candidate, figure), limits_of(baseline, figure)
    ratio = a / b if a > 0 and b > 0 else None
    return msgspec.structs.replace(
        found,
        difference=a - b,
        difference_ci95=difference_ci95(a, limits[0], b, limits[1]),
        ratio=ratio,
        ratio_ci95=None if ratio is None else ratio_ci95(a, limits[0], b, limits[1]),
        ratio_in_steps=_in_steps(ratio, baseline.unit, *steps_s),
    )


def limits_of(metric: Metric, figure: str) -> Limits | None:
    """The 95 % interval of a figure, where there is one."""
    limits: Limits | None = getattr(metric, f"{figure}_ci95", None)
    is_rate = metric.upper95 is not None or metric.lower95 is not None
    if limits is None and figure == "mean" and is_rate and metric.mean is not None:
        return wilson_ci95(metric.mean, metric.n)
    return limits


def difference_ci95(a: float, of_a: Limits | None, b: float, of_b: Limits | None) -> Limits | None:
    """The interval of a - b, None where one of theirs is not known."""
    if of_a is None or of_b is None:
        return None
    below = math.hypot(a - of_a[0], of_b[1] - b)
    above = math.hypot(of_a[1] - a, b - of_b[0])
    return a - b - below, a - b + above


def ratio_ci95(a: float, of_a: Limits | None, b: float, of_b: Limits | None) -> Limits | None:
    """The interval of a / b, None where one of theirs is not known or reaches down to 0."""
    if of_a is None or of_b is None or min(of_a[0], of_b[0]) <= 0:
        return None
    logs = [
        (math.log(value), (math.log(low), math.log(high)))
        for value, (low, high) in ((a, of_a), (b, of_b))
    ]
    limits = difference_ci95(*logs[0], *logs[1])
    return None if limits is None else (math.exp(limits[0]), math.exp(limits[1]))


def wilson_ci95(share: float, n: int) -> Limits:
    """The interval of a share of n."""
    z2 = _Z95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def _in_steps(
    ratio: float | None, unit: str, baseline_s: float | None, candidate_s: float | None
) -> float | None:
    if ratio is None or unit != "s" or not baseline_s or not candidate_s:
        return None
    return ratio * baseline_s / candidate_s


class Standing(StrEnum):
    """The candidate against the baseline."""

    BETTER = "better"
    WORSE = "worse"
    UNSURE = "no sure difference"
    NOT_COMPARED = "not compared"
    NOT_JUDGED = "not judged"


def standing(pair: Pair) -> Standing:
    """Where the interval leaves out "no difference", the direction of the figure decides."""
    if pair.note is not None or pair.difference is None:
        return Standing.NOT_COMPARED
    if METRICS[pair.metric].better == "neither":
        return Standing.NOT_JUDGED
    signs = _signs(pair, pair.difference)
    if signs not in ({1}, {-1}):
        return Standing.UNSURE
    is_better = (signs == {1}) == (METRICS[pair.metric].better == "more")
    return Standing.BETTER if is_better else Standing.WORSE


def is_sure(pair: Pair) -> bool:
    """Does either of the two surely do better?"""
    return standing(pair) in (Standing.BETTER, Standing.WORSE)


def _signs(pair: Pair, difference: float) -> set[int]:
    """By each way to look at it: 1, the candidate surely has more; -1, less; 0, nobody knows."""
    if METRICS[pair.metric].kind == "idle":
        return {_sign((difference, difference), 0.0)}
    signs = {_sign(pair.difference_ci95, 0.0)}
    if pair.ratio_in_steps is not None:
        signs.add(_sign(pair.ratio_in_steps_ci95, 1.0))
    return signs


def _sign(limits: Limits | None, even: float) -> int:
    """On which side of even the whole interval lies; 0 where it holds it, or is not known."""
    if limits is None:
        return 0
    return (limits[0] > even) - (limits[1] < even)


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
