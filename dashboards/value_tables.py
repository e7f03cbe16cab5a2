"""What the page says of the worth of cancellation: the two tables, with a formula a row."""

from dashboards.tables import PlainTable
from harness.analysis.value import Value
from harness.export.tables import STAGE_COLUMNS, stage_cells, value_cells, value_columns


def value_tables(value: Value) -> list[PlainTable]:
    """Savings, then stages."""
    return [
        PlainTable(
            title="What cancellation is worth",
            shows=f'The same load where cancellation is ignored ("{value.ignored}") and where it '
            f'is honoured ("{value.honoured}"). The change is of paired rounds.',
            columns=(*value_columns(value), "formula"),
            rows=tuple((*value_cells(row), row.formula) for row in value.rows),
        ),
        PlainTable(
            title="How long a cancel takes, stage by stage",
            shows="Measured where it is honoured, beside the limits that the source gives.",
            columns=STAGE_COLUMNS,
            rows=tuple(stage_cells(stage) for stage in value.stages),
        ),
    ]
