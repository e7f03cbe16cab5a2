"""The range in which the true value of a figure lies, as far as one run shows.

A limit is judged by the range and not by the figure in its middle, so a build that is as good as
its limit is not called bad by chance. Ranges:

- a mean: its 95 % interval, from `FEWEST_FOR_MEAN` values on;
- p50 and p99: their intervals from order statistics; p90 and p95 lie between those two;
- a share: the one-sided 95 % bounds of Clopper and Pearson;
- a largest value and a count: the value itself, which is certain of this run;
- a figure without an interval: that of its rounds, from `compare.FEWEST_ROUNDS` rounds on.

A figure that is only a bound leaves the range open on the other side. A cancel latency among
requests that were never let go is infinite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from harness.compare.pairs import FEWEST_ROUNDS
from harness.formatting import figure_of, number, quantity, unit_in_figure
from harness.gate.limits import Limit
from harness.intervals import fewest_for_rate_below, rate_lower95, rate_upper95
from harness.metrics import METRICS
from harness.records import Metric
from harness.stats import mean_ci95

FEWEST_FOR_MEAN: Final = 30
MOST_TIMES: Final = 1000  # as many abandons: a longer run is not worth proposing
_QUANTILES: Final = ("p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The true value lies between `low` and `high`; by default nothing is known of it.

    `shown`: the measurement in words. If the range decides nothing, `reason` says why and
    `to_decide` what would narrow it.
    """

    low: float = -math.inf
    high: float = math.inf
    shown: str = ""
    reason: str = "the limit lies within what the true value can be"
    to_decide: str


def figure_range(limit: Limit, metric: Metric, per_round: Sequence[float | None]) -> Range:
    key, value = limit.key, getattr(metric, limit.key)
    is_reading = metric.mean is not None and metric.mean_ci95 is None and metric.p50 is None
    if key in metric.lower_bounds:
        return _among_censored(limit, metric)
    if _is_share(metric) and key in ("mean", "upper95", "lower95"):
        return _share(limit, metric)
    if key in ("mean", "upper95") and metric.mean is None and metric.upper95 is not None:
        return _only_limited(metric, metric.upper95)
    if key == "max" and value is None and is_reading:
        value = metric.mean
    if value is None:
        return _has_none(limit, metric)
    if key == "max" or (key == "mean" and is_reading):
        return _bounded(metric, value, value, quantity(value, metric.unit), "")
    if key == "mean":
        return _mean(limit, metric, value)
    return _quantile(limit, metric, value, [one for one in per_round if one is not None])


def _is_share(metric: Metric) -> bool:
    has_bound = metric.upper95 is not None or metric.lower95 is not None
    return metric.unit == "ratio" and metric.mean is not None and has_bound


def _among_censored(limit: Limit, metric: Metric) -> Range:
    shown = f"{figure_of(metric, limit.key)}: {metric.n_censored:,} of {metric.n:,}"
    if METRICS[limit.metric].never_over:
        shown += " were never let go"
        return Range(low=math.inf, high=math.inf, shown=shown, to_decide="")
    return Range(
        low=metric.lower_bounds[limit.key],
        shown=f"{shown} are not known to their end",
        to_decide="users who stay until the end, or a limit on a lower quantile",
    )


def _share(limit: Limit, metric: Metric) -> Range:
    seen = metric.mean or 0.0
    hits = round(seen * metric.n)
    shown = f"{hits:,} of {metric.n:,}"
    if limit.operator == "==":
        return Range(low=seen, high=seen, shown=shown, to_decide="")
    low, high = rate_lower95(hits, metric.n), rate_upper95(hits, metric.n)
    return Range(
        low=low,
        high=high,
        shown=f"{shown}, so {quantity(low, 'ratio')} to {quantity(high, 'ratio')}",
        to_decide=_enough_for_share(limit, hits, metric.n),
    )


def _enough_for_share(limit: Limit, hits: int, n: int) -> str:
    if not hits and limit.is_upper and 0 < limit.number < 1:
        enough = fewest_for_rate_below(limit.number)
        return f"{enough:,} without a single one would do: {enough - n:,} more"
    times = 2
    while times < MOST_TIMES:
        low, high = rate_lower95(hits * times, n * times), rate_upper95(hits * times, n * times)
        if limit.holds(low) == limit.holds(high):
            return f"about {n * times:,} would do, if the share stays so: {n * (times - 1):,} more"
        times *= 2
    return "the share is as good as the limit: no number of abandons tells them apart"


