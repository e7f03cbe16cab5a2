"""The full table: every figure of a run with how it was obtained, formatted for reading."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from harness.records import Metric
from harness.words import DASH, SELF_EVIDENT_UNITS, figure_of, interval, quantity

COLUMNS: Final = (
    "n",
    "censored",
    "mean",
    "p50",
    "p90",
    "p95",
    "p99",
    "max",
    "method",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What stands in a table's cell, and in small type under it."""

    text: str
    under: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric: its cells in the order of `COLUMNS`, and what else is known of it."""

    name: str
    unit: str | None
    cells: tuple[Cell, ...]
    flag: str | None
    remarks: tuple[str, ...]


def metric_rows(metrics: Mapping[str, Metric], flags: Mapping[str, str]) -> tuple[Row, ...]:
    """A row for each metric, in the order given; `flags` says which are not to be believed."""
    return tuple(_row(name, metric, flags.get(name)) for name, metric in metrics.items())


def _row(name: str, metric: Metric, flag: str | None) -> Row:
    is_evident = metric.unit in SELF_EVIDENT_UNITS
    unit = metric.unit if is_evident else ""
    figures = [
        Cell(text=figure_of(metric, key, unit=unit), under=interval(metric, key, unit=unit))
        for key in ("p50", "p90", "p95", "p99", "max")
    ]
    mean_limits = interval(metric, "mean", unit=unit) or _one_sided(metric)
    return Row(
        name=name,
        unit=None if is_evident else metric.unit,
        cells=(
            Cell(text=f"{metric.n:,}"),
            Cell(text=f"{metric.n_censored:,}"),
            Cell(text=figure_of(metric, "mean", unit=unit), under=mean_limits),
            *figures,
            Cell(text=metric.method, under=None if metric.bound == "point" else metric.bound),
        ),
        flag=flag,
        remarks=tuple(f"{name}: {_other(value, metric)}" for name, value in metric.others.items()),
    )


def _one_sided(metric: Metric) -> str | None:
    if metric.upper95 is not None:
        return f"at most {quantity(metric.upper95, metric.unit)}"
    if metric.lower95 is not None:
        return f"at least {quantity(metric.lower95, metric.unit)}"
    return None


def _other(value: object, metric: Metric) -> str:
    """The same figure by another method: a number, or a metric of its own."""
    if isinstance(value, Mapping):
        other = msgspec.convert(value, Metric)
        figures = [f"{key} {figure_of(other, key)}" for key in ("mean", "p50", "p99")]
        return ", ".join([*(text for text in figures if DASH not in text), f"n {other.n:,}"])
    return quantity(value, metric.unit) if isinstance(value, int | float) else str(value)
