"""The full table: every figure of a run with how it was obtained, formatted for reading."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from dashboards.words import DASH, figure_of, interval, quantity
from harness.records import Metric

COLUMNS: Final = (
    "n",
    "censored",
    "mean",
    "p50",
    "p90",
    "p95",
    "p99",
    "max",
    "at most (95 %)",
    "method",
    "bound",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric: its cells in the order of `COLUMNS`, and what else is known of it."""

    name: str
    cells: tuple[str, ...]
    flag: str | None
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTable:
    """The metrics of a run or of one arm of it."""

    caption: str
    rows: tuple[Row, ...]


def metric_table(
    caption: str, metrics: Mapping[str, Metric], flags: Mapping[str, str]
) -> MetricTable:
    """A row for each metric, in the order given; `flags` says which are not to be believed."""
    rows = tuple(_row(name, metric, flags.get(name)) for name, metric in metrics.items())
    return MetricTable(caption=caption, rows=rows)


def _row(name: str, metric: Metric, flag: str | None) -> Row:
    figures = (figure_of(metric, key) for key in ("mean", "p50", "p90", "p95", "p99", "max"))
    return Row(
        name=name,
        cells=(
            f"{metric.n:,}",
            f"{metric.n_censored:,}",
            *figures,
            quantity(metric.upper95, metric.unit),
            metric.method,
            metric.bound,
        ),
        flag=flag,
        remarks=tuple(_remarks(metric)),
    )


def _remarks(metric: Metric) -> list[str]:
    remarks = [
        f"95 % interval of the {key}: {limits}"
        for key in ("mean", "p50", "p99")
        if (limits := interval(metric, key)) is not None
    ]
    remarks += [f"{name}: {_other(value, metric)}" for name, value in metric.others.items()]
    return remarks


def _other(value: object, metric: Metric) -> str:
    """The same figure by another method: a number, or a metric of its own."""
    if isinstance(value, Mapping):
        other = msgspec.convert(value, Metric)
        figures = [f"{key} {figure_of(other, key)}" for key in ("mean", "p50", "p99")]
        return ", ".join([*(text for text in figures if DASH not in text), f"n {other.n:,}"])
    return quantity(value, metric.unit) if isinstance(value, int | float) else str(value)
