"""The end of a run on a terminal: three sentences, at most a dozen rows, and warnings.

A narrow terminal shows fewer columns, never half a figure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.analysis.comparable import why_not_figures
from harness.analysis.compare import is_certain
from harness.export.tables import (
    AGREEMENT_COLUMNS,
    STAGE_COLUMNS,
    agreement_cells,
    audit_cells,
    stage_cells,
    value_cells,
    value_columns,
)
from harness.formatting import (
    DASH,
    SELF_EVIDENT_UNITS,
    SIGNS,
    bounded,
    figure_of,
    interval,
    is_only_limited,
    is_p99_the_largest,
    number,
    quantity,
    shift_in_words,
)
from harness.metrics import (
    CANCEL_LATENCY,
    CANCEL_LATENCY_STEPS,
    METRICS,
    headline_figures,
    headlines,
)
from harness.records import ArmsSummary, Difference, Metric, Remark, Summary, Value

MOST_ROWS: Final = 12
COLUMNS = ("mean", "p50", "p99", "max", "n (cens.)", "method")
SPARED = ("method", "max", "n (cens.)")  # left out one by one where the terminal is too narrow
FLOORS = {
    "client_lag_s": "client lag",
    "scrape_interval_s": "scraped every",
    "over_read_tokens": "over-read",
}
LEVEL_STYLE = {"info": "dim", "warning": "yellow", "invalid": "bold red"}


def print_summary(console: Console, summary: Summary, *, shows_all: bool) -> None:
    metrics, missing = summary.metrics, summary.not_measurable
    names = [name for name in headlines(metrics) if name in metrics]
    shown = names if shows_all else [name for name in names if METRICS[name].in_brief][:MOST_ROWS]
    parts: list[Table | Text] = [
        _outcomes(summary),
        *(Text(line) for line in headline_sentences(metrics, missing)),
        _figures(console, {name: metrics[name] for name in shown}),
    ]
    said = summary.validity
    if shows_all:
        parts += [*_what_the_figures_are(metrics), _floor(metrics, missing), *_accounts(summary)]
        parts += [_statement(statement) for statement in said]
        if missing:
            parts.append(Text("not measurable here: " + ", ".join(missing), style="dim"))
    else:
        parts += [_statement(one) for one in said if one.level != "info"]
        notes = sum(one.level == "info" for one in said)
        parts.append(_what_is_left(len(names) - len(shown), notes))
    console.print(Group(*parts))


def _what_is_left(figures: int, notes: int) -> Text:
    left = " and ".join(
        quantity(n, noun) for n, noun in ((figures, "figures"), (notes, "notes")) if n
    )
    return Text(f"{left} more: --all" if left else "", style="dim")


def headline_sentences(metrics: Mapping[str, Metric], missing: Mapping[str, str]) -> list[str]:
    return [
        _latency_sentence(metrics, missing),
        _waste_sentence(metrics, missing),
        _recovery_sentence(metrics, missing),
    ]


def _latency_sentence(metrics: Mapping[str, Metric], missing: Mapping[str, str]) -> str:
    latency, steps = metrics.get(CANCEL_LATENCY), metrics.get(CANCEL_LATENCY_STEPS)
    if latency is None:
        return f"Cancel latency is not measurable here: {_why(missing, CANCEL_LATENCY)}."
    in_steps = "" if steps is None else f", that is {_typical(steps)}"
    return f"A cancel took {_typical(latency, f'n = {latency.n:,}', *_by(latency))}{in_steps}."


def _waste_sentence(metrics: Mapping[str, Metric], missing: Mapping[str, str]) -> str:
    waste = metrics.get("wasted_tokens")
    if waste is None:
        return f"Wasted tokens are not measurable here: {_why(missing, 'wasted_tokens')}."
    in_all = ""
    if waste.mean is not None:
        total = quantity(round(waste.n * waste.mean), "tokens")
        in_all = f", {SIGNS.get(waste.bound, '')}{total} in all"
    how = _in_brackets(*_by(waste))
    return f"The server wasted {bounded(waste, 'mean')} on each user who left{in_all}{how}."


def _recovery_sentence(metrics: Mapping[str, Metric], missing: Mapping[str, str]) -> str:
    recovery = metrics.get("slot_recovery_s")
    if recovery is None:
        return f"Slot recovery is not measurable here: {_why(missing, 'slot_recovery_s')}."
    text = f"A freed slot served the next user after {_typical(recovery, f'n = {recovery.n:,}')}"
    idle = metrics.get("probe_ttft_unloaded_s")
    if idle is None or idle.p50 is None:
        return f"{text}."
    return f"{text}; an idle server takes {quantity(idle.p50, 's')}."


def _typical(metric: Metric, *more: str) -> str:
    """ "5.02 ms (p99 16.9 ms)", or the mean where no quantile is known."""
    if metric.p50 is None and "p50" not in metric.lower_bounds:
        return f"{bounded(metric, 'mean')} on average{_in_brackets(*more)}"
    p99 = f"p99 {bounded(metric, 'p99')}"
    return f"{bounded(metric, 'p50')}{_in_brackets(p99, *more)}"


def _in_brackets(*texts: str) -> str:
    return f" ({'; '.join(texts)})" if texts else ""


def _by(metric: Metric) -> list[str]:
    """The method, unless it is the exact log."""
    return [] if metric.method == "exact" else [f"by {metric.method.replace('_', ' ')}"]


def _why(missing: Mapping[str, str], name: str) -> str:
    return missing.get(name, "the run gives no data for it")


def _outcomes(summary: Summary) -> Text:
    counts = [f"{n} {name.replace('_', ' ')}" for name, n in summary.outcomes.items() if n]
    return Text.assemble(
        (f"{summary.workload}", "bold"),
        f" on {summary.engine} ({summary.model}): ",
        ", ".join(counts) or "no requests",
    )


def _figures(console: Console, metrics: Mapping[str, Metric]) -> Table:
    layouts = ([_table(metrics, without=SPARED[:n])] for n in range(len(SPARED) + 1))
    return first_that_fits(console, layouts)[0]


def first_that_fits(console: Console, layouts: Iterable[list[Table]]) -> list[Table]:
    """The first layout whose tables all fit the terminal's width; else the last."""
    unbounded, tables = console.options.update(max_width=1000), list[Table]()
    for tables in layouts:
        if all(console.measure(one, options=unbounded).maximum <= console.width for one in tables):
            break
    return tables


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
    """The bias of totals, and which p99 is only the largest value."""
    shown = {name: metrics[name] for name in headlines(metrics) if name in metrics}
    for name, metric in shown.items():
        low, high = (metric.others.get(f"bias_{end}") for end in ("low", "high"))
        limits = interval(metric, "mean")
        if low is None or high is None or limits is None:
            continue
        old = f"{quantity(low, metric.unit)} to {quantity(high, metric.unit)}"
        yield Text(
            f"{name}: 95 % interval of the mean {limits}, which includes a bias of "
            f"{old} from the age of the metrics pages",
            style="dim",
        )
    if any(is_p99_the_largest(metric) for metric in shown.values()):
        yield Text("p99 of n < 100 values is the largest of them", style="dim")


