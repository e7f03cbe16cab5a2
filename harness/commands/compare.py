"""`walkaway compare`: runs side by side on a terminal, clear differences in bold."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.commands.run_table import LEVEL_STYLE, first_that_fits, grid, statement
from harness.compare.comparison import (
    BASELINE,
    CANDIDATE,
    CERTAIN,
    Comparison,
    cells,
    compare_each,
    not_compared,
    steps_differ,
)
from harness.compare.pairs import is_sure
from harness.errors import ConfigError
from harness.export.library import load_run
from harness.formatting import shift_in_words

COLUMNS: Final = ("figure", BASELINE, CANDIDATE, "difference", "95 %", "times", "in steps")
SPARED: Final = ("times", "in steps", "95 %")  # left out one by one where the terminal is narrow


def compare_and_show(baseline: Path, candidates: Sequence[Path], *, as_json: bool) -> None:
    compared = list(compare_each(load_run(baseline), candidates))
    found = [one for pair in compared if isinstance(pair, tuple) for one in pair[1]]
    refused = [str(error) for error in compared if isinstance(error, ConfigError)]
    if not found:
        raise ConfigError("\n".join(refused))
    for reason in refused:
        Console(stderr=True).print(Text(f"left out: {reason}", style=LEVEL_STYLE["warning"]))
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))  # noqa: T201
        return
    console = Console()
    for comparison in found:
        show_comparison(console, comparison)


def show_comparison(console: Console, comparison: Comparison) -> None:
    which = f", arm {comparison.arm}" if comparison.arm else ""
    title = Text.assemble(
        "baseline ", (comparison.baseline, "bold"), "\ncandidate ", (comparison.candidate, "bold")
    )
    console.print(
        Group(
            Text.assemble(title, which),
            *(statement(said) for said in comparison.remarks),
            _table(console, comparison),
            *_below(comparison),
        )
    )


def _table(console: Console, comparison: Comparison) -> Table:
    layouts = ([_columns(comparison, without=SPARED[:n])] for n in range(len(SPARED) + 1))
    return first_that_fits(console, layouts)[0]


def _columns(comparison: Comparison, *, without: Sequence[str]) -> Table:
    spared = {*without, *(() if steps_differ(comparison) else ("in steps",))}
    shown = [column for column in COLUMNS if column not in spared]
    table = grid(shown, [], words=("figure",), wraps=False)
    for pair in comparison.pairs:
        of = cells(comparison, pair)
        style = "bold" if is_sure(pair) else ""
        table.add_row(*(of[column] for column in shown), style=style)
    return table


def _below(comparison: Comparison) -> Iterator[Text]:
    if any(is_sure(pair) for pair in comparison.pairs):
        both = ", as measured and in steps" if steps_differ(comparison) else ""
        text = f"significant at 95 %{both}; expect one false mark in twenty figures that are equal"
        yield Text(f"{CERTAIN} {text}", style="dim")
    if steps_differ(comparison):
        yield Text("in steps: the ratio of the two, each in steps of its own engine", style="dim")
    for metric, shift in comparison.shifts.items():
        words = shift_in_words(metric, CANDIDATE, BASELINE, shift, "s")
        if words is not None:
            yield Text(words)
    for why, names in not_compared(comparison.pairs).items():
        yield Text(f"not compared ({why}): {', '.join(names)}", style="dim")
