"""The end of a run on a terminal: three sentences, at most a dozen rows, and warnings.

A narrow terminal shows fewer columns, never half a figure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.compare.comparable import why_not_figures
from harness.compare.pairs import headline_differences, is_certain
from harness.formatting import (
    DASH,
    bounded,
    change_in_words,
    figure_of,
    interval,
    is_only_limited,
    is_p99_the_largest,
    quantity,
    shift_in_words,
    spoken_outcome,
    unit_in_figure,
)
from harness.metrics import METRICS, PROBES_LEFT_OUT, headline_figures, headlines
from harness.records import ArmsSummary, Metric, Remark, Summary, Value
from harness.text.headlines import arm_sentences, brief_sentences, headline_sentences
from harness.text.tables import (
    AGREEMENT_COLUMNS,
    REPLICA_COLUMNS,
    STAGE_COLUMNS,
    agreement_cells,
    audit_cells,
    replica_rows,
    savings_by_arm,
    savings_columns,
    savings_rows,
    stage_cells,
    value_cells,
    value_columns,
)

MOST_ROWS: Final = 12
MOST_EFFECTS: Final = 6  # lines
MOST_CERTAIN: Final = 12  # lines: more are for the report, where there is room
COLUMNS: Final = ("mean", "p50", "p99", "max", "n (cens.)", "method")
SPARED: Final = ("method", "max", "n (cens.)")  # left out one by one on too narrow a terminal
FLOORS: Final = ("client_lag_s", "scrape_interval_s", "over_read_tokens")
GPU_FLOOR: Final = "gpu_interval_s"  # shown where a GPU was watched
LEVEL_STYLE: Final = {"info": "dim", "warning": "yellow", "invalid": "bold red"}

SAVINGS_WORDS: Final = ("task", "early stopping")

Of = TypeVar("Of")
Parts = list[Table | Text]
Pairs = Sequence[tuple[str, str]]
Arms = Mapping[str, Mapping[str, Metric]]


def print_summary(console: Console, summary: Summary, *, shows_all: bool) -> None:
    metrics, missing = summary.metrics, summary.not_measurable
    names = [name for name in headlines(metrics) if name in metrics]
    shown = names if shows_all else [name for name in names if METRICS[name].in_brief][:MOST_ROWS]
    counts = [f"{n} {spoken_outcome(name)}" for name, n in summary.outcomes.items() if n]
    can_probe = not any(one.text.startswith(PROBES_LEFT_OUT) for one in summary.validity)
    if shows_all:
        sentences = headline_sentences(metrics, missing)
    else:
        sentences = brief_sentences(metrics, missing, can_probe=can_probe)
    parts: Parts = [
        *map(Text, sentences),
        _title(summary, ", ".join(counts) or "no requests"),
        *_figures(console, {name: metrics[name] for name in shown}),
    ]
    parts += [*_over_replicas(summary), *_savings_tables(console, summary)]
    if shows_all:
        parts += [*_what_the_figures_are(metrics), _floor(metrics, missing), *_accounts(summary)]
    parts += _end(summary, len(names) - len(shown), shows_all=shows_all)
    if shows_all and missing:
        parts.append(Text("not measurable here: " + ", ".join(missing), style="dim"))
    console.print(Group(*parts))


def print_arms(console: Console, summary: ArmsSummary, *, shows_all: bool) -> None:
    arms = summary.metrics
    rounds = f"{quantity(len(arms), 'arms')}, {quantity(summary.rounds, 'rounds')}"
    pairs = headline_figures(arms, summary.headlines)
    shown = pairs if shows_all else pairs[:MOST_ROWS]
    parts: Parts = [
        *(Text(line) for line in arm_sentences(arms)),
        _title(summary, f"{rounds}; the reference is {summary.reference}"),
        *first_that_fits(console, _arm_tables(shown, arms)),
        *_savings_tables(console, summary),
    ]
    if shows_all:
        parts += _whose(pairs, arms)
        parts += [] if summary.value is None else _value_tables(summary.value)
        parts += [*_certain(summary), *_effects(summary)]
    parts += _end(summary, len(pairs) - len(shown), shows_all=shows_all)
    console.print(Group(*parts))


def _title(summary: Summary | ArmsSummary, text: str) -> Text:
    name = (f"{summary.workload}", "bold")
    return Text.assemble(name, f" on {summary.engine} ({summary.model}): ", text)


def _end(summary: Summary | ArmsSummary, figures_left: int, *, shows_all: bool) -> Iterator[Text]:
    for said in summary.validity:
        if shows_all or said.level != "info":
            yield statement(said)
    if not shows_all:
        notes = sum(one.level == "info" for one in summary.validity)
        counts = ((figures_left, "figures"), (notes, "notes"))
        left = " and ".join(quantity(n, noun) for n, noun in counts if n)
        yield Text(f"{left} are not shown here" if left else "", style="dim")


def statement(said: Remark) -> Text:
    return Text(f"{said.level}: {said.text}", style=LEVEL_STYLE[said.level])


def grid(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Sequence[str],
    gap: int = 1,
    wraps: bool = True,
) -> Table:
    padding = (0, gap, 0, 0)
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=padding, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in words else "right"
        is_whole = not wraps and column not in words  # on a narrow terminal the names give way
        table.add_column(column, justify=justify, no_wrap=is_whole, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def first_that_fits(console: Console, layouts: Iterable[list[Table]]) -> list[Table]:
    """The first layout whose tables all fit the terminal's width; else the last."""
    unbounded, tables = console.options.update(max_width=1000), list[Table]()
    for tables in layouts:
        if all(console.measure(one, options=unbounded).maximum <= console.width for one in tables):
            break
    return tables


