"""`walkaway simulate capacity` on a terminal: search, show the needs, draw the page."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from harness.export.capacity import NEED_COLUMNS, need_cells
from harness.run.process import Interruption, become, python_module
from harness.run.progress import ProgressConsole, choose_progress
from harness.run.run_config import RunConfig
from harness.run.run_state import choose_folder
from harness.simulate.capacity import (
    LATE_S,
    RUNS,
    Question,
    Search,
    capacity,
    goal_of,
    prepared_for,
)
from harness.simulate.simulation import resolve_simulation
from harness.store.capacity_result import CapacityResult
from harness.store.run_folder import RunFolder


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
    workload = prepared_for(config).workload  # a bad one leaves no folder
    folder = RunFolder.claim(choose_folder(resolve_simulation(config)))
    progress = choose_progress(ProgressConsole(), is_quiet=quiet)
    with Interruption() as interruption:
        search = Search(
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
    console.print(
        f"{result.rate:g} requests/s on {result.machine['title']}, simulated; a replica holds "
        f"{' and '.join(result.goal)}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for column in NEED_COLUMNS:
        table.add_column(column, justify="left" if column == NEED_COLUMNS[0] else "right")
    for need in result.needs:
        table.add_row(*need_cells(need))
    console.print(table)
    console.print(f"{folder / 'capacity.json'}", soft_wrap=True, markup=False, highlight=False)
