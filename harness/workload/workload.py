"""Workloads, and how they and targets are found and read; docs/workloads.md explains each key."""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, model_validator

from harness.errors import ConfigError, did_you_mean
from harness.records import Delivery, ProcessKind, Protocol, Way
from harness.workload.abandon import StayPlan, TaskPlan, TimePlan, ToolCallPlan
from harness.workload.arrivals import (
    AnyArrivals,
    ClosedArrivals,
    OpenArrivals,
    Rate,
    RateArrivals,
    arrivals_problem,
)
from harness.workload.cluster import ClusterSettings
from harness.workload.load import AbandonLoad, AnyLoad
from harness.workload.target import Target
from harness.workload.toml_file import apply_settings, read_toml, validate
from harness.workload.values import (
    LARGEST_INT,
    MOST_SLOTS,
    MOST_TOKENS,
    Blocks,
    Count,
    Device,
    Duration,
    Milliseconds,
    Name,
    ScrapeInterval,
    Seconds,
    Seed,
    Share,
    Size,
    Slots,
    Streams,
    Tokens,
    TomlTable,
)

MOST_LOOPS: Final = 1000
MOST_PROCESSES: Final = 256
SHIPPED_WORKLOADS: Final = "workloads"
SHIPPED_TARGETS: Final = "harness.targets"
_LISTED_BY: Final = {
    SHIPPED_WORKLOADS: "walkaway workloads",
    SHIPPED_TARGETS: "walkaway targets",
}
# More is probably a typing mistake; `run.most_streams` and `run.most_rate` raise these.
USUAL_STREAMS: Final = 10_000
USUAL_RATE: Final = 10_000.0
_STREAM_COSTS: Final = (
    "each takes a file handle and some 20 KiB of memory in its load process, and 25 bytes for each "
    "token of its answer"
)
_OF_GRPC: Final = ("grpc", "tritonclient")
_RATE_COSTS: Final = "each takes a port of this host, which may be free again only a minute after"


class GateSettings(TomlTable):
    limits: list[str] = Field(default_factory=list)
    noise: Annotated[float, Field(gt=0, le=10)] = 0.1
    min_abandons: Annotated[int, Field(ge=0, le=LARGEST_INT)] = 100


class ValueSettings(TomlTable):
    """`[value]`: the worth of cancellation, from an arm that honours it and one that ignores it."""

    honoured: Name
    ignored: Name
    price_per_million_tokens: Annotated[float, Field(ge=0, le=1e9)] | None = None
    assumed_ms_per_token: Milliseconds = 20.0


class RunSettings(TomlTable):
    seed: Seed = 0
    processes: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] = 1
    rounds: Count = 1
    loops: Annotated[int, Field(ge=1, le=MOST_LOOPS)] = 1
    reference_arm: str | None = None
    users: Streams
    most_streams: Streams = USUAL_STREAMS
    most_rate: Rate = USUAL_RATE
    max_seconds: Duration
    timeout_s: Duration = 60.0
    connect_timeout_s: Duration | None = None
    first_token_timeout_s: Duration | None = None
    total_timeout_s: Duration | None = None
    keep_alive: bool = False


class EngineSettings(TomlTable):
    runner: Literal["auto", "torch", "simulated"] = "auto"
    device: Device = "auto"
    model: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    seed: Seed | None = None
    max_num_seqs: Slots | None = None
    num_blocks: Blocks | None = None
    kv_cache_memory: Size | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    block_size: Tokens | None = None
    max_model_len: Tokens | None = None
    max_num_batched_tokens: Tokens | None = None
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    victim: Literal["policy", "rebuild-cost"] | None = None
    preemption: Literal["recompute", "swap"] | None = None
    swap_space_blocks: Blocks | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    max_num_partial_prefills: Annotated[int, Field(ge=0, le=MOST_SLOTS)] | None = None
    watermark: Annotated[float, Field(ge=0, lt=1)] | None = None
    reserve_full_isl: bool | None = None
    enable_prefix_caching: bool | None = None
    reclaim: Literal["immediate", "retain"] | None = None
    force_reclaim_above: Share | None = None
    batch_invariant: bool | None = None
    async_scheduling: bool | None = None
    compile: bool | None = None
    sim_fixed_ms: Milliseconds | None = None
    sim_prefill_token_ms: Milliseconds | None = None
    sim_decode_token_ms: Milliseconds | None = None
    sim_context_token_ms: Milliseconds | None = None
    sim_swap_block_ms: Milliseconds | None = None
    frontends: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] = 1
    workers: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] = 1
    disaggregated: bool = False
    migrate: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    faults: list[str] = Field(default_factory=list)
    allow_faults: bool = False

    @property
    def has_tiers(self) -> bool:
        """Frontends and workers are processes of their own, any number of each."""
        return self.frontends > 1 or self.workers > 1 or self.disaggregated

    def num_of(self, kind: ProcessKind) -> int:
        return self.frontends if kind == "frontend" else self.workers

    def name_of(self, kind: ProcessKind, index: int) -> str:
        """Decode workers come before their prefill workers."""
        if kind == "frontend" or not self.disaggregated:
            return f"{kind}-{index}"
        tier = "decode" if index < self.workers else "prefill"
        return f"{tier}-{index % self.workers}"