def _figures(console: Console, metrics: Mapping[str, Metric]) -> list[Table]:
    """None without figures."""
    layouts = ([_table(metrics, without=SPARED[:n])] for n in range(len(SPARED) + 1))
    return first_that_fits(console, layouts) if metrics else []


def _table(metrics: Mapping[str, Metric], *, without: Sequence[str]) -> Table:
    columns = [column for column in COLUMNS if column not in without]
    rows = []
    for name, metric in metrics.items():
        cells = _cells(metric)
        whose = name if metric.of is None else f"{name} ({metric.of})"
        rows.append((whose, *(cells[column] for column in columns)))
    return grid(["figure", *columns], rows, words=("figure", "method"), gap=0, wraps=False)


def _what_the_figures_are(metrics: Mapping[str, Metric]) -> Iterator[Text]:
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


def _floor(metrics: Mapping[str, Metric], missing: Mapping[str, str]) -> Text:
    parts = []
    for name in (*FLOORS, *(name for name in (GPU_FLOOR,) if name in metrics)):
        if (metric := metrics.get(name)) is not None:
            unit = unit_in_figure(metric.unit)
            p50, p99 = (figure_of(metric, key, unit=unit) for key in ("p50", "p99"))
            parts.append(f"{METRICS[name].label} {p50} (p99 {p99})")
        elif name in missing:
            parts.append(missing[name])
    return Text("floor: " + (", ".join(parts) or "not known"), style="dim")


def _cells(metric: Metric) -> dict[str, str]:
    unit = unit_in_figure(metric.unit)
    cells = {name: bounded(metric, name, unit=unit) for name in ("mean", "p50", "p99", "max")}
    # A share has no largest value: its one-sided 95 % bound stands in that column.
    if metric.upper95 is not None and not is_only_limited(metric):
        cells["max"] = f"≤ {quantity(metric.upper95, unit)}"
    if metric.lower95 is not None:
        cells["max"] = f"≥ {quantity(metric.lower95, unit)}"
    censored = f" ({metric.n_censored})" if metric.n_censored else ""
    return cells | {"n (cens.)": f"{metric.n}{censored}", "method": metric.method}


def _accounts(summary: Summary) -> Iterator[Table | Text]:
    if summary.agreement:
        rows = [agreement_cells(one)[:-1] for one in summary.agreement]
        yield grid(AGREEMENT_COLUMNS[:-1], rows, words=AGREEMENT_COLUMNS[:2])
    for entry in summary.audit.counters if summary.audit else []:
        if entry.verdict not in ("exact", "unknown"):
            counter, due, moved, verdict = audit_cells(entry)
            yield Text(f"audit: {counter} moved by {moved}, expected {due}: {verdict}")