def label(name: str, metric: Metric) -> str:
    """The figure's name, and the requests it is of if they are not all."""
    return name if metric.of is None else f"{name} ({metric.of})"


def _floor(metrics: Mapping[str, Metric], missing: Mapping[str, str]) -> Text:
    """The measurement floor: a figure below it means nothing."""
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
    # A share has no largest value: its one-sided 95 % bound stands in that column.
    if metric.upper95 is not None and not is_only_limited(metric):
        cells["max"] = f"≤ {quantity(metric.upper95, unit)}"
    if metric.lower95 is not None:
        cells["max"] = f"≥ {quantity(metric.lower95, unit)}"
    return cells | {
        "n (cens.)": f"{metric.n} ({metric.n_censored})" if metric.n_censored else f"{metric.n}",
        "method": metric.method,
    }


def _accounts(summary: Summary) -> list[Table | Text]:
    parts: list[Table | Text] = []
    if summary.agreement:
        table = plain_table(AGREEMENT_COLUMNS[:-1])
        for one in summary.agreement:
            table.add_row(*agreement_cells(one)[:-1])
        parts.append(table)
    for entry in summary.audit.counters if summary.audit else []:
        if entry.verdict not in ("exact", "unknown"):
            counter, due, told, verdict = audit_cells(entry)
            parts.append(Text(f"audit: {counter} moved by {told}, expected {due}: {verdict}"))
    return parts


