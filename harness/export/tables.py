"""Rows of a summary's tables as text, for the terminal and the report: agreement of methods, audit
of counters, value of cancellation."""

from collections.abc import Mapping, Sequence
from typing import Final

from harness.formatting import (
    DASH,
    SELF_EVIDENT_UNITS,
    between,
    change_in_words,
    number,
    quantity,
)
from harness.records import Agreement, AuditEntry, Difference, Stage, Steady, Value, ValueRow

AGREEMENT_COLUMNS: Final = (
    "figure",
    "method",
    "exact",
    "value",
    "difference (95 %)",
    "may be off by",
)
AUDIT_COLUMNS: Final = ("counter", "due", "moved by", "verdict")


def agreement_cells(one: Agreement) -> tuple[str, ...]:
    """A row of `AGREEMENT_COLUMNS`; "!" marks a difference that the rules do not explain."""
    unit = one.unit if one.unit in SELF_EVIDENT_UNITS else ""
    return (
        one.metric,
        f"{one.method} ({one.n})",
        quantity(one.exact, unit),
        quantity(one.value, unit),
        quantity(one.difference, unit)
        + _in_brackets(one.difference_ci95, unit)
        + ("" if one.agrees else " !"),
        between(one.bias, unit) or DASH,
    )


def audit_cells(entry: AuditEntry) -> tuple[str, ...]:
    return (
        entry.role if entry.name is None else f"{entry.role} ({entry.name})",
        _due(entry.due),
        DASH if entry.moved is None else number(entry.moved),
        entry.verdict if entry.note is None else f"{entry.verdict}: {entry.note}",
    )


def client_facts(client: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    return [(name.replace("_", " "), number(value)) for name, value in client.items() if value]


def _in_brackets(limits: tuple[float, float] | None, unit: str) -> str:
    return "" if limits is None else f" ({between(limits, unit)})"


def _due(due: tuple[float, float | None] | None) -> str:
    if due is None:
        return DASH
    low, high = due
    if high is None:
        return f"≥ {number(low)}"
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def steady_in_words(steady: Steady | None) -> str:
    if steady is None:
        return "not judged"
    if steady.is_steady is None:
        return str(steady.note)
    if not steady.is_steady:
        return f"not steady ({steady.rule})"
    throughput = quantity(steady.steady_tps, "tokens/s")
    return f"after {quantity(steady.warmup_s, 's')}, then {throughput} read"


STAGE_COLUMNS: Final = ("stage", "what", "p50", "p99", "the source's limits")


def value_columns(value: Value) -> tuple[str, ...]:
    return ("", value.ignored, value.honoured, "change (95 %)")


def value_cells(row: ValueRow) -> tuple[str, ...]:
    return (
        row.name,
        quantity(row.ignored, row.unit),
        quantity(row.honoured, row.unit),
        _change(row.change, row.unit),
    )


def stage_cells(stage: Stage) -> tuple[str, ...]:
    low, high = stage.source_s
    return (
        stage.name,
        stage.what,
        quantity(stage.p50, "s"),
        quantity(stage.p99, "s"),
        f"{quantity(low, 's')} to {quantity(high, 's')}",
    )


def _change(one: Difference, unit: str) -> str:
    """The ratio as "-98.7 % (-99.1 to -98.1)", else the difference."""
    if one.ratio is None:
        return change_in_words(one, unit)[0]
    limits = one.ratio_ci95
    between = "" if limits is None else f" ({_percent(limits[0])} to {_percent(limits[1])})"
    return f"{_percent(one.ratio)} %{between}"


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{'+' if change > 0 else ''}{number(change)}"