def _only_limited(metric: Metric, upper: float) -> Range:
    enough = metric.needs.get("mean")
    more = "more would not do" if enough is None else _would_do(enough, metric.n)
    return Range(
        high=upper,
        shown=f"\N{LESS-THAN OR EQUAL TO} {quantity(upper, metric.unit)}",
        to_decide=f"more abandons: {more}",
    )


def _would_do(enough: int, n: int) -> str:
    return f"{enough:,} would do: {enough - n:,} more"


def _has_none(limit: Limit, metric: Metric) -> Range:
    if limit.key in ("mean", "max") and metric.n_censored:
        return Range(
            reason=f"{metric.n_censored:,} of {metric.n:,} are not known to their end: no "
            f"{limit.key}",
            to_decide="a limit on a quantile, which can be known all the same",
        )
    found = [key for key in ("mean", *_QUANTILES, "max") if getattr(metric, key) is not None]
    return Range(
        reason=f"{limit.metric} has no {limit.key} here, only {', '.join(found) or 'bounds'}",
        to_decide="a limit on a key that it has",
    )


def _mean(limit: Limit, metric: Metric, mean: float) -> Range:
    if metric.mean_ci95 is None:
        return Range(reason=f"the mean of {metric.n:,} has no interval", to_decide="more of them")
    is_reading_a_round = metric.p50 is None
    fewest = FEWEST_ROUNDS if is_reading_a_round else FEWEST_FOR_MEAN
    if metric.n < fewest:
        reason = f"{metric.n} are too few for a mean"
        return Range(reason=reason, to_decide=_would_do(fewest, metric.n))
    low, high = metric.mean_ci95
    more = _enough_for_mean(abs(mean - limit.number), (high - low) / 2, metric.n)
    return _bounded(metric, low, high, _with_range(metric, mean, low, high), more)


def _enough_for_mean(distance: float, half: float, n: int) -> str:
    if half >= distance * math.sqrt(MOST_TIMES):
        return "it is as good as the limit: no number of abandons tells them apart"
    enough = math.ceil(n * (half / distance) ** 2)
    return f"about {enough:,} would do, if it stays so: {max(1, enough - n):,} more"


def _quantile(limit: Limit, metric: Metric, value: float, rounds: Sequence[float]) -> Range:
    """The range is the quantile's own interval. On a side without one, the interval of a lower
    (higher) quantile bounds it."""
    place = _QUANTILES.index(limit.key)
    intervals = [getattr(metric, f"{key}_ci95", None) for key in _QUANTILES]
    low = max((one[0] for one in intervals[: place + 1] if one is not None), default=-math.inf)
    high = min((one[1] for one in intervals[place:] if one is not None), default=math.inf)
    if math.isinf(low) and math.isinf(high):
        return _over_rounds(limit, metric, value, rounds)
    enough = metric.needs.get(f"{limit.key}_ci95")
    if enough is not None:
        more = _would_do(enough, metric.n)
    else:
        more = f"more of them: there are {metric.n:,}, and twice as many narrow it by a third"
    return _bounded(metric, low, high, _with_range(metric, value, low, high), more)


def _over_rounds(limit: Limit, metric: Metric, value: float, rounds: Sequence[float]) -> Range:
    if len(rounds) >= FEWEST_ROUNDS and (limits := mean_ci95(np.array(rounds))) is not None:
        shown = f"{_with_range(metric, value, *limits)} over {len(rounds)} rounds"
        return _bounded(metric, *limits, shown, "more rounds: `run.rounds`")
    return Range(
        reason=f"{quantity(value, metric.unit)}, but {limit.metric}.{limit.key} has no interval "
        "within one run: its values depend on each other, or are too few",
        to_decide=f"a limit on its mean, or {FEWEST_ROUNDS} rounds (`[[arms]]` and `run.rounds`)",
    )


def _bounded(metric: Metric, low: float, high: float, shown: str, to_decide: str) -> Range:
    if metric.bound == "point":
        return Range(low=low, high=high, shown=shown, to_decide=to_decide)
    better = f"a figure by another method: by {metric.method} it is a {metric.bound} bound"
    if metric.bound == "lower":
        shown = f"\N{GREATER-THAN OR EQUAL TO} {shown}"
        return Range(low=low, shown=shown, to_decide=better)
    return Range(high=high, shown=f"\N{LESS-THAN OR EQUAL TO} {shown}", to_decide=better)


def _with_range(metric: Metric, value: float, low: float, high: float) -> str:
    shown = quantity(value, metric.unit)
    if math.isinf(low) or math.isinf(high):
        return f"{shown} (n {metric.n:,})"
    has_unit = bool(unit_in_figure(metric.unit))
    ends = (quantity(end, metric.unit) if has_unit else number(end) for end in (low, high))
    return f"{shown} ({' to '.join(ends)})"
