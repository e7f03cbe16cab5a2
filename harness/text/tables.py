"""Rows of a summary's tables as text, for the terminal and the report: agreement of methods, audit
of counters, value of cancellation, early stopping by task."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from harness.formatting import DASH, between, number, quantity, spoken_outcome, unit_in_figure
from harness.metrics import METRICS, headline_figures
from harness.records import (
    Agreement,
    ArmsSummary,
    AuditEntry,
    Difference,
    OverReplicas,
    Stage,
    Steady,
    Summary,
    TaskSavings,
    Value,
    ValueRow,
)

AGREEMENT_COLUMNS: Final = (
    "figure",
    "method",
    "exact",
    "value",
    "difference (95 %)",
    "may be off by",
)
AUDIT_COLUMNS: Final = ("counter", "due", "moved by", "verdict")


def agreement_cells(agreement: Agreement) -> tuple[str, ...]:
    unit = unit_in_figure(agreement.unit)
    difference = _with_limits(agreement.difference, agreement.difference_ci95, unit)
    return (
        agreement.metric,
        f"{agreement.method} ({agreement.n})",
        quantity(agreement.exact, unit),
        quantity(agreement.value, unit),
        difference if agreement.agrees else f"{difference} !",
        between(agreement.bias, unit) or DASH,
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
    return [(spoken_outcome(name), number(value)) for name, value in client.items() if value]


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


REPLICA_COLUMNS: Final = ("figure of a replica", "mean (95 %)")


def replica_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """The headline figures over the simulated replicas; none if all were simulated."""
    kind = dict[str, dict[str, OverReplicas]]
    found = msgspec.convert(summary.breakdown.get("over_replicas", {}), kind)
    for name, key in headline_figures({"": summary.metrics}):
        one = found.get(name, {}).get(key)
        unit = unit_in_figure(METRICS[name].unit)
        if one is not None and METRICS[name].in_brief:
            yield f"{name} {key}", _with_limits(one.mean, one.mean_ci95, unit)
        if one is not None and one.whole:
            yield f"{name}, all replicas", _with_limits(one.whole, one.whole_ci95, unit)


def _with_limits(value: float, limits: tuple[float, float] | None, unit: str) -> str:
    shown = between(limits, unit)
    return quantity(value, unit) + (f" ({shown})" if shown else "")


SAVINGS: Final = "saved_of_max", "saved", "cut_short"
_SAVINGS_IN_WORDS: Final = "tokens saved of max_tokens", "... of the whole text", "cut short"
SavingsByArm = Mapping[str, Sequence[TaskSavings]]


def savings_by_arm(summary: Summary | ArmsSummary) -> SavingsByArm:
    """Arms with requests of plan `task`; one named "measured" for a run without arms."""
    arms = summary.arms if isinstance(summary, ArmsSummary) else {"measured": summary}
    found = {
        name: msgspec.convert(arm.breakdown.get("early_stop_by_task", []), list[TaskSavings])
        for name, arm in arms.items()
    }
    return {name: savings for name, savings in found.items() if savings}


def savings_columns(by_arm: SavingsByArm) -> tuple[str, ...]:
    return ("task", "early stopping", "source", *by_arm)


def savings_rows(by_arm: SavingsByArm) -> Iterator[tuple[str, ...]]:
    tasks = dict.fromkeys(one.task for found in by_arm.values() for one in found)
    for task in tasks:
        of_arm = [next((one for one in by_arm[arm] if one.task == task), None) for arm in by_arm]
        source = next(quantity(one.source_saved, "ratio") for one in of_arm if one is not None)
        for key, words in zip(SAVINGS, _SAVINGS_IN_WORDS, strict=True):
            cells = [
                DASH if one is None else quantity(getattr(one, key), "ratio") for one in of_arm
            ]
            is_first = key == SAVINGS[0]
            yield (task if is_first else "", words, source if is_first else DASH, *cells)


def _change(change: Difference, unit: str) -> str:
    """The ratio as "-98.7 % (-99.1 to -98.1)", else the difference; shares differ in percentage
    points, since a percent of a percentage would be read as the ratio."""
    if change.ratio is not None:
        limits = "" if change.ratio_ci95 is None else " to ".join(map(_percent, change.ratio_ci95))
        return f"{_percent(change.ratio)} %" + (f" ({limits})" if limits else "")
    if change.difference is None:
        return DASH
    sign = "+" if change.difference > 0 else ""
    if unit == "ratio":
        return f"{sign}{number(100 * change.difference)} percentage points"
    return sign + quantity(change.difference, unit)


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{'+' if change > 0 else ''}{number(change)}"
