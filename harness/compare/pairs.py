"""How far apart two figures are, and how surely: one method for each kind of figure.

- Two arms, round by round (`compare_rounds`, paired): Student's t of the paired differences.
  Student, Biometrika 6 (1908), 1-25.
- The rounds of two separate runs (`compare_rounds`, not paired): Welch's t.
  Welch, Biometrika 34 (1947), 28-35.
- One figure of two runs (`pair_of`): Zou and Donner, from the intervals of the two figures.
  Statistics in Medicine 27 (2008), 1693-1702. For shares these are Wilson's, which makes it
  Newcombe's method: Statistics in Medicine 17 (1998), 873-890.
- Single requests (`shift_between`): the shift of Hodges and Lehmann, limits by the rank sum test.
  Annals of Mathematical Statistics 34 (1963), 598-611.

Every interval holds 95 %. A ratio is compared by the same method on logarithms. Zou and Donner:
with a in [l, u] and b in [l', u'], a - b lies between

    (a - b) - sqrt((a - l)^2 + (u' - b)^2)  and  (a - b) + sqrt((u - a)^2 + (b - l')^2).

A time is compared in seconds and in steps of its engine: a server with slower steps lets go later
by just that, which is no fault of its cancelling. Step times are taken as known.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from harness.compare.comparable import why_not_figures
from harness.intervals import Z95, t_quantile
from harness.metrics import METRICS, headline_figures
from harness.records import ArmsSummary, Difference, Metric, Shift
from harness.stats import Floats, mean_ci95

Limits = tuple[float, float]
Values = Sequence[float | None]  # a figure's value in each round, None where a round has none

FEWEST_ROUNDS: Final = 3
FEWEST_REQUESTS: Final = 5  # of each sample: the rank sum's normal approximation needs them
MOST_REQUESTS: Final = 2_000  # of each sample: 4 million differences


def compare_rounds(
    arm: str, reference: str, values: Values, reference_values: Values, *, paired: bool
) -> Difference:
    """Compare two sides by one value a round. `paired`: rounds of the same number belong together;
    else the sides are separate runs, which may have different numbers of rounds."""
    sides = values, reference_values
    if paired:
        both = [one for one in zip(*sides, strict=True) if None not in one]
        mine, theirs = np.array(both, dtype=float).reshape(-1, 2).T
    else:
        mine, theirs = (
            np.array([one for one in side if one is not None], dtype=float) for side in sides
        )
    n = min(len(mine), len(theirs))
    if not n:
        note = "no round has a value of both arms"
        return Difference(arm=arm, reference=reference, n=0, note=note)
    difference, difference_ci95 = _apart(mine, theirs, paired=paired)
    ratio = ratio_ci95 = None
    is_positive = bool((mine > 0).all() and (theirs > 0).all())
    if is_positive:
        log, limits = _apart(np.log(mine), np.log(theirs), paired=paired)
        ratio = float(np.exp(log))
        if limits is not None:
            ratio_ci95 = float(np.exp(limits[0])), float(np.exp(limits[1]))
    return Difference(
        arm=arm,
        reference=reference,
        n=n,
        difference=difference,
        difference_ci95=difference_ci95,
        ratio=ratio,
        ratio_ci95=ratio_ci95,
        note=_note(n, len(values) - n if paired else 0, is_positive=is_positive),
    )


def headline_differences(summary: ArmsSummary) -> list[tuple[str, str, Difference]]:
    return [
        (name, key, one)
        for name, key in headline_figures(summary.metrics, summary.headlines)
        for one in summary.differences.get(name, {}).get(key, [])
    ]


def is_certain(difference: Difference) -> bool:
    if difference.ratio_ci95 is not None:
        return _side_of(1.0, difference.ratio_ci95) != 0
    return _side_of(0.0, difference.difference_ci95) != 0


def _apart(mine: Floats, theirs: Floats, *, paired: bool) -> tuple[float, Limits | None]:
    is_enough = min(len(mine), len(theirs)) >= FEWEST_ROUNDS
    if paired:
        return float((mine - theirs).mean()), mean_ci95(mine - theirs) if is_enough else None
    difference = float(mine.mean() - theirs.mean())
    return difference, _welch_ci95(difference, mine, theirs) if is_enough else None


def _welch_ci95(difference: float, mine: Floats, theirs: Floats) -> Limits:
    """Difference of means ± t(0.975, Welch-Satterthwaite) * its standard error.

    `scipy.stats.ttest_ind` gives the same, but takes a second to import.
    """
    parts = [float(values.var(ddof=1)) / len(values) for values in (mine, theirs)]
    if not sum(parts):
        return difference, difference
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (mine, theirs), strict=True)
    )
    half = t_quantile(0.975, freedom) * math.sqrt(sum(parts))
    return difference - half, difference + half


def _note(n: int, num_left_out: int, *, is_positive: bool) -> str | None:
    said = []
    if n < FEWEST_ROUNDS:
        said.append(f"not enough data for an interval: {n} of at least {FEWEST_ROUNDS} rounds")
    elif not is_positive:
        said.append("not enough data for a ratio: a round has a value of zero, or below")
    if num_left_out:
        said.append(f"{num_left_out} of {n + num_left_out} rounds have no value of both arms")
    return "; ".join(said) or None


def shift_between(values: Floats, reference: Floats) -> Shift:
    """Compare two samples of single requests, in which censored values are infinite: the median of
    all differences between a value of the one and one of the other.

    A sample of more than `MOST_REQUESTS` values enters as that many evenly spaced order statistics,
    which moves a limit by less than a thousandth of the interval.
    """
    n, m = len(values), len(reference)
    counted = Shift(
        n=n,
        n_reference=m,
        n_censored=int(np.isinf(values).sum()),
        n_reference_censored=int(np.isinf(reference).sum()),
    )
    if min(n, m) < FEWEST_REQUESTS:
        note = f"not enough data: {n} and {m} values, and at least {FEWEST_REQUESTS} of each are "
        return msgspec.structs.replace(counted, note=f"{note}needed")
    mine, theirs = np.sort(values), np.sort(reference)
    differences = _all_differences(_thinned(mine), _thinned(theirs))
    size = len(differences)
    rank = _lower_rank(mine, theirs) * size // (n * m)
    ranks = [(size - 1) // 2, size // 2, rank, size - 1 - rank]
    differences.partition(sorted(set(ranks)))
    middle, limits = differences[ranks[:2]], differences[ranks[2:]]
    is_known = bool(np.isfinite(middle).all())
    return msgspec.structs.replace(
        counted,
        shift=float(middle.mean()) if is_known else None,
        shift_ci95=(float(limits[0]), float(limits[1])) if np.isfinite(limits).all() else None,
        superiority=_superiority(mine, theirs),
        note=None if is_known else "too many of the values are only known to exceed a time",
    )


def _thinned(ordered: Floats) -> Floats:
    n = len(ordered)
    if n <= MOST_REQUESTS:
        return ordered
    ranks = ((np.arange(MOST_REQUESTS) + 0.5) * n / MOST_REQUESTS).astype(np.int64)
    return np.take(ordered, ranks)


def _all_differences(mine: Floats, theirs: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        differences = np.subtract.outer(mine, theirs).ravel()
    differences[np.isnan(differences)] = 0.0
    return differences


def _superiority(mine: Floats, theirs: Floats) -> float:
    below = np.searchsorted(theirs, mine, side="left").sum()
    not_above = np.searchsorted(theirs, mine, side="right").sum()
    return float(below + not_above) / 2 / (len(mine) * len(theirs))


def _lower_rank(mine: Floats, theirs: Floats) -> int:
    n, m = len(mine), len(theirs)
    _, ties = np.unique(np.concatenate([mine, theirs]), return_counts=True)
    tie_term = float((ties.astype(float) ** 3 - ties).sum()) / ((n + m) * (n + m - 1))
    spread = np.sqrt(n * m / 12 * ((n + m + 1) - tie_term))
    rank = int(np.floor(n * m / 2 - Z95 * spread))
    return min(max(rank, 0), (n * m - 1) // 2)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One figure (`p50`) of one metric in the baseline and in a candidate.

    `difference` is candidate - baseline, `ratio` candidate / baseline, each with its interval, and
    `ratio_in_steps` the ratio of both in steps of their own engines. `note` says why the two are
    not compared.
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
    steps_s: Sequence[float | None] = (None, None),
    counting: tuple[str | None, str | None] = (None, None),
) -> Pair:
    a, b = getattr(candidate, figure), getattr(baseline, figure)
    found = Pair(metric=name, figure=figure, unit=baseline.unit, baseline=b, candidate=a)
    note = why_not_figures(name, baseline, candidate, counting)
    if note is None and (a is None or b is None):
        note = "not known of both"
    if note is not None:
        return msgspec.structs.replace(found, note=note)
    limits = limits_of(candidate, figure), limits_of(baseline, figure)
    ratio = a / b if a > 0 and b > 0 else None
    in_steps = None
    if ratio is not None and baseline.unit == "s" and steps_s[0] and steps_s[1]:
        in_steps = ratio * steps_s[0] / steps_s[1]
    return msgspec.structs.replace(
        found,
        difference=a - b,
        difference_ci95=difference_ci95(a, limits[0], b, limits[1]),
        ratio=ratio,
        ratio_ci95=None if ratio is None else ratio_ci95(a, limits[0], b, limits[1]),
        ratio_in_steps=in_steps,
    )


def limits_of(metric: Metric, figure: str) -> Limits | None:
    limits: Limits | None = getattr(metric, f"{figure}_ci95", None)
    is_rate = metric.upper95 is not None or metric.lower95 is not None
    if limits is None and figure == "mean" and is_rate and metric.mean is not None:
        return wilson_ci95(metric.mean, metric.n)
    return limits


def difference_ci95(
    a: float, a_ci95: Limits | None, b: float, b_ci95: Limits | None
) -> Limits | None:
    if a_ci95 is None or b_ci95 is None:
        return None
    below = math.hypot(a - a_ci95[0], b_ci95[1] - b)
    above = math.hypot(a_ci95[1] - a, b - b_ci95[0])
    return a - b - below, a - b + above


def ratio_ci95(a: float, a_ci95: Limits | None, b: float, b_ci95: Limits | None) -> Limits | None:
    if a_ci95 is None or b_ci95 is None or min(a_ci95[0], b_ci95[0]) <= 0:
        return None
    logs = [(math.log(low), math.log(high)) for low, high in (a_ci95, b_ci95)]
    limits = difference_ci95(math.log(a), logs[0], math.log(b), logs[1])
    return None if limits is None else (math.exp(limits[0]), math.exp(limits[1]))


def wilson_ci95(share: float, n: int) -> Limits:
    z2 = Z95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


class Standing(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    UNSURE = "no clear difference"
    NOT_COMPARED = "not compared"
    NOT_JUDGED = "not judged"

    @property
    def signed(self) -> str:
        """The value with the sign that it has in pictures, too, so that no colour is needed to tell
        it."""
        return f"{_SIGNS[self]} {self}"


_SIGNS: Final = {
    Standing.BETTER: "\N{BLACK CIRCLE}",
    Standing.WORSE: "\N{HEAVY MULTIPLICATION X}",
    Standing.UNSURE: "\N{WHITE CIRCLE}",
    Standing.NOT_COMPARED: "\N{EN DASH}",
    Standing.NOT_JUDGED: "\N{WHITE DIAMOND}",
}


def standing(pair: Pair) -> Standing:
    info = METRICS[pair.metric]
    if pair.note is not None or pair.difference is None:
        return Standing.NOT_COMPARED
    if info.better == "neither":
        return Standing.NOT_JUDGED
    certain = (pair.difference, pair.difference)
    sides = {_side_of(0.0, certain if info.kind == "idle" else pair.difference_ci95)}
    if pair.ratio_in_steps is not None and info.kind != "idle":
        sides.add(_side_of(1.0, pair.ratio_in_steps_ci95))
    if sides not in ({1}, {-1}):
        return Standing.UNSURE
    return Standing.BETTER if (sides == {1}) == (info.better == "more") else Standing.WORSE


def is_sure(pair: Pair) -> bool:
    return standing(pair) in (Standing.BETTER, Standing.WORSE)


def _side_of(even: float, limits: Limits | None) -> int:
    if limits is None:
        return 0
    return (limits[0] > even) - (limits[1] < even)
