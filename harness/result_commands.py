"""Commands that read runs: side by side, and written for other tools."""

from pathlib import Path
from typing import Annotated

import typer

from harness.command_line import Force, JsonResult
from harness.errors import ConfigError
from harness.process import become, python_module


def compare(
    *,
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", hidden=True)],
    candidates: Annotated[list[Path], typer.Argument(metavar="CANDIDATE", hidden=True)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Draw it as a page there instead."),
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """Show runs side by side: what differs, and how surely.

    BASELINE and each CANDIDATE are folders of runs of one workload. Times are compared in steps of
    the engine too where those differ; what cannot be compared is said, and not compared.

    Example: walkaway compare results/before results/after -o comparison.html
    """
    if output is not None and as_json:
        raise ConfigError("--json prints and -o draws: take one of them")
    if output is not None:
        runs = map(str, [baseline, *candidates])
        become(python_module("dashboards", "compare", *runs, "-o", str(output)))
    from harness.compare_command import compare_and_show

    compare_and_show(baseline, candidates, as_json=as_json)


def trend(
    *,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", hidden=True)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: trend.html in FOLDER."),
    ] = None,
) -> None:
    """Draw how the figures of many runs moved from night to night.

    FOLDER holds the folders of runs, of any workloads and servers: each has a part of its own. What
    is no run, or damaged, is listed and left out.

    Example: walkaway trend results -o trend.html
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name one that holds the folders of runs")
    file = output or folder / "trend.html"
    become(python_module("dashboards", "trend", str(folder), "-o", str(file)))


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

    Example: walkaway export results/before --trace before.json
    """
    from harness.export_command import export_run

    export_run(run, trace=trace, aiperf=aiperf, force=force)
