"""The tables of a page: every figure with its method, the limits, and the accounts."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dashboards.sections.section import Table, TableCell
from dashboards.verdict import ReportVerdict
from harness.formatting import DASH, bounded, interval, quantity, unit_in_figure
from harness.records import Agreement, ArmSummary, Audit, Metric, Summary, Value
from harness.text.tables import (
    AGREEMENT_COLUMNS,
    AUDIT_COLUMNS,
    REPLICA_COLUMNS,
    STAGE_COLUMNS,
    agreement_cells,
    audit_cells,
    replica_rows,
    stage_cells,
    value_cells,
    value_columns,
)

SIDE_BY_SIDE: Final = (
    "Each figure is of all rounds together. Under it, against the reference: the ratio (or where a "
    "round has a value of zero, the difference), mean of the rounds taken in pairs, with its "
    "95\N{NO-BREAK SPACE}% interval."
)
FIGURES: Final = ("n", "censored", "mean", "p50", "p90", "p95", "p99", "max", "method")


def limits_table(verdict: ReportVerdict) -> Table:
    return Table(
        title="The limits, one by one",
        shows="The gate's verdict on each limit. A limit that lies within what the true value can "
        "be is not decided, and that is no pass.",
        columns=("limit", "verdict", "measured", "why"),
        rows=verdict.checks,
    )


def value_tables(value: Value) -> list[Table]:
    return [
        Table(
            title="Value of cancellation",
            shows=f'One load where cancellation is ignored ("{value.ignored}") and where it is '
            f'honoured ("{value.honoured}"). The change is of paired rounds. The project\'s '
            "documentation names the source.",
            columns=(*value_columns(value), "formula"),
            rows=tuple((*value_cells(row), row.formula) for row in value.rows),
        ),
        Table(
            title="How long a cancel takes, stage by stage",
            shows="Measured where cancellation is honoured, next to the source's limits. The parts "
            "of a stage follow it.",
            columns=STAGE_COLUMNS,
            rows=tuple(stage_cells(stage) for stage in value.stages),
        ),
    ]


def account_tables(agreement: Sequence[Agreement], audit: Audit | None) -> list[Table]:
    tables = [
        Table(
            title="Two methods for one quantity",
            shows="The exact log against what is seen without it. Times may be off by the age "
            'of the metrics page and the grain of few scrapes; "!" marks a difference that neither '
            "explains.",
            columns=AGREEMENT_COLUMNS,
            rows=tuple(agreement_cells(one) for one in agreement),
        ),
        Table(
            title="The server's counters, audited",
            shows="How far each counter had to move according to the clients' counts, and how far "
            "it did.",
            columns=AUDIT_COLUMNS,
            rows=tuple(audit_cells(entry) for entry in (audit.counters if audit else ())),
        ),
    ]
    return [table for table in tables if table.rows]


def replicas_table(summary: Summary) -> list[Table]:
    rows = tuple(replica_rows(summary))
    table = Table(
        title="Over the simulated replicas",
        shows="Only some of the replicas were simulated. The intervals hold what that costs.",
        columns=REPLICA_COLUMNS,
        rows=rows,
    )
    return [table] if rows else []


def every_figure(sides: Mapping[str, Summary | ArmSummary]) -> Table:
    rows = [
        _row(f"{side}: {name}" if side else name, metric, of.flags.get(name))
        for side, of in sides.items()
        for name, metric in of.metrics.items()
    ]
    return Table(
        title="Every figure",
        shows="Censored samples are known only to exceed their value; a quantile that lies among "
        'them reads ">". Under a figure stands its 95\N{NO-BREAK SPACE}% interval, or for a rate '
        "its 95\N{NO-BREAK SPACE}% bound; under the method, whether the figure is a bound itself. "
        "The project's documentation says what each name means.",
        columns=("metric", *FIGURES),
        rows=tuple(rows) or (("No figure.",),),
    )


def _row(name: str, metric: Metric, flag: str | None) -> tuple[str | TableCell, ...]:
    unit = unit_in_figure(metric.unit)
    remarks = [
        *([] if metric.of is None else [f"of {metric.of}"]),
        *(
            f"an interval of {key.removesuffix('_ci95')} takes {fewest:,} samples"
            for key, fewest in metric.needs.items()
        ),
        *(f"{name}: {_other(value, metric)}" for name, value in metric.others.items()),
    ]
    return (
        TableCell(text=name, unit=None if unit else metric.unit, flag=flag, under=tuple(remarks)),
        f"{metric.n:,}",
        f"{metric.n_censored:,}",
        _over(
            bounded(metric, "mean", unit=unit),
            interval(metric, "mean", unit=unit) or _one_sided(metric),
        ),
        *(
            _over(bounded(metric, key, unit=unit), interval(metric, key, unit=unit))
            for key in ("p50", "p90", "p95", "p99", "max")
        ),
        _over(metric.method, None if metric.bound == "point" else metric.bound),
    )


def _over(text: str, under: str | None) -> TableCell:
    return TableCell(text=text, under=() if under is None else (under,))


def _one_sided(metric: Metric) -> str | None:
    if metric.upper95 is not None:
        return f"at most {quantity(metric.upper95, metric.unit)}"
    if metric.lower95 is not None:
        return f"at least {quantity(metric.lower95, metric.unit)}"
    return None


def _other(value: object, metric: Metric) -> str:
    if isinstance(value, Mapping):
        other = msgspec.convert(value, Metric)
        figures = [f"{key} {bounded(other, key)}" for key in ("mean", "p50", "p99")]
        return ", ".join([*(text for text in figures if DASH not in text), f"n {other.n:,}"])
    return quantity(value, metric.unit) if isinstance(value, int | float) else str(value)
