"""Commands that read runs: side by side, and written for other tools."""

from pathlib import Path
from typing import Annotated

import typer

from harness.command_line import Force, JsonResult


def compare(
    *,
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", hidden=True)],
    candidates: Annotated[list[Path], typer.Argument(metavar="CANDIDATE", hidden=True)],
    as_json: JsonResult = False,
) -> None:
    """Show runs side by side: what differs, and how surely.

    BASELINE and each CANDIDATE are folders of runs of one workload. Times are compared in steps of
    the engine too where those differ; what cannot be compared is said, and not compared.

    Example: walkaway compare results/before results/after
    """
    from harness.compare_command import compare_and_show

    compare_and_show(baseline, candidates, as_json=as_json)


def export(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A timeline for Perfetto or chrome://tracing (JSON)."),
    ] = None,
    aiperf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A row a request as AIPerf's profile_export.jsonl."),
    ] = None,
    force: Force = False,
) -> None:
    """Write a run for other tools.

    RUN is the folder of a run; of one with arms, a folder in its rounds/.

    Example: walkaway export results/before --trace before.json --aiperf before.jsonl
    """
    from harness.export_command import export_run

    export_run(run, trace=trace, aiperf=aiperf, force=force)
