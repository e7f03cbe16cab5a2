"""The end of a run on a terminal: the headline figures, how sure they are, and what is missing.

A narrow terminal is shown fewer columns, never half a figure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

HEADLINES = (
    "cancel_latency_s",
    "cancel_latency_steps",
    "detect_s",
    "signal_s",
    "wait_s",
    "free_s",
    "slot_refill_s",
    "slot_recovery_s",
    "probe_ttft_unloaded_s",
    "probe_ttft_control_s",
    "wasted_tokens",
    "wasted_in_flight_tokens",
    "wasted_after_close_tokens",
    "ghost_rate",
    "leaked_slots",
    "leaked_blocks",
    "slot_utilisation",
    "throughput_tps",
    "ttft_s",
    "itl_s",
)
COLUMNS = ("mean", "p50", "p99", "max", "n (cens.)", "method")
SPARED = ("method", "max", "n (cens.)")  # left out one by one where the terminal is too narrow
FLOORS = {"client_lag_s": "client lag", "scrape_interval_s": "scraped every"}
LEVEL_STYLE = {"info": "dim", "warning": "yellow", "invalid": "bold red"}


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print everything a terminal should show of a summary."""
    arms = summary.get("arms") or {"": summary}
    parts: list[Table | Text] = [_outcomes(summary)]
    parts += [_figures(console, name, arm["metrics"]) for name, arm in arms.items()]
    parts.append(_floor(summary))
    parts += [_statement(statement) for statement in summary.get("validity", [])]
    missing = summary.get("not_measurable", {})
    if missing:
        parts.append(Text("not measurable here: " + ", ".join(missing), style="dim"))
    console.print(Group(*parts))


def format_value(value: float | None, unit: str) -> str:
    """A number in the unit in which people read it: seconds as µs, ms or s, shares as percent."""
    if value is None:
        return "-"
    match unit:
        case "s":
            return _format_seconds(value)
        case "ratio" | "share" | "rate" | "1":
            return f"{100 * value:.3g} %"
        case _:
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_quantile(metric: Mapping[str, Any], name: str) -> str:
    """The quantile, or what it is known to exceed."""
    bound = (metric.get("lower_bounds") or {}).get(name)
    if metric.get(name) is None and bound is not None:
        return f"> {format_value(bound, metric['unit'])}"
    return format_value(metric.get(name), metric["unit"])


def _format_seconds(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 0.001 or value == 0:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"


def _outcomes(summary: Mapping[str, Any]) -> Text:
    counts = [f"{n} {name.replace('_', ' ')}" for name, n in summary["outcomes"].items() if n]
    return Text.assemble(
        (f"{summary['workload']}", "bold"),
        f" on {summary['engine']} ({summary['model']}): ",
        ", ".join(counts) or "no requests",
    )


def _figures(console: Console, arm: str, metrics: Mapping[str, Any]) -> Table:
    """The table with as many columns as fit."""
    tables = [_table(arm, metrics, without=SPARED[:n]) for n in range(len(SPARED) + 1)]
    unbounded = console.options.update(max_width=1000)
    needed = [console.measure(table, options=unbounded).maximum for table in tables]
    fitting = (t for t, width in zip(tables, needed, strict=True) if width <= console.width)
    return next(fitting, tables[-1])


def _table(arm: str, metrics: Mapping[str, Any], *, without: Sequence[str]) -> Table:
    columns = [column for column in COLUMNS if column not in without]
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    table.title, table.title_justify = (f"arm: {arm}" if arm else None), "left"
    table.add_column("figure", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name in HEADLINES:
        if name in metrics:
            cells = _cells(metrics[name])
            table.add_row(name, *(cells[column] for column in columns))
    return table


def _floor(summary: Mapping[str, Any]) -> Text:
    """How finely the run could see: no figure below it means anything."""
    parts = []
    for name, words in FLOORS.items():
        if (metric := summary.get("metrics", {}).get(name)) is not None:
            p50, p99 = (format_quantile(metric, quantile) for quantile in ("p50", "p99"))
            parts.append(f"{words} {p50} (p99 {p99})")
        elif name in summary.get("not_measurable", {}):
            parts.append(summary["not_measurable"][name])
    return Text("floor: " + (", ".join(parts) or "not known"), style="dim")


def _cells(metric: Mapping[str, Any]) -> dict[str, str]:
    unit = metric["unit"]
    prefix = {"lower": "≥ ", "upper": "≤ "}.get(metric.get("bound", "point"), "")
    cells = {name: format_quantile(metric, name) for name in ("p50", "p99", "max")}
    if metric.get("upper95") is not None:  # a rate has no largest value, but one not exceeded
        cells["max"] = f"≤ {format_value(metric['upper95'], unit)}"
    censored = metric.get("n_censored", 0)
    return cells | {
        "mean": prefix + format_value(metric.get("mean"), unit),
        "n (cens.)": f"{metric['n']} ({censored})" if censored else f"{metric['n']}",
        "method": metric["method"],
    }


def _statement(statement: Mapping[str, str]) -> Text:
    level = statement["level"]
    return Text(f"{level}: {statement['text']}", style=LEVEL_STYLE.get(level, ""))