def _arm_tables(pairs: Pairs, arms: Arms) -> Iterator[list[Table]]:
    for groups in _in_groups(arms):
        yield [_arm_table(pairs, group) for group in groups]


def _in_groups(arms: Mapping[str, Of]) -> Iterator[list[dict[str, Of]]]:
    """All arms in one group, in two, and so on."""
    names = list(arms)
    for num_groups in range(1, len(names) + 1):
        width = -(-len(names) // num_groups)
        groups = [names[first : first + width] for first in range(0, len(names), width)]
        yield [{name: arms[name] for name in group} for group in groups]


def _over_replicas(summary: Summary) -> Parts:
    rows = list(replica_rows(summary))
    if not rows:
        return []
    return [grid(REPLICA_COLUMNS, rows, words=REPLICA_COLUMNS[:1], wraps=False)]


def _savings_tables(console: Console, summary: Summary | ArmsSummary) -> list[Table]:
    layouts = (
        [grid(savings_columns(arms), savings_rows(arms), words=SAVINGS_WORDS) for arms in groups]
        for groups in _in_groups(savings_by_arm(summary))
    )
    return first_that_fits(console, layouts)


def _arm_table(pairs: Pairs, arms: Arms) -> Table:
    rows = []
    for name, key in pairs:
        found = [metrics.get(name) for metrics in arms.values()]
        cells = [_cell(one, key, tells_method=not _are_alike(name, found)) for one in found]
        rows.append((f"{name} {key}", *cells))
    return grid(["figure", *arms], rows, words=("figure",), wraps=False)


def _cell(metric: Metric | None, key: str, *, tells_method: bool) -> str:
    if metric is None:
        return DASH
    text = bounded(metric, key, unit=unit_in_figure(metric.unit))
    return f"{text} ({metric.method}, n {metric.n})" if tells_method else text


def _are_alike(name: str, metrics: Sequence[Metric | None]) -> bool:
    known = [one for one in metrics if one is not None]
    return all(why_not_figures(name, known[0], one, (None, None)) is None for one in known[1:])


def _value_tables(value: Value) -> Iterator[Table]:
    columns = value_columns(value)
    yield grid(columns, map(value_cells, value.rows), words=columns[:2])
    yield grid(STAGE_COLUMNS, map(stage_cells, value.stages), words=STAGE_COLUMNS[:2])


def _whose(pairs: Pairs, arms: Arms) -> Iterator[Text]:
    for name in dict.fromkeys(name for name, _ in pairs):
        found = {metrics[name].of for metrics in arms.values() if name in metrics}
        for of in found - {None}:
            yield Text(f"{name}: of {of}", style="dim")


def _certain(summary: ArmsSummary) -> Iterator[Table | Text]:
    differences = headline_differences(summary)
    certain = [row for row in differences if is_certain(row[2])]
    if certain:
        columns = ("certain difference", "arm", f"against {summary.reference}", "95 %")
        rows = [
            (f"{name} {key}", one.arm, *change_in_words(one, METRICS[name].unit))
            for name, key, one in certain[:MOST_CERTAIN]
        ]
        yield grid(columns, rows, words=columns[:2])
    more = len(certain) - MOST_CERTAIN
    if more > 0:
        yield Text(f"{more} more are certain at 95 %: see the report", style="dim")
    if uncertain := len(differences) - len(certain):
        yield Text(f"{uncertain} other differences are not certain at 95 %", style="dim")


def _effects(summary: ArmsSummary) -> Iterator[Text]:
    found = [
        shift_in_words(name, arm, summary.reference, one, METRICS[name].unit)
        for name, of_arms in summary.shifts.items()
        for arm, one in of_arms.items()
        if any(name in metrics for metrics in summary.metrics.values())
    ]
    lines = [line for line in found if line is not None]
    yield from (Text(line) for line in lines[:MOST_EFFECTS])
    if len(lines) > MOST_EFFECTS:
        yield Text(f"{len(lines) - MOST_EFFECTS} more shifts are in summary.json", style="dim")
