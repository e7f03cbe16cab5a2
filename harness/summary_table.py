"""The end of a run on a terminal: the headline figures, how sure they are, and what is missing.

A narrow terminal is shown fewer columns, never half a figure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.accounts import AGREEMENT_COLUMNS, agreement_cells, audit_cells
from harness.analysis.agreement import Agreement
from harness.analysis.audit import Entry
from harness.headlines import headlines
from harness.records import Metric
from harness.words import (
    SELF_EVIDENT_UNITS,
    bounded,
    figure_of,
    interval,
    is_only_limited,
    is_p99_the_largest,
    quantity,
)

COLUMNS = ("mean", "p50", "p99", "max", "n (cens.)", "method")
SPARED = ("method", "max", "n (cens.)")  # left out one by one where the terminal is too narrow
FLOORS = {
    "client_lag_s": "client lag",
    "scrape_interval_s": "scraped every",
    "over_read_tokens": "over-read",
}
LEVEL_STYLE = {"info": "dim", "warning": "yellow", "invalid": "bold red"}


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print everything a terminal should show of a summary."""
    metrics = msgspec.convert(summary["metrics"], dict[str, Metric])
    missing = summary.get("not_measurable", {})
    parts: list[Table | Text] = [
        _outcomes(summary),
        _figures(console, metrics),
        *_what_the_figures_are(metrics),
        _floor(metrics, missing),
    ]
    parts += _accounts(summary)
    parts += [_statement(statement) for statement in summary.get("validity", [])]
    if missing:
        parts.append(Text("not measurable here: " + ", ".join(missing), style="dim"))
    console.print(Group(*parts))


def _outcomes(summary: Mapping[str, Any]) -> Text:
    counts = [f"{n} {name.replace('_', ' ')}" for name, n in summary["outcomes"].items() if n]
    return Text.assemble(
        (f"{summary['workload']}", "bold"),
        f" on {summary['engine']} ({summary['model']}): ",
        ", ".join(counts) or "no requests",
    )


def _figures(console: Console, metrics: Mapping[str, Metric]) -> Table:
    """The table with as many columns as fit."""
    tables = [_table(metrics, without=SPARED[:n]) for n in range(len(SPARED) + 1)]
    unbounded = console.options.update(max_width=1000)
    needed = [console.measure(table, options=unbounded).maximum for table in tables]
    fitting = (t for t, width in zip(tables, needed, strict=True) if width <= console.width)
    return next(fitting, tables[-1])


def _table(metrics: Mapping[str, Metric], *, without: Sequence[str]) -> Table:
    columns = [column for column in COLUMNS if column not in without]
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name in headlines(metrics):
        if name in metrics:
            cells = _cells(metrics[name])
            table.add_row(label(name, metrics[name]), *(cells[column] for column in columns))
    return table


def _what_the_figures_are(metrics: Mapping[str, Metric]) -> Iterator[Text]:
    """How far totals may be off, and where a p99 is no more than the largest value."""
    shown = {name: metrics[name] for name in headlines(metrics) if name in metrics}
    for name, metric in shown.items():
        low, high = (metric.others.get(f"bias_{end}") for end in ("low", "high"))
        limits = interval(metric, "mean")
        if low is None or high is None or limits is None:
            continue
        old = f"{quantity(low, metric.unit)} to {quantity(high, metric.unit)}"
        yield Text(
            f"{name}: 95 % interval of the mean {limits}; in it, by the age of "
            f"its pages it may be off by {old}",
            style="dim",
        )
    if any(is_p99_the_largest(metric) for metric in shown.values()):
        yield Text("p99 of n < 100 values is the largest of them", style="dim")


def label(name: str, metric: Metric) -> str:
    """The figure's name, and whose it is where that is not plain."""
    return name if metric.of is None else f"{name} ({metric.of})"


def _floor(metrics: Mapping[str, Metric], missing: Mapping[str, str]) -> Text:
    """How finely the run could see: no figure below it means anything."""
    parts = []
    for name, words in FLOORS.items():
        if (metric := metrics.get(name)) is not None:
            parts.append(f"{words} {figure_of(metric, 'p50')} (p99 {figure_of(metric, 'p99')})")
        elif name in missing:
            parts.append(missing[name])
    return Text("floor: " + (", ".join(parts) or "not known"), style="dim")


def _cells(metric: Metric) -> dict[str, str]:
    unit = metric.unit if metric.unit in SELF_EVIDENT_UNITS else ""
    cells = {name: bounded(metric, name, unit=unit) for name in ("mean", "p50", "p99", "max")}
    # A share has no largest value, but one that it does not exceed, or does not fall below.
    if metric.upper95 is not None and not is_only_limited(metric):
        cells["max"] = f"≤ {quantity(metric.upper95, unit)}"
    if metric.lower95 is not None:
        cells["max"] = f"≥ {quantity(metric.lower95, unit)}"
    return cells | {
        "n (cens.)": f"{metric.n} ({metric.n_censored})" if metric.n_censored else f"{metric.n}",
        "method": metric.method,
    }


def _accounts(summary: Mapping[str, Any]) -> list[Table | Text]:
    """Methods that could be compared, and counters that do not tell what is due."""
    agreement = msgspec.convert(summary.get("agreement", []), list[Agreement])
    entries = msgspec.convert((summary.get("audit") or {}).get("counters", []), list[Entry])
    parts: list[Table | Text] = []
    if agreement:
        table = plain_table(AGREEMENT_COLUMNS[:-1])
        for one in agreement:
            table.add_row(*agreement_cells(one)[:-1])
        parts.append(table)
    for entry in entries:
        if entry.verdict not in ("exact", "not told"):
            counter, due, told, verdict = audit_cells(entry)
            parts.append(Text(f"audit: {counter} moved by {told}, due {due}: {verdict}"))
    return parts


def plain_table(columns: Sequence[str]) -> Table:
    """An empty table; its first two columns are words, the others figures."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    return table


def _statement(statement: Mapping[str, str]) -> Text:
    level = statement["level"]
    return Text(f"{level}: {statement['text']}", style=LEVEL_STYLE.get(level, ""))