class SettleSettings(TomlTable):
    """`[settle]`: the wait for the server after the load, instead of the target's."""

    seconds: Seconds | None = None
    silence_seconds: Seconds | None = None
    steps: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None


class CollectSettings(TomlTable):
    scrape_interval_s: ScrapeInterval | None = None
    scrape: bool = True
    exact: bool = True
    gpu_metrics_url: Annotated[str, Field(min_length=1)] | None = None


class ArmTarget(TomlTable):
    """`[arms.target]`: the server of this arm. Absent keys come from the command line, except the
    metrics pages (`--header` holds for all servers)."""

    url: Annotated[str, Field(min_length=1)] | None = None
    command: Annotated[str, Field(min_length=1)] | None = None
    ready_s: Annotated[float, Field(gt=0)] = 600.0
    engine: str | None = None
    model: str | None = None
    metrics_urls: list[str] = Field(default_factory=list)
    api_key_env: str | None = None
    ca_file: str | None = None

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise ValueError("needs either a `url` or a `command`")
        return self

    @property
    def place(self) -> str:
        return self.url or f"`{self.command}`"


class ArmSettings(TomlTable):
    """`[[arms]]`: a variant of the workload. Its values are checked when the arm is resolved
    (`harness.workload.arms`)."""

    name: Name
    target: ArmTarget | None = None
    engine: dict[str, Any] = Field(default_factory=dict)
    load: dict[str, Any] = Field(default_factory=dict)
    arrivals: dict[str, Any] = Field(default_factory=dict)
    collect: dict[str, Any] = Field(default_factory=dict)


