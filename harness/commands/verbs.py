"""The commands and their flags; what a command does is imported when it is called.

So `walkaway --help` and a mistyped flag are answered at once: pandas and scipy alone take a second.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from harness.commands.app import (
    Command,
    Force,
    JsonResult,
    app,
    target_names,
    workload_names,
)
from harness.commands.doctor import doctor
from harness.commands.run import demo, run
from harness.errors import ConfigError
from harness.run.process import become, python_module


def workloads(
    *,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", hidden=True, autocompletion=workload_names),
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """List the shipped workloads, or explain one.

    With NAME (or the path of a workload of your own): its question, how to run it, and its file
    with what each key does.

    Example: walkaway workloads chunk_frontier
    """
    from harness.commands.catalogue import show_workload, show_workloads

    show_workloads(as_json=as_json) if name is None else show_workload(name, as_json=as_json)


def targets(
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", hidden=True, autocompletion=target_names)
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """List the kinds of server that walkaway knows, or explain one.

    With NAME (or a path): which of its metrics are read, when each of them moves, and how far it
    can be believed. A name is for --engine of `walkaway run`.

    Example: walkaway targets vllm
    """
    from harness.commands.catalogue import show_target, show_targets

    show_targets(as_json=as_json) if name is None else show_target(name, as_json=as_json)


def init(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)] = Path("workload.toml"),
    force: Force = False,
) -> None:
    """Write a workload of your own to begin with.

    FILE (workload.toml, if you name none) says what each key does, and runs as it is.

    Example: walkaway init mine.toml
    """
    from harness.commands.catalogue import write_template

    write_template(file, force=force)


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
    from harness.commands.compare import compare_and_show

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
    force: Force = False,
) -> None:
    """Write a run for other tools.

    RUN is the folder of a run; of one with arms, a folder in its rounds/.

    Example: walkaway export results/before --trace before.json
    """
    from harness.commands.export import export_run

    export_run(run, trace=trace, force=force)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", hidden=True)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: report.html in the run."),
    ] = None,
) -> None:
    """Draw the report of one run or several again.

    RUN is the folder of a run. One that was cut short before it was judged is judged first.

    Example: walkaway report results/20261121-053012-demo-4f2a -o report.html
    """
    from harness.store.run_folder import open_run

    folders = [open_run(run) for run in runs]
    if output is None and len(runs) > 1:
        raise ConfigError("several runs: say with -o FILE where their report should go")
    for folder in folders:
        if not (folder.path / "summary.json").is_file():
            from harness.run.rounds import complete_summary

            complete_summary(folder)
    file = output or runs[0] / "report.html"
    become(python_module("dashboards", "report", *map(str, runs), "-o", str(file)))


RunPath = Annotated[Path, typer.Argument(metavar="RUN", hidden=True)]
Limits = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Limits, one a line. Default: the workload's.")
]
BaselineFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Default: results/baselines/WORKLOAD.json, if there is one."),
]
SaveBaseline = Annotated[
    bool, typer.Option("--save-baseline", help="Keep this run as the baseline, if it passes.")
]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit report there.")]
Markdown = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a Markdown table there.")
]
Verdicts = Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")]
OnlyExitCode = Annotated[
    bool, typer.Option("--quiet", help="Print nothing, only set the exit code.")
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

    RUN is the folder of a run; it is held to limits, and to a baseline where there is one. The exit
    code is 0 for a pass, 3 where a limit is broken, and 4 where it cannot be decided, which is
    never a pass; what would decide it is said.

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


def collect(
    shards: Annotated[list[Path], typer.Argument(metavar="SHARDS", hidden=True)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run's folder; must be new.")],
) -> None:
    """Make one run of the rows of several load processes.

    SHARDS are folders, from one machine or from many: those of --walkaway-rows, or the shards/ of a
    run that was killed.

    Example: walkaway collect rows-a rows-b --out results/together
    """
    from harness.http_client import typed_command
    from harness.run.collection import collect as collect_shards
    from harness.run.pipeline import draw_report
    from harness.run.rounds import complete_summary

    folder = collect_shards(shards, out, command=typed_command([]))
    complete_summary(folder)
    typer.echo(draw_report(folder) or folder.path)


def engine(context: typer.Context) -> None:
    """Serve the bundled engine alone (flags: walkaway engine --help).

    Example: walkaway engine --port 8000 --runner simulated --sim-fixed-ms 20
    """
    become(python_module("reference_engine", *context.args))


__all__ = ["app"]

COMMANDS: tuple[Callable[..., None], ...] = (
    *(demo, run, report, gate, compare, trend, export, collect),
    *(workloads, targets, init, doctor),
)
for command in COMMANDS:
    app.command(cls=Command)(command)
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)(engine)