def plain_table(columns: Sequence[str]) -> Table:
    """An empty table; its first two columns are words, the others figures."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < 2 else "right")
    return table


def _statement(said: Remark) -> Text:
    return Text(f"{said.level}: {said.text}", style=LEVEL_STYLE[said.level])


ARM_WORDS: Final = {
    CANCEL_LATENCY: "Cancel latency",
    "wasted_tokens": "Tokens wasted on each user who left",
    "slot_recovery_s": "Slot recovery",
}
MOST_EFFECTS: Final = 6  # lines
MOST_CERTAIN: Final = 12  # lines: more are for the report, where there is room

Pairs = Sequence[tuple[str, str]]
Arms = Mapping[str, Mapping[str, Metric]]
Differences = Mapping[str, Mapping[str, Sequence[Difference]]]


def print_arms(console: Console, summary: ArmsSummary, *, shows_all: bool) -> None:
    """Three sentences with a clause for each arm, then the rows."""
    arms = summary.metrics
    title = Text.assemble(
        (f"{summary.workload}", "bold"),
        f" on {summary.engine} ({summary.model}): ",
        f"{len(arms)} arms, {quantity(summary.rounds, 'rounds')}; "
        f"the reference is {summary.reference}",
    )
    pairs = headline_figures(arms, summary.headlines)
    said, sentences = summary.validity, [Text(line) for line in _arm_sentences(arms)]
    if not shows_all:
        statements = [_statement(one) for one in said if one.level != "info"]
        notes = len(said) - len(statements)
        tables = _side_by_side(console, pairs[:MOST_ROWS], arms)
        left = _what_is_left(max(0, len(pairs) - MOST_ROWS), notes)
        console.print(Group(title, *sentences, *tables, *statements, left))
        return
    certain = _certain(pairs, arms, summary.differences)
    tables = _side_by_side(console, pairs, arms)
    worth = [] if summary.value is None else _value_tables(summary.value)
    more = [*_whose(pairs, arms), *worth, *certain, *_effects(summary, arms)]
    console.print(Group(title, *sentences, *tables, *more, *(_statement(one) for one in said)))


def _arm_sentences(arms: Arms) -> Iterator[str]:
    for name, words in ARM_WORDS.items():
        found = {arm: metrics[name] for arm, metrics in arms.items() if name in metrics}
        if found:
            clauses = (f"{arm} {_typical(metric)}" for arm, metric in found.items())
            yield f"{words}: {', '.join(clauses)}."
        else:
            yield f"{words}: not measurable here."


def _side_by_side(console: Console, pairs: Pairs, arms: Arms) -> list[Table]:
    """As many arms beside each other as fit, the others below."""
    return first_that_fits(console, _layouts(pairs, arms))


def _layouts(pairs: Pairs, arms: Arms) -> Iterator[list[Table]]:
    """All arms in one table, in two, and so on."""
    names = list(arms)
    for num_tables in range(1, len(names) + 1):
        width = -(-len(names) // num_tables)
        groups = [names[first : first + width] for first in range(0, len(names), width)]
        yield [_arm_table(pairs, {name: arms[name] for name in group}) for group in groups]


def _arm_table(pairs: Pairs, arms: Arms) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for name in arms:
        table.add_column(name, justify="right", no_wrap=True)
    for name, key in pairs:
        found = [metrics.get(name) for metrics in arms.values()]
        cells = [_cell(one, key, tells_method=not _are_alike(name, found)) for one in found]
        table.add_row(f"{name} {key}", *cells)
    return table


def _cell(metric: Metric | None, key: str, *, tells_method: bool) -> str:
    if metric is None:
        return DASH
    text = bounded(metric, key, unit=metric.unit if metric.unit in SELF_EVIDENT_UNITS else "")
    return f"{text} ({metric.method}, n {metric.n})" if tells_method else text


def _are_alike(name: str, metrics: Sequence[Metric | None]) -> bool:
    known = [one for one in metrics if one is not None]
    return all(why_not_figures(name, known[0], one, (None, None)) is None for one in known[1:])


def _value_tables(value: Value) -> list[Table]:
    savings, stages = plain_table(value_columns(value)), plain_table(STAGE_COLUMNS)
    for row in value.rows:
        savings.add_row(*value_cells(row))
    for stage in value.stages:
        stages.add_row(*stage_cells(stage))
    return [savings, stages]


def _whose(pairs: Pairs, arms: Arms) -> Iterator[Text]:
    """The requests that each figure is of, if a run has users of several kinds."""
    for name in dict.fromkeys(name for name, _ in pairs):
        found = {metrics[name].of for metrics in arms.values() if name in metrics}
        for of in found - {None}:
            yield Text(f"{name}: of {of}", style="dim")


def _certain(pairs: Pairs, arms: Arms, differences: Differences) -> Iterator[Table | Text]:
    """The first certain differences from the reference, and how many more there are."""
    of_pairs = [
        (name, key, one) for name, key in pairs for one in differences.get(name, {}).get(key, [])
    ]
    certain = [row for row in of_pairs if is_certain(row[2])]
    if certain:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        for title in ("certain difference", "arm"):
            table.add_column(title, overflow="fold")
        for title in (f"against {certain[0][2].reference}", "95 %"):
            table.add_column(title, justify="right", overflow="fold")
        for name, key, one in certain[:MOST_CERTAIN]:
            table.add_row(f"{name} {key}", one.arm, *_difference_cells(one, _unit(arms, name)))
        yield table
    more = len(certain) - MOST_CERTAIN
    if more > 0:
        yield Text(f"{more} more are certain at 95 %: see the report", style="dim")
    if uncertain := len(of_pairs) - len(certain):
        yield Text(f"{uncertain} other differences are not certain at 95 %", style="dim")


def _effects(summary: ArmsSummary, arms: Arms) -> Iterator[Text]:
    """Shifts between single requests of an arm and of the reference."""
    found = [
        shift_in_words(name, arm, summary.reference, one, _unit(arms, name))
        for name, of_arms in summary.shifts.items()
        for arm, one in of_arms.items()
        if any(name in metrics for metrics in arms.values())
    ]
    lines = [line for line in found if line is not None]
    yield from (Text(line) for line in lines[:MOST_EFFECTS])
    if len(lines) > MOST_EFFECTS:
        yield Text(f"{len(lines) - MOST_EFFECTS} more shifts are in summary.json", style="dim")


def _unit(arms: Arms, name: str) -> str:
    return next(metrics[name].unit for metrics in arms.values() if name in metrics)


def _difference_cells(one: Difference, unit: str) -> tuple[str, str]:
    """The ratio and its limits; without a ratio, the difference."""
    if one.ratio is not None and one.ratio_ci95 is not None:
        low, high = one.ratio_ci95
        return f"{number(one.ratio)} times", f"{number(low)} to {number(high)}"
    if one.difference is None or one.difference_ci95 is None:
        return DASH, DASH
    low, high = one.difference_ci95
    sign = "+" if one.difference > 0 else ""
    shown = unit if unit in SELF_EVIDENT_UNITS else ""
    return f"{sign}{quantity(one.difference, shown)}", (
        f"{quantity(low, shown)} to {quantity(high, shown)}"
    )
