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

from harness.analysis.compare import FEWEST_ROUNDS
from harness.analysis.stats import fewest_for_rate_below, mean_ci95, rate_lower95, rate_upper95
from harness.formatting import figure_of, number, quantity
from harness.gate.limits import Limit
from harness.metrics import METRICS
from harness.records import Metric

FEWEST_FOR_MEAN: Final = 30
MOST_TIMES: Final = 1000  # as many abandons: a longer run is not worth proposing
_QUANTILES: Final = ("p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The true value lies between `low` and `high`. `shown`: the measurement in words; `to_decide`:
    what would narrow the range."""

    low: float
    high: float
    shown: str
    to_decide: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """The figure is not known. `to_decide`: what would change that."""

    reason: str
    to_decide: str


def figure_range(
    limit: Limit, metric: Metric, per_round: Sequence[float | None]
) -> Known | Unknown:
    """The range of a figure by itself. `per_round`: its value in each round."""
    if limit.key in metric.lower_bounds:
        return _among_censored(limit, metric)
    if _is_share(metric) and limit.key in ("mean", "upper95", "lower95"):
        return _share(limit, metric)
    if limit.key in ("mean", "upper95") and metric.mean is None and metric.upper95 is not None:
        return _only_limited(metric)
    if limit.key == "max" and metric.max is None and _is_reading(metric):
        return _certain(metric, "mean")
    if getattr(metric, limit.key) is None:
        return _has_none(limit, metric)
    if limit.key == "max" or (limit.key == "mean" and _is_reading(metric)):
        return _certain(metric, limit.key)
    if limit.key == "mean":
        return _mean(limit, metric)
    return _quantile(limit, metric, [value for value in per_round if value is not None])


def _among_censored(limit: Limit, metric: Metric) -> Known:
    low = metric.lower_bounds[limit.key]
    never = f"{metric.n_censored:,} of {metric.n:,}"
    if METRICS[limit.metric].never_over:
        shown = f"{figure_of(metric, limit.key)}: {never} were never let go"
        return Known(low=math.inf, high=math.inf, shown=shown, to_decide="")
    return Known(
        low=low,
        high=math.inf,
        shown=f"{figure_of(metric, limit.key)}: {never} are not known to their end",
        to_decide="users who stay until the end, or a limit on a lower quantile",
    )


def _share(limit: Limit, metric: Metric) -> Known:
    hits = round((metric.mean or 0.0) * metric.n)
    shown = f"{hits:,} of {metric.n:,}"
    if limit.operator == "==":
        seen = metric.mean or 0.0
        return Known(low=seen, high=seen, shown=shown, to_decide="")
    low, high = rate_lower95(hits, metric.n), rate_upper95(hits, metric.n)
    return Known(
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


def _only_limited(metric: Metric) -> Known:
    enough = metric.needs.get("mean")
    more = (
        "more would not do"
        if enough is None
        else f"{enough:,} would do: {enough - metric.n:,} more"
    )
    return Known(
        low=-math.inf,
        high=metric.upper95 if metric.upper95 is not None else math.inf,
        shown=f"\N{LESS-THAN OR EQUAL TO} {quantity(metric.upper95, metric.unit)}",
        to_decide=f"more abandons: {more}",
    )


def _has_none(limit: Limit, metric: Metric) -> Unknown:
    found = [key for key in ("mean", *_QUANTILES, "max") if getattr(metric, key) is not None]
    if limit.key in ("mean", "max") and metric.n_censored:
        return Unknown(
            reason=f"{metric.n_censored:,} of {metric.n:,} are not known to their end: no "
            f"{limit.key}",
            to_decide="a limit on a quantile, which can be known all the same",
        )
    return Unknown(
        reason=f"{limit.metric} has no {limit.key} here, only {', '.join(found) or 'bounds'}",
        to_decide="a limit on one of those",
    )


def _certain(metric: Metric, key: str) -> Known:
    value = float(getattr(metric, key))
    return _bounded(metric, value, value, quantity(value, metric.unit), "")


def _mean(limit: Limit, metric: Metric) -> Known | Unknown:
    if metric.mean_ci95 is None or metric.mean is None:
        return Unknown(reason=f"the mean of {metric.n:,} has no interval", to_decide="more of them")
    fewest = (
        FEWEST_ROUNDS if metric.p50 is None else FEWEST_FOR_MEAN
    )  # a reading a round, or a sample
    if metric.n < fewest:
        return Unknown(
            reason=f"{metric.n} are too few for a mean",
            to_decide=f"{fewest} would do: {fewest - metric.n} more",
        )
    low, high = metric.mean_ci95
    shown = _with_range(metric, metric.mean, low, high)
    return _bounded(
        metric, low, high, shown, _enough_for_mean(limit, metric.mean, low, high, metric.n)
    )


def _enough_for_mean(limit: Limit, mean: float, low: float, high: float, n: int) -> str:
    """The interval's half width shrinks with the square root of n."""
    distance, half = abs(mean - limit.number), (high - low) / 2
    if half >= distance * math.sqrt(MOST_TIMES):
        return "it is as good as the limit: no number of abandons tells them apart"
    enough = math.ceil(n * (half / distance) ** 2)
    return f"about {enough:,} would do, if it stays so: {max(1, enough - n):,} more"


def _quantile(limit: Limit, metric: Metric, rounds: Sequence[float]) -> Known | Unknown:
    value = float(getattr(metric, limit.key))
    low, high = _between_quantiles(limit.key, metric)
    if math.isinf(low) and math.isinf(high):
        return _over_rounds(limit, metric, value, rounds)
    enough = metric.needs.get(f"{limit.key}_ci95")
    if enough is not None:
        more = f"{enough:,} would do: {enough - metric.n:,} more"
    else:
        more = f"more of them: there are {metric.n:,}, and twice as many narrow it by a third"
    return _bounded(metric, low, high, _with_range(metric, value, low, high), more)


def _between_quantiles(key: str, metric: Metric) -> tuple[float, float]:
    """The quantile's own interval. On a side without one, the interval of a lower (higher) quantile
    bounds it."""
    place = _QUANTILES.index(key)
    low, high = -math.inf, math.inf
    for other in _QUANTILES[: place + 1]:
        if (interval := getattr(metric, f"{other}_ci95", None)) is not None:
            low = max(low, interval[0])
    for other in _QUANTILES[place:]:
        if (interval := getattr(metric, f"{other}_ci95", None)) is not None:
            high = min(high, interval[1])
    return low, high


def _over_rounds(
    limit: Limit, metric: Metric, value: float, rounds: Sequence[float]
) -> Known | Unknown:
    if len(rounds) >= FEWEST_ROUNDS and (limits := mean_ci95(np.array(rounds))) is not None:
        low, high = limits
        shown = f"{_with_range(metric, value, low, high)} over {len(rounds)} rounds"
        return _bounded(metric, low, high, shown, "more rounds: `run.rounds`")
    return Unknown(
        reason=f"{quantity(value, metric.unit)}, but {limit.metric}.{limit.key} has no interval "
        "within one run: its values depend on each other, or are too few",
        to_decide=f"a limit on its mean, or {FEWEST_ROUNDS} rounds (`[[arms]]` and `run.rounds`)",
    )


def _bounded(metric: Metric, low: float, high: float, shown: str, to_decide: str) -> Known:
    """The range, open on one side if the figure is only a bound."""
    if metric.bound == "point":
        return Known(low=low, high=high, shown=shown, to_decide=to_decide)
    is_lower = metric.bound == "lower"
    sign = "\N{GREATER-THAN OR EQUAL TO}" if is_lower else "\N{LESS-THAN OR EQUAL TO}"
    return Known(
        low=low if is_lower else -math.inf,
        high=math.inf if is_lower else high,
        shown=f"{sign} {shown}",
        to_decide=f"a figure by another method: by {metric.method} it is a {metric.bound} bound",
    )


def _with_range(metric: Metric, value: float, low: float, high: float) -> str:
    unit = metric.unit
    if math.isinf(low) or math.isinf(high):
        return f"{quantity(value, unit)} (n {metric.n:,})"
    return f"{quantity(value, unit)} ({_plain(low, unit)} to {_plain(high, unit)})"


def _plain(value: float, unit: str) -> str:
    return quantity(value, unit) if unit in ("s", "ratio", "bytes") else number(value)


def _is_share(metric: Metric) -> bool:
    has_bound = metric.upper95 is not None or metric.lower95 is not None
    return metric.unit == "ratio" and metric.mean is not None and has_bound


def _is_reading(metric: Metric) -> bool:
    """One number for the whole run, without a sign of how much it varies."""
    return metric.mean is not None and metric.mean_ci95 is None and metric.p50 is None
