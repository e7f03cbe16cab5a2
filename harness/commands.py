"""The commands and their flags; what a command does is imported when it is called.

So `walkaway --help` and a mistyped flag are answered at once: pandas and scipy alone take a second.
"""

from pathlib import Path
from typing import Annotated

import typer

from harness.command_line import (
    Command,
    Force,
    Json,
    NoScrape,
    Out,
    Quiet,
    Setting,
    app,
)
from harness.errors import ConfigError
from harness.gate_flags import (
    BaselineFile,
    Junit,
    Limits,
    Markdown,
    OnlyExitCode,
    RunPath,
    SaveBaseline,
    Verdicts,
)
from harness.lookup_commands import doctor, init, targets, workloads
from harness.process import become, python_module
from harness.result_commands import compare, export, trend
from harness.run_flags import (
    ApiKeyEnv,
    CaFile,
    CancellationDelay,
    CancellationRate,
    Engine,
    Header,
    MetricsUrl,
    Model,
    Processes,
    Target,
    Web,
    WebPort,
    WorkloadName,
)

__all__ = ["app"]


@app.command(cls=Command)
def demo(
    *,
    settings: Setting = None,
    out: Out = None,
    no_scrape: NoScrape = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the whole chain here and write a report.

    The place to begin. Starts the bundled engine (on CUDA where there is one, else on the CPU),
    lets users come and walk away, and says what that cost. Takes about a minute.

    Example: walkaway demo --set run.users=16
    """
    from harness.http_flags import typed_command
    from harness.order import RunOrder
    from harness.run_command import run_and_show

    order = RunOrder(
        workload="demo",
        settings=settings or [],
        out=out,
        has_scraping=not no_scrape,
        command=typed_command([]),
    )
    run_and_show(order, as_json=as_json, quiet=quiet)


@app.command(cls=Command)
def run(  # noqa: PLR0913  one argument a flag
    *,
    workload: WorkloadName,
    target: Target = None,
    engine: Engine = "reference",
    model: Model = None,
    metrics_url: MetricsUrl = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    ca_file: CaFile = None,
    processes: Processes = None,
    request_cancellation_rate: CancellationRate = None,
    request_cancellation_delay: CancellationDelay = None,
    web: Web = False,
    web_port: WebPort = 8089,
    settings: Setting = None,
    out: Out = None,
    no_scrape: NoScrape = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a workload and write a report.

    WORKLOAD is a shipped name (see `walkaway workloads`) or the path of a TOML file. It runs
    against the bundled engine, or any server that speaks OpenAI's dialect.

    Example: walkaway run demo --target http://127.0.0.1:8000 --engine vllm
    """
    from harness.cancellation_flags import cancellation_settings
    from harness.http_flags import check_ca_file, parse_headers, typed_command
    from harness.order import RunOrder
    from harness.run_command import run_and_show

    of_processes = [] if processes is None else [f"run.processes={processes}"]
    of_cancellation = cancellation_settings(
        workload, rate=request_cancellation_rate, delay_s=request_cancellation_delay
    )
    order = RunOrder(
        workload=workload,
        settings=[*(settings or []), *of_processes, *of_cancellation],
        target_url=target,
        engine=engine,
        model=model,
        metrics_urls=metrics_url or [],
        api_key_env=api_key_env,
        headers=parse_headers(header or []),
        ca_file=check_ca_file(ca_file),
        out=out,
        has_scraping=not no_scrape,
        command=typed_command(header or []),
    )
    if web:
        from harness.web_command import serve_page

        raise typer.Exit(serve_page(order, port=web_port))
    run_and_show(order, as_json=as_json, quiet=quiet)


@app.command(cls=Command)
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
    from harness.judged import open_run

    folders = [open_run(run) for run in runs]
    if output is None and len(runs) > 1:
        raise ConfigError("several runs: say with -o FILE where their report should go")
    for folder in folders:
        if not (folder.path / "summary.json").is_file():
            from harness.rounds import complete_summary

            complete_summary(folder)
    file = output or runs[0] / "report.html"
    become(python_module("dashboards", "report", *map(str, runs), "-o", str(file)))


@app.command(cls=Command)
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
    from harness.gate_command import GateOrder, gate_and_show

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


@app.command(cls=Command)
def collect(
    shards: Annotated[list[Path], typer.Argument(metavar="SHARDS", hidden=True)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run's folder; must be new.")],
) -> None:
    """Make one run of the rows of several load processes.

    SHARDS are folders, from one machine or from many: those of --walkaway-rows, or the shards/ of a
    run that was killed.

    Example: walkaway collect rows-a rows-b --out results/together
    """
    from harness.collection import collect as collect_shards
    from harness.http_flags import typed_command
    from harness.rounds import complete_summary
    from harness.run import draw_report

    folder = collect_shards(shards, out, command=typed_command([]))
    complete_summary(folder)
    typer.echo(draw_report(folder) or folder.path)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def engine(context: typer.Context) -> None:
    """Serve the bundled engine alone (flags: walkaway engine --help).

    Example: walkaway engine --port 8000 --runner simulated --sim-fixed-ms 20
    """
    become(python_module("reference_engine", *context.args))


for _command in (
    compare,
    trend,
    export,
    workloads,
    targets,
    init,
    doctor,
):
    app.command(cls=Command)(_command)
