"""`walkaway compare`: runs side by side on a terminal, what surely differs first to the eye.

A difference is marked where its 95 % interval leaves out 0; one in twenty of true equals is marked
all the same.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.analysis.figure_pairs import Pair
from harness.comparison import BASELINE, CANDIDATE, Comparison, compare_runs
from harness.library import load_run
from harness.summary_table import LEVEL_STYLE
from harness.words import (
    DASH,
    SELF_EVIDENT_UNITS,
    between,
    bounded,
    number,
    quantity,
    shift_in_words,
)

CERTAIN: Final = "*"
COLUMNS: Final = ("figure", BASELINE, CANDIDATE, "difference", "95 %", "times", "in steps")
TELLING: Final = 0.02  # steps that differ by less change no third digit that means anything
SPARED: Final = ("times", "in steps", "95 %")  # left out one by one where the terminal is narrow


def compare_and_show(baseline: Path, candidates: Sequence[Path], *, as_json: bool) -> None:
    """Compare and print. Raises ConfigError where two runs cannot be compared, or not be read."""
    found = compare_runs(load_run(baseline), [load_run(path) for path in candidates])
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))  # noqa: T201
        return
    console = Console()
    for comparison in found:
        show_comparison(console, comparison)


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print one candidate against the baseline."""
    which = f", arm {comparison.arm}" if comparison.arm else ""
    title = Text.assemble(
        "baseline ", (comparison.baseline, "bold"), "\ncandidate ", (comparison.candidate, "bold")
    )
    console.print(
        Group(
            Text.assemble(title, which),
            *_remarks(comparison),
            _table(console, comparison),
            *_below(comparison),
        )
    )


def _remarks(comparison: Comparison) -> Iterator[Text]:
    for said in comparison.remarks:
        yield Text(f"{said.level}: {said.text}", style=LEVEL_STYLE.get(said.level, ""))


def _table(console: Console, comparison: Comparison) -> Table:
    """With as many columns as fit."""
    tables = [_columns(comparison, without=SPARED[:n]) for n in range(len(SPARED) + 1)]
    unbounded = console.options.update(max_width=1000)
    needed = [console.measure(table, options=unbounded).maximum for table in tables]
    fitting = (t for t, width in zip(tables, needed, strict=True) if width <= console.width)
    return next(fitting, tables[-1])


def _columns(comparison: Comparison, *, without: Sequence[str]) -> Table:
    spared = {*without, *(() if _steps_differ(comparison) else ("in steps",))}
    shown = [column for column in COLUMNS if column not in spared]
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for column in shown:
        table.add_column(column, justify="left" if column == "figure" else "right", no_wrap=True)
    for pair in comparison.pairs:
        cells = _cells(comparison, pair)
        style = "bold" if pair.is_certain else ""
        table.add_row(*(cells[column] for column in shown), style=style)
    return table


def _steps_differ(comparison: Comparison) -> bool:
    """Whether a ratio in steps tells more than the ratio itself."""
    return any(
        pair.ratio and pair.ratio_in_steps and abs(pair.ratio_in_steps / pair.ratio - 1) > TELLING
        for pair in comparison.pairs
    )


def _cells(comparison: Comparison, pair: Pair) -> dict[str, str]:
    unit = pair.unit if pair.unit in SELF_EVIDENT_UNITS else ""
    mark = CERTAIN if pair.is_certain else ""
    values = {
        side: bounded(comparison.metrics[side][pair.metric], pair.figure, unit=unit)
        if pair.metric in comparison.metrics[side]
        else DASH
        for side in (BASELINE, CANDIDATE)
    }
    return {
        "figure": _name(pair),
        **values,
        "difference": f"{_signed(pair.difference, unit)}{mark}",
        "95 %": between(pair.difference_ci95, unit) or DASH,
        "times": _times(pair.ratio),
        "in steps": _times(pair.ratio_in_steps),
    }


def _name(pair: Pair) -> str:
    return pair.metric if pair.figure == "mean" else f"{pair.metric} {pair.figure}"


def _signed(value: float | None, unit: str) -> str:
    return ("+" if value is not None and value > 0 else "") + quantity(value, unit)


def _times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{number(ratio)}x"


def _below(comparison: Comparison) -> Iterator[Text]:
    """What the columns mean, single requests, and which figures are not compared, and why."""
    if any(pair.is_certain for pair in comparison.pairs):
        text = "the interval leaves out 0; one in twenty of true equals is marked all the same"
        yield Text(f"{CERTAIN} {text}", style="dim")
    if _steps_differ(comparison):
        yield Text("in steps: the ratio of what each is in steps of its own engine", style="dim")
    for metric, shift in comparison.shifts.items():
        words = shift_in_words(metric, CANDIDATE, BASELINE, shift, "s")
        if words is not None:
            yield Text(words)
    reasons: dict[str, list[str]] = {}
    for pair in comparison.pairs:
        if pair.note is not None:
            reasons.setdefault(pair.note, []).append(_name(pair))
    for why, names in reasons.items():
        yield Text(f"not compared ({why}): {', '.join(names)}", style="dim")
