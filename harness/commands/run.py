"""The flags of `walkaway run` and `walkaway demo`."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.commands.app import (
    SERVER_VARIABLES,
    result_flag,
    server_flag,
    target_names,
    typed_variables,
    workload_names,
)
from harness.errors import ConfigError

_load = partial(typer.Option, rich_help_panel="The load")
_page = partial(typer.Option, rich_help_panel="In the browser")
_metrics = partial(typer.Option, rich_help_panel="The server's metrics")
DEMO = "demo"
WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", hidden=True, autocompletion=workload_names)
]
Target = Annotated[
    str | None,
    server_flag(
        metavar="URL",
        envvar=SERVER_VARIABLES["--target"],
        help="The server. Default: the bundled engine is started.",
    ),
]
Engine = Annotated[
    str | None,
    server_flag(
        metavar="NAME",
        envvar=SERVER_VARIABLES["--engine"],
        help="The kind of server: a name (walkaway targets) or a path. Default: recognised.",
        autocompletion=target_names,
    ),
]
Model = Annotated[
    str | None,
    server_flag(
        metavar="NAME",
        envvar=SERVER_VARIABLES["--model"],
        help="The model's name on the server.",
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    server_flag(
        metavar="VAR",
        envvar=SERVER_VARIABLES["--api-key-env"],
        help="Environment variable with the API key.",
    ),
]
Header = Annotated[
    list[str] | None,
    server_flag(
        metavar="K=V",
        envvar=SERVER_VARIABLES["--header"],
        help="A header for each request. Repeatable.",
    ),
]
CaFile = Annotated[
    str | None,
    server_flag(
        metavar="FILE",
        envvar=SERVER_VARIABLES["--ca-file"],
        help="Trust only the CAs in this PEM file for https.",
    ),
]
YesLoadThisHost = Annotated[
    bool, server_flag("--yes-load-this-host", help="Allow a target that is not on loopback.")
]
Gate = Annotated[
    bool, result_flag("--gate", help="Judge the run by its limits: exit 0, 3 or 4 (walkaway gate).")
]
Junit = Annotated[
    Path | None, result_flag(metavar="FILE", help="With --gate: write a JUnit report.")
]
Markdown = Annotated[Path | None, result_flag(metavar="FILE", help="With --gate: write a table.")]
Rounds = Annotated[
    int | None,
    _load(metavar="N", min=1, help="Run each arm N times, as a baseline needs (3 or more)."),
]
Setting = Annotated[
    list[str] | None,
    _load(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a key of the workload, e.g. run.users=4. Repeatable.",
    ),
]
CancellationRate = Annotated[
    float | None,
    _load(metavar="PERCENT", help="Abandon this share of the requests (as in AIPerf)."),
]
CancellationDelay = Annotated[
    float | None,
    _load(metavar="SECONDS", help="Leave this long after the request was sent. Default 0."),
]
Processes = Annotated[
    int | None, _load(metavar="N", min=1, help="Share the load between N processes. Default 1.")
]
Out = Annotated[
    Path | None, result_flag("--out", metavar="DIR", help="The run's folder; must be new or empty.")
]
All = Annotated[bool, result_flag("--all", help="Show every figure and note.")]
Json = Annotated[bool, result_flag("--json", help="Print summary.json instead of a table.")]
Quiet = Annotated[bool, result_flag("--quiet", help="No progress, only the result.")]
Web = Annotated[bool, _page("--web", help="Start, stop and watch runs in a browser.")]
WebPort = Annotated[int, _page(metavar="PORT", min=1, max=65_535, help="The port of that page.")]
MetricsUrl = Annotated[
    list[str] | None,
    _metrics(metavar="URL", help="Its metrics page, if not URL/metrics. Repeatable."),
]
GpuMetricsUrl = Annotated[
    str | None,
    _metrics(metavar="URL", help="A DCGM exporter's page. Default: NVML, if the server is here."),
]
NoScrape = Annotated[
    bool,
    _metrics("--no-scrape", help="Read /metrics only before and after the load, not during it."),
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
    """Measure the bundled engine here, and write a report: begin here.

    It starts the bundled engine (on CUDA if there is a GPU, else on the CPU), lets
    users walk away, sends a few probes, and shows what that cost. It takes about a minute.

    Example: walkaway demo --set run.users=16
    """
    from harness.commands.run_and_show import run_and_show
    from harness.http_client import typed_command
    from harness.run.run_config import RunConfig

    config = RunConfig(
        workload=DEMO,
        settings=settings or [],
        out=out,
        has_scraping=not no_scrape,
        has_probe_phase=True,
        command=typed_command([]),
    )
    run_and_show(config, as_json=as_json, quiet=quiet, shows_all=shows_all)


def run(  # noqa: PLR0913  one argument a flag
    *,
    workload: WorkloadName = DEMO,
    target: Target = None,
    engine: Engine = None,
    model: Model = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    ca_file: CaFile = None,
    yes_load_this_host: YesLoadThisHost = False,
    settings: Setting = None,
    request_cancellation_rate: CancellationRate = None,
    request_cancellation_delay: CancellationDelay = None,
    processes: Processes = None,
    rounds: Rounds = None,
    out: Out = None,
    gate: Gate = False,
    junit: Junit = None,
    markdown: Markdown = None,
    shows_all: All = False,
    as_json: Json = False,
    quiet: Quiet = False,
    web: Web = False,
    web_port: WebPort = 8089,
    metrics_url: MetricsUrl = None,
    gpu_metrics_url: GpuMetricsUrl = None,
    no_scrape: NoScrape = False,
) -> None:
    """Run a workload against a server, and write a report.

    WORKLOAD is a shipped name (see `walkaway workloads`) or the path of a TOML file; without one it
    is `demo`, with a few probes after its load. The server is the bundled engine, or any that
    speaks OpenAI's dialect.

    Example: walkaway run --target http://127.0.0.1:8000
    """
    from harness.commands.run_and_show import (
        GateReports,
        cancellation_settings,
        rounds_settings,
        run_and_show,
    )
    from harness.http_client import check_ca_file, parse_headers, typed_command
    from harness.run.recognition import OWN, with_kind
    from harness.run.run_config import RunConfig

    gpu_url = gpu_metrics_url
    of_gpus = [] if gpu_url is None else [f"collect.gpu_metrics_url={json.dumps(gpu_url)}"]
    of_processes = [] if processes is None else [f"run.processes={processes}"]
    of_cancellation = cancellation_settings(
        workload, rate=request_cancellation_rate, delay_s=request_cancellation_delay
    )
    config = RunConfig(
        workload=workload,
        settings=[
            *(settings or []),
            *of_gpus,
            *of_processes,
            *of_cancellation,
            *rounds_settings(workload, settings or [], rounds),
        ],
        target_url=target,
        engine=engine or OWN,
        model=model,
        metrics_urls=metrics_url or [],
        api_key_env=api_key_env,
        headers=parse_headers(header or []),
        ca_file=check_ca_file(ca_file),
        loads_any_host=yes_load_this_host,
        out=out,
        has_scraping=not no_scrape,
        has_probe_phase=workload == DEMO,
        command=[*typed_variables(), *typed_command(header or [])],
    )
    reports = GateReports.asked(gates=gate, junit=junit, markdown=markdown)
    config = with_kind(config) if engine is None else config
    if web:
        from harness.commands.web import serve_page

        if as_json or shows_all or gate:
            flag = "--json" if as_json else "--all" if shows_all else "--gate"
            raise ConfigError(
                f"{flag}: is not for --web, whose runs show their results in the page"
            )
        raise typer.Exit(serve_page(config, port=web_port))
    run_and_show(config, as_json=as_json, quiet=quiet, shows_all=shows_all, gate=reports)
