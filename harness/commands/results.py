"""The commands on finished runs: report, gate, compare, trend, export, collect."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.commands.app import Force, JsonResult, result_flag
from harness.errors import ConfigError
from harness.run.process import become, python_module
from harness.store.conform_result import CONFORM_FILE
from harness.store.output import cannot_write, check_output, is_stdout, write_output
from harness.store.run_folder import (
    OtherVersionError,
    RunFolder,
    UnusableRunError,
    is_run,
    open_run,
)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", hidden=True)],
    output: Annotated[
        Path | None,
        result_flag("-o", "--output", metavar="FILE", help="Default: report.html in the run."),
    ] = None,
) -> None:
    """Draw the report of one or several runs again.

    RUN is a run's folder. A run that was cut short before it was judged is judged first. Where
    files are missing or damaged, the page says what is lost, and the rest is drawn.

    Example: walkaway report results/20261121-053012-demo-4f2a -o report.html
    """
    folders = [open_run(run) for run in runs]
    if output is None and len(runs) > 1:
        raise ConfigError("several runs need -o FILE for their common report")
    for folder in folders:
        judge_if_needed(folder)
    file = output or runs[0] / "report.html"
    become(python_module("dashboards", "report", *map(str, runs), "-o", str(file)))


def judge_if_needed(folder: RunFolder) -> None:
    """The run is judged if it has no summary that can be read."""
    try:
        folder.read_summary()
    except OtherVersionError:
        raise
    except UnusableRunError as error:
        from harness.run.rounds import complete_summary

        if os.path.lexists(folder.path / "summary.json"):
            folder.put_aside("summary.json")
            typer.echo(f"{error.reason}; the run is judged again", err=True)
        _say("judging what was saved")
        with _saving(folder.path):
            complete_summary(folder)


def _say(text: str) -> None:
    typer.echo(f"walkaway: {text}", err=True)


@contextmanager
def _saving(place: Path) -> Iterator[None]:
    """Raises StorageError and ConfigError for what cannot be written."""
    try:
        yield
    except OSError as error:
        raise cannot_write(place, error) from error


RunPath = Annotated[Path, typer.Argument(metavar="RUN", hidden=True)]
_judged_by = partial(typer.Option, rich_help_panel="What it is judged by")
Limits = Annotated[
    Path | None, _judged_by(metavar="FILE", help="Limits, one per line. Default: the workload's.")
]
BaselineFile = Annotated[
    Path | None,
    _judged_by(metavar="FILE", help="Default: results/baselines/WORKLOAD.json, if it exists."),
]
SaveBaseline = Annotated[
    bool, _judged_by("--save-baseline", help="Keep this run as the baseline, if it passes.")
]
Junit = Annotated[
    Path | None, result_flag(metavar="FILE", help="Write a JUnit report there; -: print it.")
]
Markdown = Annotated[
    Path | None, result_flag(metavar="FILE", help="Write a Markdown table there; -: print it.")
]
Verdicts = Annotated[bool, result_flag("--json", help="Print the verdicts as JSON.")]
OnlyExitCode = Annotated[
    bool, result_flag("--quiet", help="Print nothing, only set the exit code.")
]


def gate(  # noqa: PLR0913  one argument a flag
    *,
    run: RunPath,
    limits: Limits = None,
    baseline: BaselineFile = None,
    save_baseline: SaveBaseline = False,
    junit: Junit = None,
    markdown: Markdown = None,
    force: Force = False,
    as_json: Verdicts = False,
    quiet: OnlyExitCode = False,
) -> None:
    """Judge a run: pass, fail, or cannot decide.

    RUN is a run's folder. It is judged by limits, and by a baseline if there is one. The exit code
    is 0 for a pass, 3 for a broken limit, and 4 if the run cannot decide, which is never a pass;
    the output says what would decide it.

    Example: walkaway gate results/20261121-053012-gate-4f2a --junit gate.xml
    """
    from harness.commands.gate import GateOrder, gate_and_show

    order = GateOrder(
        run=run,
        limits=limits,
        baseline=baseline,
        saves_baseline=save_baseline,
        junit=junit,
        markdown=markdown,
        may_overwrite=force,
    )
    raise typer.Exit(gate_and_show(order, as_json=as_json, quiet=quiet))


def compare(
    *,
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", hidden=True)],
    candidates: Annotated[list[Path], typer.Argument(metavar="CANDIDATE", hidden=True)],
    output: Annotated[
        Path | None,
        result_flag("-o", "--output", metavar="FILE", help="Write a page there instead."),
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """Show runs side by side: the differences, with their intervals.

    BASELINE and each CANDIDATE are folders of runs of one workload. If the engines' step times
    differ, times are compared in steps too. Figures that cannot be compared are listed with the
    reason.

    Example: walkaway compare results/before results/after -o comparison.html
    """
    if output is not None and as_json:
        raise ConfigError("--json prints and -o draws: choose one of them")
    if output is not None:
        runs = map(str, [baseline, *candidates])
        become(python_module("dashboards", "compare", *runs, "-o", str(output)))
    from harness.commands.compare import compare_and_show

    compare_and_show(baseline, candidates, as_json=as_json)


def trend(
    *,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", hidden=True)],
    output: Annotated[
        Path | None,
        result_flag("-o", "--output", metavar="FILE", help="Default: trend.html in FOLDER."),
    ] = None,
) -> None:
    """Draw how the figures of many runs moved from night to night.

    FOLDER holds the folders of runs. The page has a part for each pair of workload and server.
    Damaged runs and other folders are listed and left out.

    Example: walkaway trend results -o trend.html
    """
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "no such folder"
        raise ConfigError(f"{folder}: {why}; name the folder that holds the runs")
    file = output or folder / "trend.html"
    become(python_module("dashboards", "trend", str(folder), "-o", str(file)))


def matrix(
    *,
    results: Annotated[list[Path], typer.Argument(metavar="CONFORM_JSON", hidden=True)],
    output: Annotated[
        Path | None,
        result_flag("-o", "--output", metavar="FILE", help="The page to write; needed."),
    ] = None,
    explanations: Annotated[
        Path | None,
        result_flag(
            metavar="FILE",
            help="A sentence for each red cell. Default: explanations.toml next to the results.",
        ),
    ] = None,
) -> None:
    """Draw the conformance of several servers side by side.

    CONFORM_JSON are results of `walkaway conform`, or their folders: a column each.

    Example: walkaway matrix results/engines/*/conform.json -o matrix.html
    """
    files = [str(_result_in(one)) for one in results]
    if output is None:
        raise ConfigError("no page to write: name it with -o FILE.html")
    more = [] if explanations is None else ["--explanations", str(explanations)]
    become(python_module("dashboards", "matrix", *files, "-o", str(output), *more))


def _result_in(place: Path) -> Path:
    if not place.is_dir():
        return place
    if (place / CONFORM_FILE).is_file():
        return place / CONFORM_FILE
    remedy = "name a folder that `walkaway conform --out` wrote"
    if any(place.glob(f"*/{CONFORM_FILE}")):
        remedy = f"the folders in it do: name {place / '*' / CONFORM_FILE}"
    raise ConfigError(f"{place}: holds no {CONFORM_FILE}; {remedy}")


