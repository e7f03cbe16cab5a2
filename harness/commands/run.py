"""The flags of `walkaway run` and `walkaway demo`."""

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from harness.commands.app import LOAD, RESULT, SERVER, target_names, workload_names
from harness.errors import ConfigError

# The server.
WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", hidden=True, autocompletion=workload_names)
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The server. Default: the bundled engine is started.",
        rich_help_panel=SERVER,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The kind of server: a name (walkaway targets) or a path.",
        autocompletion=target_names,
        rich_help_panel=SERVER,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The model's name on the server.", rich_help_panel=SERVER),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="VAR", help="Environment variable with the API key.", rich_help_panel=SERVER
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        metavar="K=V", help="A header for each request. Repeatable.", rich_help_panel=SERVER
    ),
]
CaFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Trust only the CAs in this PEM file for https.",
        rich_help_panel=SERVER,
    ),
]
YesLoadThisHost = Annotated[
    bool,
    typer.Option(
        "--yes-load-this-host",
        help="Allow a target that is not on loopback.",
        rich_help_panel=SERVER,
    ),
]

# The load.
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a key of the workload, e.g. run.users=4. Repeatable.",
        rich_help_panel=LOAD,
    ),
]
CancellationRate = Annotated[
    float | None,
    typer.Option(
        metavar="PERCENT",
        help="Abandon this share of the requests (as in AIPerf).",
        rich_help_panel=LOAD,
    ),
]
CancellationDelay = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Leave this long after the request was sent. Default 0.",
        rich_help_panel=LOAD,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Share the load between N processes. Default 1.",
        rich_help_panel=LOAD,
    ),
]

# The result.
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="The run's folder; must be new or empty.",
        rich_help_panel=RESULT,
    ),
]
All = Annotated[
    bool, typer.Option("--all", help="Show every figure and note.", rich_help_panel=RESULT)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print summary.json instead of a table.", rich_help_panel=RESULT),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="No progress, only the result.", rich_help_panel=RESULT),
]

# The page.
PAGE: Final = "In the browser"
Web = Annotated[
    bool,
    typer.Option("--web", help="Start, stop and watch runs in a browser.", rich_help_panel=PAGE),
]
WebPort = Annotated[
    int,
    typer.Option(
        metavar="PORT", min=1, max=65_535, help="The port of that page.", rich_help_panel=PAGE
    ),
]

# The server's own figures.
METRICS: Final = "The server's metrics"
MetricsUrl = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Its metrics page, if not URL/metrics. Repeatable.",
        rich_help_panel=METRICS,
    ),
]
GpuMetricsUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A DCGM exporter's page. Default: NVML, if the server is here.",
        rich_help_panel=METRICS,
    ),
]
NoScrape = Annotated[
    bool,
    typer.Option(
        "--no-scrape",
        help="Read /metrics only before and after the load, not during it.",
        rich_help_panel=METRICS,
    ),
]


def demo(
    *,
    settings: Setting = None,
    out: Out = None,
    shows_all: All = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_scrape: NoScrape = False,
) -> None:
    """Run the whole chain on this machine and write a report.

    Begin here. It starts the bundled engine (on CUDA if there is a GPU, else on the CPU), lets
    users walk away, sends a few probes, and shows what that cost. It takes about a minute.

    Example: walkaway demo --set run.users=16
    """
    from harness.commands.finished_run import run_and_show
    from harness.http_client import typed_command
    from harness.run.run_config import RunConfig

    config = RunConfig(
        workload="demo",
        settings=settings or [],
        out=out,
        has_scraping=not no_scrape,
        has_probe_phase=True,
        command=typed_command([]),
    )
    run_and_show(config, as_json=as_json, quiet=quiet, shows_all=shows_all)


def run(  # noqa: PLR0913  one argument a flag
    *,
    workload: WorkloadName,
    target: Target = None,
    engine: Engine = "reference",
    model: Model = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    ca_file: CaFile = None,
    yes_load_this_host: YesLoadThisHost = False,
    settings: Setting = None,
    request_cancellation_rate: CancellationRate = None,
    request_cancellation_delay: CancellationDelay = None,
    processes: Processes = None,
    out: Out = None,
    shows_all: All = False,
    as_json: Json = False,
    quiet: Quiet = False,
    web: Web = False,
    web_port: WebPort = 8089,
    metrics_url: MetricsUrl = None,
    gpu_metrics_url: GpuMetricsUrl = None,
    no_scrape: NoScrape = False,
) -> None:
    """Run a workload and write a report.

    WORKLOAD is a shipped name (see `walkaway workloads`) or the path of a TOML file. The server is
    the bundled engine, or any that speaks OpenAI's dialect.

    Example: walkaway run demo --target http://127.0.0.1:8000 --engine vllm
    """
    from harness.commands.finished_run import cancellation_settings, run_and_show
    from harness.http_client import check_ca_file, parse_headers, typed_command
    from harness.run.run_config import RunConfig

    gpu_url = gpu_metrics_url
    of_gpus = [] if gpu_url is None else [f"collect.gpu_metrics_url={json.dumps(gpu_url)}"]
    of_processes = [] if processes is None else [f"run.processes={processes}"]
    of_cancellation = cancellation_settings(
        workload, rate=request_cancellation_rate, delay_s=request_cancellation_delay
    )
    config = RunConfig(
        workload=workload,
        settings=[*(settings or []), *of_gpus, *of_processes, *of_cancellation],
        target_url=target,
        engine=engine,
        model=model,
        metrics_urls=metrics_url or [],
        api_key_env=api_key_env,
        headers=parse_headers(header or []),
        ca_file=check_ca_file(ca_file),
        loads_any_host=yes_load_this_host,
        out=out,
        has_scraping=not no_scrape,
        command=typed_command(header or []),
    )
    if web:
        from harness.commands.web import serve_page

        if as_json or shows_all:
            flag = "--json" if as_json else "--all"
            raise ConfigError(
                f"{flag}: is not for --web, whose runs show their results in the page"
            )
        raise typer.Exit(serve_page(config, port=web_port))
    run_and_show(config, as_json=as_json, quiet=quiet, shows_all=shows_all)
