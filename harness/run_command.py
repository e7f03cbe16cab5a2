"""`walkaway run` and `walkaway demo`: do the run, show its result, say how it ended."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.arm_table import print_arms
from harness.errors import InterruptedRunError
from harness.interruption import Interruption
from harness.order import RunOrder, resolve_order
from harness.progress import Progress, choose_progress
from harness.rounds import execute_rounds
from harness.run import FinishedRun, draw_report, execute
from harness.summary_table import print_summary


def run_and_show(order: RunOrder, *, as_json: bool, quiet: bool) -> None:
    """Do the run and show what it gave. Raises how it ended, unless it is whole."""
    progress = choose_progress(Console(stderr=True), is_quiet=quiet)
    resolved = resolve_order(order)
    run = execute_rounds if resolved.arm_runs else execute
    report = None
    with Interruption() as interruption:
        finished = run(resolved, progress=progress, interruption=interruption)
        if finished.summary is not None:
            report = _draw(finished, progress)
    if finished.summary is not None:
        _show(finished.summary, report or finished.folder.path, as_json=as_json)
    if finished.failure is not None:
        kept = f"what was collected is in {finished.folder.path}"
        raise type(finished.failure)(f"{finished.failure}\n{kept}") from finished.failure
    if report is None:
        log = finished.folder.log("report")
        raise RuntimeError(f"the report could not be drawn, see {log}")
    if interruption.requested:
        raise InterruptedRunError(f"interrupted, but the run in {finished.folder.path} is whole")


def _draw(finished: FinishedRun, progress: Progress) -> Path | None:
    try:
        progress.phase("drawing the report")
        return draw_report(finished.folder)
    except KeyboardInterrupt as error:  # the second Ctrl-C: the user will not wait for it
        kept = f"interrupted; what was saved is in {finished.folder.path}"
        raise InterruptedRunError(kept) from error
    finally:
        progress.close()


def _show(summary: dict[str, Any], where: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary, indent=2))  # noqa: T201
        return
    console = Console()
    if "arms" in summary:
        print_arms(console, summary)
    else:
        print_summary(console, summary)
    console.print(f"report: {where}", soft_wrap=True, markup=False, highlight=False)
