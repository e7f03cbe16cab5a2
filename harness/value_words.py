"""The tables of what cancellation is worth, in words, for the terminal and for the report."""

from typing import Final

from harness.analysis.value import Stage, Value, ValueRow
from harness.differences import Difference
from harness.words import DASH, number, quantity

STAGE_COLUMNS: Final = ("stage", "what", "p50", "p99", "the source's limits")


def value_columns(value: Value) -> tuple[str, ...]:
    """The heads of the first table."""
    return ("", value.ignored, value.honoured, "change (95 %)")


def value_cells(row: ValueRow) -> tuple[str, ...]:
    """A row of the first table."""
    return (
        row.name,
        quantity(row.ignored, row.unit),
        quantity(row.honoured, row.unit),
        _change(row.change, row.unit),
    )


def stage_cells(stage: Stage) -> tuple[str, ...]:
    """A row of `STAGE_COLUMNS`."""
    low, high = stage.source_s
    return (
        stage.name,
        stage.what,
        quantity(stage.p50, "s"),
        quantity(stage.p99, "s"),
        f"{quantity(low, 's')} to {quantity(high, 's')}",
    )


def _change(one: Difference, unit: str) -> str:
    """The ratio as "-98.7 % (-99.1 to -98.1)"; without one the difference, of shares in percentage
    points: a percent of a percentage would be read as the ratio."""
    if one.ratio is not None:
        shown, limits = f"{_percent(one.ratio)} %", one.ratio_ci95
        between = "" if limits is None else f" ({_percent(limits[0])} to {_percent(limits[1])})"
        return shown + between
    if one.difference is not None:
        sign = "+" if one.difference > 0 else ""
        if unit == "ratio":
            return f"{sign}{number(100 * one.difference)} percentage points"
        return sign + quantity(one.difference, unit)
    return DASH


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{'+' if change > 0 else ''}{number(change)}"
