"""From samples to `Metric`: one entry of the summary, or the reason why there is none.

A figure that cannot be known is never 0 and never dropped: it is `NotMeasurable`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.intervals import rate_lower95, rate_upper95
from harness.metrics import METRICS
from harness.records import Metric
from harness.stats import (
    Bools,
    Curve,
    Floats,
    Ints,
    clustered_mean_ci95,
    curve_at,
    fewest_for_quantile,
    kaplan_meier,
    mean_ci95,
    quantile,
    quantile_ci95,
)

QUANTILES: Final = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class NotMeasurable:
    reason: str


Figure = Metric | NotMeasurable
Figures = dict[str, Figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Observations of one quantity; where `censored`, the true value is known to be larger.

    `clusters` are the sizes of groups within which observations depend on each other (the gaps of
    one request), one group after the other. `is_series`: each depends on its neighbours (the steps
    of one engine), so there is no interval.
    """

    values: Floats
    censored: Bools | None = None
    clusters: Ints | None = None
    is_series: bool = False

    @classmethod
    def of(cls, rows: pd.DataFrame, column: str) -> "Sample":
        """A column of rows that say in `censored` whether its value is known to be larger."""
        return cls(
            values=rows[column].to_numpy(dtype=float),
            censored=rows["censored"].to_numpy(dtype=bool),
        )

    @property
    def is_censored(self) -> Bools:
        if self.censored is None:
            return np.zeros(len(self.values), dtype=bool)
        return self.censored

    def curve(self) -> Curve:
        return kaplan_meier(self.values, self.is_censored)

    def and_longer_than(self, bounds: Sequence[float]) -> "Sample":
        return replace(
            self,
            values=np.concatenate([self.values, np.asarray(bounds, dtype=float)]),
            censored=np.concatenate([self.is_censored, np.ones(len(bounds), dtype=bool)]),
        )


def describe(sample: Sample, *, unit: str, method: str, bound: str = "point") -> Metric:
    """A censored sample has no known mean and no known largest value: both depend on how long the
    censored ones would have taken. Needs at least one observation."""
    curve = curve_at(sample.values, sample.is_censored, QUANTILES.values())
    if not curve.n:
        raise ValueError("a sample without observations has no figures")
    metric = Metric(unit=unit, n=curve.n, n_censored=curve.n_censored, method=method, bound=bound)
    last = float(curve.times[-1])
    for name, part in QUANTILES.items():
        value = quantile(curve, part)
        setattr(metric, name, value)
        if value is None:
            metric.lower_bounds[name] = last
    if curve.n_censored:
        metric.lower_bounds["max"] = last
    else:
        metric.mean, metric.max = float(np.mean(sample.values)), last
        if sample.clusters is not None:
            metric.mean_ci95 = clustered_mean_ci95(sample.values, sample.clusters)
        elif not sample.is_series:
            metric.mean_ci95 = mean_ci95(sample.values)
    if sample.clusters is None and not sample.is_series:
        metric.p50_ci95 = quantile_ci95(curve, 0.50)
        metric.p99_ci95 = quantile_ci95(curve, 0.99)
        metric.needs = {
            f"{name}_ci95": fewest
            for name in ("p50", "p99")
            if curve.n < (fewest := fewest_for_quantile(QUANTILES[name]))
        }
    return metric


def sampled(
    name: str, sample: Sample, why_empty: str, *, method: str, bound: str = "point"
) -> Figure:
    if not len(sample.values):
        return NotMeasurable(why_empty)
    return describe(sample, unit=METRICS[name].unit, method=method, bound=bound)


def proportion(name: str, claims: pd.Series, why_empty: str, *, method: str) -> Figure:
    known = claims.dropna()
    if known.empty:
        return NotMeasurable(why_empty)
    hits, n = int(known.sum()), len(known)
    if METRICS[name].better == "less":
        return rate(hits, n, method=method)
    lower95 = rate_lower95(hits, n)
    return Metric(unit="ratio", n=n, mean=hits / n, lower95=lower95, method=method)


def rate(hits: int, n: int, *, method: str) -> Metric:
    return Metric(unit="ratio", n=n, mean=hits / n, upper95=rate_upper95(hits, n), method=method)


def reading(
    name: str, value: float, *, method: str, n: int = 1, bound: str = "point", **more: Any
) -> Metric:
    unit = METRICS[name].unit
    return Metric(unit=unit, n=n, mean=float(value), method=method, bound=bound, **more)


def same_reason(names: Iterable[str], reason: str) -> Figures:
    return dict.fromkeys(names, NotMeasurable(reason))


def with_other(figure: Figure, name: str, other: Figure) -> Figure:
    if isinstance(figure, NotMeasurable):
        return other if isinstance(other, Metric) else figure
    if isinstance(other, Metric):
        figure.others[name] = other
    return figure
