"""The command line. Here, and only here, errors become messages and exit codes.

0 good · 1 a bug of ours · 2 wrong usage or configuration · 5 the target or the run failed ·
130 interrupted. Results go to standard output, progress and errors to standard error.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.config import SHIPPED_TARGETS, SHIPPED_WORKLOADS, load_target, load_workload, shipped
from harness.errors import ConfigError, InterruptedRunError, WalkawayError
from harness.interruption import Interruption
from harness.order import RunOrder
from harness.process import python_module
from harness.progress import choose_progress
from harness.run import FinishedRun, execute
from harness.summary_table import print_summary

BUG = 1

app = typer.Typer(
    name="walkaway",
    help=(
        "What does an LLM server do after the user walks away? Opens streams the way users do, "
        "abandons them on purpose, and measures what it cost.\n\nExample: walkaway demo"
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a key of the workload, e.g. --set run.users=4. Repeatable.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The run's folder; must be new or empty."),
]
NoScrape = Annotated[
    bool, typer.Option("--no-scrape", help="Never read /metrics: watching costs the watched.")
]
Json = Annotated[bool, typer.Option("--json", help="Print summary.json instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]


@app.command()
def demo(
    *,
    settings: Setting = None,
    out: Out = None,
    no_scrape: NoScrape = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the whole chain on this machine and write a report: the place to begin.

    Starts the bundled engine (on CUDA where there is one, else on the CPU), lets users come and
    walk away, and says what that cost. Takes one or two minutes.

    Example: walkaway demo --set run.users=16
    """
    order = RunOrder(
        workload="demo",
        settings=settings or [],
        out=out,
        has_scraping=not no_scrape,
        command=_typed_command({}),
    )
    _run(order, as_json=as_json, quiet=quiet)


@app.command()
def run(  # noqa: PLR0913  one argument a flag
    *,
    workload: Annotated[str, typer.Argument(help="A shipped name (walkaway workloads) or a path.")],
    target: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server; without it the bundled engine is started."),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="What kind of server (walkaway targets) or a path.")
    ] = "reference",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name on the server.")
    ] = None,
    metrics_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Where its metrics are, if not URL/metrics. Repeatable."),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable with the API key.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="A header for each request (secrets: --api-key-env)."),
    ] = None,
    settings: Setting = None,
    out: Out = None,
    no_scrape: NoScrape = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a workload, against the bundled engine or any server that speaks OpenAI's dialect.

    Example: walkaway run demo --target http://127.0.0.1:8000 --engine vllm --model tiny
    """
    headers = dict(_parse_header(text) for text in header or [])
    order = RunOrder(
        workload=workload,
        settings=settings or [],
        target_url=target,
        engine=engine,
        model=model,
        metrics_urls=metrics_url or [],
        api_key_env=api_key_env,
        headers=headers,
        out=out,
        has_scraping=not no_scrape,
        command=_typed_command(headers),
    )
    _run(order, as_json=as_json, quiet=quiet)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: report.html in the run."),
    ] = None,
) -> None:
    """Draw the report of one run, or one of several runs, again.

    Example: walkaway report results/20261121-053012-demo-4f2a -o report.html
    """
    for folder in runs:
        if not (folder / "manifest.json").is_file():
            raise ConfigError(f"{folder}: is not a run's folder (it has no manifest.json)")
    if output is None and len(runs) > 1:
        raise ConfigError("several runs: say with -o FILE where their report should go")
    file = output or runs[0] / "report.html"
    _become(python_module("dashboards", "report", *map(str, runs), "-o", str(file)))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def engine(context: typer.Context) -> None:
    """Serve the bundled engine alone; all flags are its own (walkaway engine --help).

    Example: walkaway engine --port 8000 --runner simulated --sim-fixed-ms 20
    """
    _become(python_module("reference_engine", *context.args))


@app.command()
def workloads() -> None:
    """List the shipped workloads and the question that each answers.

    Example: walkaway workloads
    """
    table = Table("workload", "question", "file")
    for name, path in shipped(SHIPPED_WORKLOADS).items():
        table.add_row(name, load_workload(name).question, str(path))
    Console().print(table)


@app.command()
def targets() -> None:
    """List the kinds of server that walkaway knows, for --engine.

    Example: walkaway targets
    """
    table = Table("engine", "what it is", "metrics known", "file")
    for name, path in shipped(SHIPPED_TARGETS).items():
        target = load_target(name)
        table.add_row(name, target.description, ", ".join(target.metrics) or "none", str(path))
    Console().print(table)


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        app()
    except WalkawayError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001  a bug of ours: one line for the user
        notes = "; ".join(getattr(error, "__notes__", []))
        _complain(f"a bug in walkaway, sorry: {type(error).__name__}: {error}; {notes}")
        sys.exit(BUG)


def _complain(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)  # noqa: T201


def _run(order: RunOrder, *, as_json: bool, quiet: bool) -> None:
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


def _show(finished: FinishedRun, summary: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary, indent=2))  # noqa: T201
        return
    console = Console()
    print_summary(console, summary)
    where = finished.report or finished.folder.path
    console.print(f"report: {where}", soft_wrap=True, markup=False, highlight=False)


def _parse_header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--header {text}: must look like Name=value")
    return name.strip(), value


def _typed_command(headers: dict[str, str]) -> list[str]:
    """The command line for the manifest, without the values of headers: they may be secret."""
    hidden = {f"{name}={value}": f"{name}=***" for name, value in headers.items()}
    return ["walkaway", *(_hide(argument, hidden) for argument in sys.argv[1:])]


def _hide(argument: str, hidden: dict[str, str]) -> str:
    for secret, shown in hidden.items():
        argument = argument.replace(secret, shown)
    return argument


def _become(command: list[str]) -> None:
    """Replace this process by another program; its exit code is then ours."""
    sys.stdout.flush()
    os.execv(command[0], command)