class Workload(TomlTable):
    name: Name
    question: Annotated[str, Field(min_length=1)]
    run: RunSettings
    load: AnyLoad
    arrivals: AnyArrivals = ClosedArrivals()
    engine: EngineSettings = EngineSettings()
    settle: SettleSettings = SettleSettings()
    collect: CollectSettings = CollectSettings()
    simulate: ClusterSettings | None = None
    headlines: list[str] = Field(default_factory=list)
    arms: list[ArmSettings] = Field(default_factory=list)
    value: ValueSettings | None = None
    gate: GateSettings = GateSettings()

    @model_validator(mode="after")
    def _must_hold_together(self) -> Self:
        for why in chain(self._arms_problems(), self._load_problems(), self._processes_problems()):
            raise ValueError(why)
        return self

    def _arms_problems(self) -> Iterator[str]:
        names = [arm.name for arm in self.arms]
        listed = f"but the arms are: {', '.join(names) or 'none'}"
        if twice := {name for name in names if names.count(name) > 1}:
            yield f"two of the `arms` are named {sorted(twice)[0]!r}"
        if not names and self.run.rounds > 1:
            yield (
                f"`run.rounds` is {self.run.rounds}, but there are no `[[arms]]`; one is enough: "
                "--set 'arms=[{name=\"build\"}]'"
            )
        reference, value = self.run.reference_arm, self.value
        if reference is not None and reference not in names:
            yield f"`run.reference_arm` is {reference!r}, {listed}"
        if value is not None and not {value.honoured, value.ignored} <= set(names):
            yield f"`value` compares the arms {value.honoured!r} and {value.ignored!r}, {listed}"

    def _load_problems(self) -> Iterator[str]:
        limit_s, most = self.run.max_seconds, self.run.most_streams
        is_simulated = self.simulate is not None
        if why := arrivals_problem(
            self.arrivals, self.load, max_seconds=limit_s, is_simulated=is_simulated
        ):
            yield why
        keys, streams = self._streams_at_once()
        if streams > most:
            yield (
                f"{keys} come to {streams:,} streams at once, more than `run.most_streams`, "
                f"{most:,}; --set run.most_streams={streams} raises it: {_STREAM_COSTS}"
            )
        if isinstance(self.arrivals, RateArrivals):
            rate = self.arrivals.highest_rate
            if rate > self.run.most_rate:
                yield rate_problem(rate, self.run.most_rate)
        if not isinstance(self.load, AbandonLoad):
            return
        if (kind := self.load.kill) is not None and self.engine.num_of(kind) < 2:
            yield (
                f"`load.kill` is {kind!r}, but `engine.{kind}s` is 1: with 2 or more, another one "
                "serves until the killed one is back"
            )
        for plan in self.load.leavers:
            if isinstance(plan, TimePlan) and plan.seconds[1] >= limit_s:
                yield (
                    f"plan `time`: leaves {plan.seconds[1]:g} s after `{plan.since}`, but "
                    f"`run.max_seconds` is {limit_s:g}: the run would be over before"
                )

    def _processes_problems(self) -> Iterator[str]:
        processes = self.run.processes
        if processes == 1:
            return
        begin = f"`run.processes` is {processes}, but "
        if not isinstance(self.load, AbandonLoad):
            yield f"{begin}a load of kind {self.load.kind!r} is directed from one process; take 1"
        elif self.load.canaries:
            yield (
                f"{begin}`load.canaries` learn their answers one after the other, which takes one "
                "process; take 1"
            )
        if isinstance(self.arrivals, ClosedArrivals) and self.run.users < processes:
            yield f"{begin}there are only {self.run.users} `run.users` to share out"

    @property
    def streams_of_each_process(self) -> int:
        _, streams = self._streams_at_once()
        return -(-streams // self.run.processes)

    def _streams_at_once(self) -> tuple[str, int]:
        if isinstance(self.arrivals, OpenArrivals):
            return "`arrivals.max_streams`", self.arrivals.max_streams
        return self.load.streams_at_once(self.run.users)


def rate_problem(rate: float, most_rate: float) -> str:
    return (
        f"`arrivals` bring up to {rate:,.0f} requests a second, more than `run.most_rate`, "
        f"{most_rate:,.0f}; --set run.most_rate={rate:.0f} raises it: {_RATE_COSTS}"
    )


def choose_protocol(workload: Workload, target: Target) -> Protocol:
    """Raises ConfigError for what the target or the protocol cannot do."""
    protocol = workload.load.protocol or target.protocol
    why = why_unspoken(protocol, target)
    if why is None and protocol is Protocol.GRPC:
        why = next(_problems_over_grpc(workload), None)
    why = why or next(_problems_of_ways(workload.load, protocol), None)
    if why is not None:
        raise ConfigError(f"workload {workload.name}, over {protocol}: {why}")
    return protocol


def why_unspoken(protocol: Protocol, target: Target) -> str | None:
    """Why the client cannot speak it with a server of this kind; None if it can."""
    if not (target.http if protocol is Protocol.HTTP else target.kserve is not None):
        return (
            f"the file of target {target.name} does not say how to speak {protocol} with it; "
            "leave out `load.protocol` (also of an arm), or take another --engine"
        )
    missing = [package for package in _OF_GRPC if find_spec(package) is None]
    if protocol is Protocol.GRPC and missing:
        return (
            f"the package {' and '.join(missing)} is not installed; install it with: "
            "pip install 'walkaway[grpc]'"
        )
    return None


def _problems_over_grpc(workload: Workload) -> Iterator[str]:
    load = workload.load
    if workload.run.keep_alive:
        yield "`run.keep_alive` has no meaning, since all calls of a process share a channel"
    if not isinstance(load, AbandonLoad):
        return
    if load.canaries:
        yield "`load.canaries` need the most likely tokens, which no input asks for; take 0"
    if load.session is not None:
        yield "`load.session` needs a dialect with messages, which KServe has not"
    for plan in load.leavers:
        if isinstance(plan, ToolCallPlan):
            yield "plan `tool_call`: no output of a model says that it is a call"
        if (
            plan.delivery is Delivery.UNARY
            or max(plan.n, plan.documents) > 1
            or isinstance(plan, TaskPlan)
        ):
            yield (
                f"plan `{plan.plan}`: each request is one streamed answer, without `task`, `n` and "
                "`documents`"
            )


def _problems_of_ways(load: AnyLoad, protocol: Protocol) -> Iterator[str]:
    leavers = load.leavers if isinstance(load, AbandonLoad) else ()
    for plan in leavers:
        if isinstance(plan, StayPlan):
            continue
        if plan.way.over(protocol) is None:
            ways = ", ".join(way for way in Way if way.over(protocol) is way)
            yield f"no user can leave by `{plan.way}`; there are: {ways}"
        if plan.way is Way.DEADLINE and not plan.counts_from_sending:
            yield (
                f"plan `{plan.plan}`: a deadline is set as the request is sent, so it takes a plan "
                "whose moment is known then: `time` (since the sending) or `prefill`"
            )


def load_workload(name_or_path: str, settings: Sequence[str] = ()) -> Workload:
    path = find_file(name_or_path, package=SHIPPED_WORKLOADS, noun="workload")
    data = apply_settings({"name": name_of(path), **read_toml(path)}, settings)
    return validate(Workload, data, source=str(path), settings=settings)


def load_target(name_or_path: str) -> Target:
    path = find_file(name_or_path, package=SHIPPED_TARGETS, noun="engine")
    return validate(Target, {"name": path.stem, **read_toml(path)}, source=str(path))


def name_of(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("._-") or "workload"


def shipped(package: str) -> dict[str, Path]:
    folder = Path(str(files(package)))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_file(name_or_path: str, *, package: str, noun: str) -> Path:
    known = shipped(package)
    if name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name the {noun}'s TOML file in it")
    listed = f"shipped are {', '.join(known)}"
    if package in _LISTED_BY:
        listed = f"`{_LISTED_BY[package]}` lists all"
    raise ConfigError(
        f"unknown {noun} `{name_or_path}`: neither a file nor a shipped {noun}"
        f"{did_you_mean(name_or_path, known) or ';'} {listed}"
    )


def as_plain_data(section: BaseModel) -> dict[str, Any]:
    return section.model_dump(mode="json")
