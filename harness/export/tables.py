"""Rows of a summary's tables as text, for the terminal and the report: agreement of methods, audit
of counters, value of cancellation."""

from collections.abc import Mapping, Sequence
from typing import Final

from harness.formatting import DASH, between, number, quantity, unit_in_figure
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
    unit = unit_in_figure(one.unit)
    limits = between(one.difference_ci95, unit)
    difference = quantity(one.difference, unit) + (f" ({limits})" if limits else "")
    return (
        one.metric,
        f"{one.method} ({one.n})",
        quantity(one.exact, unit),
        quantity(one.value, unit),
        difference if one.agrees else f"{difference} !",
        between(one.bias, unit) or DASH,
    )


def audit_cells(entry: AuditEntry) -> tuple[str, ...]:
    low, high = entry.due or (None, None)
    due = DASH if low is None else number(low)
    if low is not None and high != low:
        due = f"≥ {due}" if high is None else f"{due} to {number(high)}"
    return (
        entry.role if entry.name is None else f"{entry.role} ({entry.name})",
        due,
        DASH if entry.moved is None else number(entry.moved),
        entry.verdict if entry.note is None else f"{entry.verdict}: {entry.note}",
    )


def client_facts(client: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    return [(name.replace("_", " "), number(value)) for name, value in client.items() if value]


def steady_in_words(steady: Steady | None) -> str:
    if steady is None:
        return "not judged"
    if steady.is_steady is None:
        return str(steady.note)
    if not steady.is_steady:
        return f"not steady ({steady.rule})"
    throughput = quantity(steady.steady_tps, "tokens/s")
    return f"after {quantity(steady.warmup_s, 's')}, then {throughput} read"


STAGE_COLUMNS: Final = ("stage", "what", "source", "p50", "p99")


def value_columns(value: Value) -> tuple[str, ...]:
    return ("", "source", value.ignored, value.honoured, "change (95 %)")


def value_cells(row: ValueRow) -> tuple[str, ...]:
    return (
        row.name,
        row.source or DASH,
        quantity(row.ignored, row.unit),
        quantity(row.honoured, row.unit),
        _change(row.change, row.unit),
    )


def stage_cells(stage: Stage) -> tuple[str, ...]:
    return (
        stage.name,
        stage.what,
        DASH if stage.source_s is None else " to ".join(quantity(s, "s") for s in stage.source_s),
        quantity(stage.p50, "s"),
        quantity(stage.p99, "s"),
    )


def _change(one: Difference, unit: str) -> str:
    """The ratio as "-98.7 % (-99.1 to -98.1)", else the difference; shares differ in percentage
    points, since a percent of a percentage would be read as the ratio."""
    if one.ratio is not None:
        limits = "" if one.ratio_ci95 is None else " to ".join(map(_percent, one.ratio_ci95))
        return f"{_percent(one.ratio)} %" + (f" ({limits})" if limits else "")
    if one.difference is None:
        return DASH
    sign = "+" if one.difference > 0 else ""
    if unit == "ratio":
        return f"{sign}{number(100 * one.difference)} percentage points"
    return sign + quantity(one.difference, unit)


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{'+' if change > 0 else ''}{number(change)}"