def export(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    trace: Annotated[
        Path | None,
        result_flag(metavar="FILE", help="A timeline for Perfetto or chrome://tracing (JSON)."),
    ] = None,
    force: Force = False,
) -> None:
    """Write a run for other tools.

    RUN is a run's folder; of a run with arms, a folder in its rounds/.

    Example: walkaway export results/before --trace before.json
    """
    if trace is None:
        raise ConfigError("nothing to write: name a file with --trace")
    from harness.export.chrome_trace import MARK, chrome_trace
    from harness.export.library import load_remains

    check_output(trace, ours=MARK, may_overwrite=force)
    found, folder = load_remains(run)
    frames = found.frames
    for lost in folder.lost.values():
        typer.echo(f"warning: {lost}", err=True)
    if frames.requests.empty:
        raise ConfigError(f"{run}: no request was made in this run: nothing to write")
    content = json.dumps(chrome_trace(frames)) + "\n"
    write_output(trace, content.encode(), ours=MARK, may_overwrite=force)
    if not is_stdout(trace):
        typer.echo(f"wrote {trace}; open it at https://ui.perfetto.dev")


def collect(
    shards: Annotated[list[Path], typer.Argument(metavar="SHARDS", hidden=True)],
    out: Annotated[Path, result_flag(metavar="DIR", help="The run's folder; must be new.")],
) -> None:
    """Make one run from the rows of several load processes.

    SHARDS are folders, from one machine or from many: the DIR of --walkaway-rows, or the shards/ of
    a killed run.

    Example: walkaway collect rows-a rows-b --out results/together
    """
    for one in shards:
        if not one.is_dir():
            raise ConfigError(f"{one}: there is no such folder")
        if is_run(one):
            raise ConfigError(
                f"{one}: is a run's folder, not one of shards: walkaway report {one} judges it"
            )
    from harness.http_client import typed_command
    from harness.run.collection import collect as collect_shards
    from harness.run.pipeline import draw_report
    from harness.run.rounds import complete_summary

    with _saving(out):
        _say("collecting the rows (1 of 3)")
        folder = collect_shards(shards, out, command=typed_command([]))
        _say("judging them (2 of 3)")
        complete_summary(folder)
    _say("drawing the report (3 of 3)")
    typer.echo(draw_report(folder))
