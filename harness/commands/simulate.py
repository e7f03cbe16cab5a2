"""`walkaway simulate`: a workload in virtual time."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer

from harness.commands.app import workload_names
from harness.commands.run import All, Json, Out, Quiet, Setting
from harness.errors import ConfigError, did_you_mean

_cluster = partial(typer.Option, rich_help_panel="The machines")
_capacity = partial(typer.Option, rich_help_panel="For capacity")
_computing = partial(typer.Option, rich_help_panel="The computing")
MachineName = Annotated[
    str | None,
    _cluster(
        "--machine",
        metavar="NAME|FILE",
        help="The cost of a step: a shipped machine, or a file of `walkaway calibrate`.",
    ),
]
Replicas = Annotated[
    int | None, _cluster(metavar="N", min=1, help="Share the load between N engines. Default 1.")
]
SimulatedReplicas = Annotated[
    int | None,
    _cluster(
        "--simulated", metavar="K", min=1, help="Simulate only K of them, with their part of it."
    ),
]
Router = Annotated[
    str | None,
    _cluster(metavar="NAME", help="Before them: random, round_robin, least_loaded, prefix_affine."),
]
Processes = Annotated[
    int | None, _computing(metavar="N", min=1, help="Compute in N processes. Default 1.")
]
Rate = Annotated[
    float | None,
    _capacity(metavar="R", min=0.001, help="Requests a second. Default: the workload's."),
]
Late = Annotated[
    float | None, _capacity(metavar="S", min=0.001, help="How late an abort comes. Default 5.")
]
PriceHour = Annotated[
    float | None, _capacity(metavar="P", min=0, help="Of a GPU, for money a month.")
]
Ray = Annotated[
    str | None,
    _computing(
        metavar="ADDRESS", help="Compute on a Ray cluster: its address; local: start one here."
    ),
]


def simulate(  # noqa: PLR0913  one argument a flag
    *,
    workload: Annotated[
        str, typer.Argument(metavar="WORKLOAD|capacity", hidden=True, autocompletion=workload_names)
    ],
    of_capacity: Annotated[str | None, typer.Argument(metavar="WORKLOAD", hidden=True)] = None,
    settings: Setting = None,
    machine: MachineName = None,
    replicas: Replicas = None,
    simulated: SimulatedReplicas = None,
    router: Router = None,
    rate: Rate = None,
    late: Late = None,
    price_hour: PriceHour = None,
    out: Out = None,
    shows_all: All = False,
    as_json: Json = False,
    quiet: Quiet = False,
    processes: Processes = None,
    ray: Ray = None,
) -> None:
    """Run a workload in virtual time and write a report.

    WORKLOAD is a shipped name (see `walkaway workloads`) or the path of a TOML file. The bundled
    engine's own scheduler decides each step; a cost model says how long the step takes.

    `walkaway simulate capacity WORKLOAD` finds how many replicas its rate needs, if cancellation is
    honoured, comes late, or is ignored: GPUs and money, on a page of their own.

    Example: walkaway simulate cluster --processes 2
    """

    from harness.commands.run_and_show import show_finished
    from harness.http_client import typed_command
    from harness.run.process import Interruption
    from harness.run.progress import ProgressConsole, choose_progress
    from harness.run.run_config import RunConfig
    from harness.simulate.simulation import Computing, resolve_simulation, simulate_all

    if ray is not None and processes is not None:
        raise ConfigError("--ray and --processes: the cells are computed here or there, not both")
    computing = Computing(processes=processes or 1, ray=ray)
    chosen = {"machine": machine, "replicas": replicas, "simulated": simulated, "router": router}
    flags = [f"simulate.{key}={json.dumps(one)}" for key, one in chosen.items() if one is not None]
    if workload == "capacity" and of_capacity is None:
        raise ConfigError("simulate capacity: name a workload (walkaway workloads lists them)")
    config = RunConfig(
        workload=of_capacity or workload,
        settings=[*(settings or []), *flags],
        out=out,
        has_scraping=False,
        command=typed_command([]),
    )
    question = {"--rate": rate, "--late": late, "--price-hour": price_hour}
    if workload == "capacity":
        from harness.commands.capacity import show_capacity

        others = {"--all": shows_all or None, "--ray": ray}
        _refuse_idle_flags(others | {f"--{key}": one for key, one in chosen.items()})
        show_capacity(config, question, computing.processes, as_json=as_json, quiet=quiet)
        return
    if only := [flag for flag, one in question.items() if one is not None]:
        raise ConfigError(f"{only[0]}: is for walkaway simulate capacity WORKLOAD")
    if of_capacity is not None:
        near = did_you_mean(workload, ["capacity"])
        raise ConfigError(
            f"simulate {workload} {of_capacity}: one workload, or capacity before it{near}"
        )
    progress = choose_progress(ProgressConsole(), is_quiet=quiet)
    resolved = resolve_simulation(config)
    with Interruption() as interruption:
        finished = simulate_all(
            resolved, progress=progress, interruption=interruption, computing=computing
        )
    show_finished(
        finished, is_interrupted=interruption.requested, as_json=as_json, shows_all=shows_all
    )


def _refuse_idle_flags(flags: Mapping[str, object]) -> None:
    """Flags that capacity has no use for; the machine is for it, too."""
    for flag, one in flags.items():
        if one is not None and flag != "--machine":
            raise ConfigError(
                f"{flag}: is not for walkaway simulate capacity, which simulates one replica at a "
                "time at rates of its own, over --processes here"
            )
