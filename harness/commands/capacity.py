"""`walkaway simulate capacity` on a terminal: search, show the needs, draw the page."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from harness.commands.run_table import first_that_fits, grid
from harness.formatting import DASH
from harness.run.process import Interruption, become, python_module
from harness.run.progress import ProgressConsole, choose_progress
from harness.run.run_config import RunConfig
from harness.run.run_state import choose_folder
from harness.simulate.capacity import (
    LATE_S,
    RUNS,
    CapacitySearch,
    Question,
    capacity,
    goal_of,
    plan_for,
)
from harness.simulate.simulation import resolve_simulation
from harness.store.capacity_result import CapacityResult
from harness.store.run_folder import RunFolder
from harness.text.capacity import NEED_COLUMNS, need_cells

# Left out one by one on too narrow a terminal: without them the needs are still there.
SPARED: Final = ("wasted tokens", "more (95 %)", "requests/s", "a month (95 %)")


def show_capacity(
    config: RunConfig,
    flags: Mapping[str, float | None],
    processes: int,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    chosen = {name: one for name, one in flags.items() if one is not None}
    question = Question(
        rate=chosen.get("--rate"),
        late_s=chosen.get("--late", LATE_S),
        price_hour=chosen.get("--price-hour"),
    )
    workload = plan_for(config).workload  # a bad one leaves no folder
    folder = RunFolder.claim(choose_folder(resolve_simulation(config)))
    progress = choose_progress(ProgressConsole(), is_quiet=quiet)
    with Interruption() as interruption:
        search = CapacitySearch(
            config=config,
            goal=goal_of(workload)[0],
            folder=folder.path / RUNS,
            progress=progress,
            interruption=interruption,
            processes=processes,
        )
        try:
            result = capacity(config, question, search)
        finally:
            progress.close()
            if not search.done:
                shutil.rmtree(folder.path)
    result.write(folder.path)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        _print(result, folder.path)
    page = str(folder.path / "index.html")
    become(python_module("dashboards", "capacity", str(folder.path), "-o", page))


def _print(result: CapacityResult, folder: Path) -> None:
    console = Console()
    for line in (
        f"Simulated: {result.rate:g} requests a second, shared by replicas of: "
        f"{result.machine['title']}.",
        f"A replica takes the most requests at which it still holds {' and '.join(result.goal)}.",
    ):
        console.print(line, markup=False, highlight=False)
    rows = [need_cells(need) for need in result.needs]
    known = {
        name: cells for name, *cells in zip(NEED_COLUMNS, *rows, strict=True) if {*cells} != {DASH}
    }
    layouts = ([_table(known, without=SPARED[:n])] for n in range(len(SPARED) + 1))
    console.print(*first_that_fits(console, layouts))
    console.print(f"{folder / 'capacity.json'}", soft_wrap=True, markup=False, highlight=False)


def _table(columns: Mapping[str, Sequence[str]], *, without: Sequence[str]) -> Table:
    shown = [name for name in columns if name not in without]
    rows = zip(*(columns[name] for name in shown), strict=True)
    return grid(shown, rows, words=NEED_COLUMNS[:1], wraps=False)
