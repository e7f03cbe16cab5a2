"""`walkaway run` and `walkaway demo`: do the run, show its result, say how it ended."""

import json
import sys
from collections.abc import Iterable

from rich.console import Console

from harness.errors import InterruptedRunError
from harness.interruption import Interruption
from harness.order import RunOrder
from harness.progress import choose_progress
from harness.run import FinishedRun, execute
from harness.summary_table import print_summary


def run_and_show(order: RunOrder, *, as_json: bool, quiet: bool) -> None:
    """Do the run and show what it gave. Raises how it ended, unless it is whole."""
    progress = choose_progress(Console(stderr=True), is_quiet=quiet)
    with Interruption() as interruption:
        finished = execute(order, progress=progress, interruption=interruption)
    if finished.summary is not None:
        _show(finished, finished.summary, as_json=as_json)
    if finished.failure is not None:
        kept = f"what was collected is in {finished.folder.path}"
        raise type(finished.failure)(f"{finished.failure}\n{kept}") from finished.failure
    if finished.report is None:
        log = finished.folder.log("report")
        raise RuntimeError(f"the report could not be drawn, see {log}")
    if interruption.requested:
        raise InterruptedRunError(f"interrupted, but the run in {finished.folder.path} is whole")


def typed_command(headers: Iterable[str]) -> list[str]:
    """The command line for the manifest, without the values of headers: they may be secret."""
    hidden = {text: f"{text.partition('=')[0]}=***" for text in headers}
    return ["walkaway", *(_hide(argument, hidden) for argument in sys.argv[1:])]


def _hide(argument: str, hidden: dict[str, str]) -> str:
    for secret, shown in hidden.items():
        argument = argument.replace(secret, shown)
    return argument


def _show(finished: FinishedRun, summary: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary, indent=2))  # noqa: T201
        return
    console = Console()
    print_summary(console, summary)
    where = finished.report or finished.folder.path
    console.print(f"report: {where}", soft_wrap=True, markup=False, highlight=False)
