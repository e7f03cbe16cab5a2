"""A run's configuration: the flags as typed; resolved, with files read and flags checked; and the
load plan made from it.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

import httpx

from harness.errors import ConfigError
from harness.http_client import (
    check_ca_file,
    check_metrics_url,
    check_target_url,
    http_client,
    request_headers,
)
from harness.place import Place, check_host
from harness.records import Protocol
from harness.run.load_plan import (
    check_files,
    check_trace,
    fit_to_trace,
    make_load,
)
from harness.run.server import Server, parse_command
from harness.run.settle import settle_seconds
from harness.workload.arms import ArmRun, arm_runs, check_engine_is_ours
from harness.workload.arrivals import TraceArrivals
from harness.workload.plan import ONLY_ARM, LoadPlan
from harness.workload.target import Target
from harness.workload.workload import (
    SHIPPED_WORKLOADS,
    ArmTarget,
    Workload,
    choose_protocol,
    find_file,
    load_target,
    load_workload,
)

SEED_KEY: Final = "run.seed="

PROBE_PHASE: Final = ("run.max_seconds=6", "run.timeout_s=5")

# The interval for an unknown kind of server: rare enough to disturb none.
UNKNOWN_SCRAPE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What a user typed about a server and its result, for any command. `recognised`: by what the
    kind `engine` was recognised, where it was not typed. `loads_any_host`: loopback or not."""

    target_url: str | None = None
    engine: str = "reference"
    recognised: str = ""
    model: str | None = None
    metrics_urls: list[str] = field(default_factory=list)
    api_key_env: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ca_file: str | None = None
    loads_any_host: bool = False
    out: Path | None = None
    command: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the server is reached: flags, checked. `url` None: it is started. `headers` includes the
    API key's. `place`: of the server at `url`, for everything that is sent to it."""

    target: Target
    url: str | None
    place: Place | None
    metrics_urls: list[str]
    headers: dict[str, str]
    ca_file: str | None

    @classmethod
    def of(cls, target: Target, config: ServerConfig) -> Self:
        """Raises ConfigError."""
        url = None if config.target_url is None else _check_url(config.target_url, target)
        return cls(
            target=target,
            url=url,
            place=None if url is None else check_host(url, is_allowed=config.loads_any_host),
            metrics_urls=[check_metrics_url(url) for url in config.metrics_urls],
            headers=request_headers(config.headers, config.api_key_env),
            ca_file=config.ca_file,
        )

    def new_client(self, timeout_s: float, *, longest_s: float) -> httpx.Client:
        return http_client(
            self.headers,
            ca_file=self.ca_file,
            timeout_s=timeout_s,
            longest_s=longest_s,
            place=self.place,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(ServerConfig):
    """One `walkaway run`, as typed.

    Without `target_url` the run starts a server: an arm's own `target_command`, which must serve
    within `ready_s` seconds, else the bundled engine.
    """

    workload: str
    settings: list[str] = field(default_factory=list)
    target_command: list[str] | None = None
    ready_s: float = 0.0
    has_scraping: bool = True
    has_probe_phase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A run with its files read and its flags checked.

    `arm_runs` are the runs of a workload with arms, in order; `for_arm` resolves each. Paths in the
    workload are relative to `folder`. `probe_phase` runs on the same server after this run.
    """

    config: RunConfig
    workload: Workload
    access: Access
    folder: Path
    arm: str = ONLY_ARM
    arm_runs: Sequence[ArmRun] = ()
    probe_phase: "ResolvedRun | None" = None

    @property
    def target(self) -> Target:
        return self.access.target

    @property
    def url(self) -> str | None:
        return self.access.url

    @property
    def place(self) -> Place | None:
        return self.access.place

    @property
    def metrics_urls(self) -> list[str]:
        return self.access.metrics_urls

    @property
    def headers(self) -> dict[str, str]:
        return self.access.headers

    def with_target(self, target: Target) -> "ResolvedRun":
        return replace(self, access=replace(self.access, target=target))

    def for_arm(self, run: ArmRun, *, out: Path) -> "ResolvedRun":
        config = _config_for(replace(self.config, out=out), run.target)
        return _resolve(config, run.workload, self.folder, arm=run.arm)

    @property
    def scrape_interval_s(self) -> float | None:
        if not self.config.has_scraping or not self.workload.collect.scrape:
            return None
        chosen = self.workload.collect.scrape_interval_s or self.target.scrape_interval_s
        if chosen is None and self.metrics_urls:
            return UNKNOWN_SCRAPE_INTERVAL_S
        return chosen


def resolve_run(config: RunConfig, *, simulates: bool = False) -> ResolvedRun:
    """Read and check everything that needs no server. Raises ConfigError."""
    workload = load_workload(config.workload, config.settings)
    if workload.simulate is not None and not simulates:
        raise ConfigError(
            f"workload {workload.name} has a section [simulate]: its replicas and outages are only "
            f"simulated; take walkaway simulate {config.workload}"
        )
    folder = find_file(config.workload, package=SHIPPED_WORKLOADS, noun="workload").parent
    runs = arm_runs(workload, source=config.workload, settings=config.settings)
    check_engine_is_ours(workload, config.settings, target_url=config.target_url)
    if workload.gate.limits:
        from harness.gate.limits import parse_limits

        arms = [arm.name for arm in workload.arms]
        parse_limits(workload.gate.limits, source=f"{config.workload}: [gate]", arms=arms)
    for run in runs:
        try:
            _resolve(_config_for(config, run.target), run.workload, folder, arm=run.arm)
        except ConfigError as error:
            if run.target is None:
                raise
            raise ConfigError(f"{config.workload}, arm `{run.arm}`: {error}") from error
    # If every arm has its own server, the first stands for the whole.
    first = runs[0].target if runs and all(run.target for run in runs) else None
    whole = _resolve(_config_for(config, first), workload, folder)
    probe_phase = _probe_phase(config, workload) if config.has_probe_phase else None
    return replace(whole, arm_runs=runs, probe_phase=probe_phase)


def _probe_phase(config: RunConfig, after: Workload) -> ResolvedRun:
    settings = [*PROBE_PHASE, f"{SEED_KEY}{after.run.seed}"]
    workload = load_workload("slot_recovery", settings)
    folder = find_file("slot_recovery", package=SHIPPED_WORKLOADS, noun="workload").parent
    return _resolve(replace(config, workload="slot_recovery", settings=settings), workload, folder)


def _resolve(
    config: RunConfig, workload: Workload, folder: Path, *, arm: str = ONLY_ARM
) -> ResolvedRun:
    is_named = config.target_url is not None or config.target_command is not None
    target = find_target(config.engine, is_named=is_named)
    if config.target_command is not None and not target.http:
        raise ConfigError(
            f"target.command: a server of kind {target.name} cannot be started by a run, which "
            "asks over HTTP whether it is ready: start it yourself, and name its url"
        )
    choose_protocol(workload, target)
    check_files(workload, folder)
    check_trace(workload, folder)
    if (gpu_url := workload.collect.gpu_metrics_url) is not None:
        check_metrics_url(gpu_url, flag="--gpu-metrics-url")
    access = Access.of(target, config)
    return ResolvedRun(config=config, workload=workload, access=access, folder=folder, arm=arm)


def find_target(engine: str, *, is_named: bool) -> Target:
    """Raises ConfigError also if no server is named, and this kind is not started by us."""
    target = load_target(engine)
    if not is_named and not target.lifecycle:
        raise ConfigError(
            f"--engine {engine} needs --target URL: only the bundled engine is started"
        )
    return target


def _check_url(url: str, target: Target) -> str:
    schemes = ("http", "https") if target.http else ("grpc", "grpcs")
    return check_target_url(url, schemes=schemes)


def _config_for(config: RunConfig, target: ArmTarget | None) -> RunConfig:
    if target is None:
        return config
    return replace(
        config,
        target_url=target.url,
        target_command=None if target.command is None else parse_command(target.command),
        ready_s=target.ready_s,
        engine=target.engine or config.engine,
        model=target.model or config.model,
        metrics_urls=target.metrics_urls,
        api_key_env=target.api_key_env or config.api_key_env,
        ca_file=check_ca_file(target.ca_file) or config.ca_file,
    )


def make_load_plan(resolved: ResolvedRun, server: Server, *, rows_dir: Path) -> LoadPlan:
    workload, target = resolved.workload, resolved.target
    _check_context(workload, server)
    load = make_load(workload, target, server, resolved.folder)
    load, arrivals = fit_to_trace(workload, load, server, resolved.folder)
    protocol = choose_protocol(workload, target)
    urls = server.urls if protocol is Protocol.HTTP else server.kserve_urls
    return LoadPlan(
        url=urls[0],
        urls=urls if len(urls) > 1 else [],
        address=server.address,
        model=server.model,
        target=target.model_copy(
            update={
                "settle_s": settle_seconds(target, workload.settle, None),
                "settle_steps": target.settle_steps
                if workload.settle.steps is None
                else workload.settle.steps,
            }
        ),
        run=workload.run,
        load=load,
        protocol=protocol,
        arrivals=arrivals,
        arm=resolved.arm,
        api_key_env=resolved.config.api_key_env,
        headers=resolved.config.headers,
        ca_file=resolved.config.ca_file,
        rows_dir=str(rows_dir.resolve()),
        left_open_outlive=True,
    )


def _check_context(workload: Workload, server: Server) -> None:
    """Refuse requests that are longer than the server's context. Traces are fitted to it."""
    if server.context is None or isinstance(workload.arrivals, TraceArrivals):
        return
    for keys, longest in workload.load.longest_requests.items():
        if longest > server.context:
            raise ConfigError(
                f"workload {workload.name}: {keys} go up to {longest} tokens, but the server's "
                f"context holds {server.context}; make them smaller"
            )


def repeat_command(command: Sequence[str], *, seed: int) -> str:
    """A shell line that repeats the run in a new folder; "" if nothing was typed.

    It names the seed, so a later change of the workload's seed does not matter. Hidden values of
    headers (`***`) must be filled in again.
    """
    if not command:
        return ""
    kept = list(_without_folder(command))
    has_seed = any(argument.removeprefix("--set=").startswith(SEED_KEY) for argument in kept)
    return shlex.join(kept if has_seed else [*kept, "--set", f"{SEED_KEY}{seed}"])


def _without_folder(command: Sequence[str]) -> Iterator[str]:
    arguments = iter(command)
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            yield argument
