"""Machines: the length of a step as data, and where each figure comes from.

A machine is a TOML file, shipped by name or given as a path; docs/machines.md explains each key and
each figure. A step takes

    fixed_s + prefill_token_s * prefill tokens + decode_token_s * decode tokens
            + context_token_s * tokens of context read + swap_block_s * blocks copied

as in the engine's simulated runner. The lags are the times that processes and messages take in
addition to the steps, each a list of equally spaced quantiles.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from harness.errors import ConfigError
from harness.workload.toml_file import read_toml, validate
from harness.workload.values import Blocks, Count, Slots, Tokens, TomlTable
from harness.workload.workload import find_file

SHIPPED_MACHINES: Final = "harness.machines"
LIVE_SIMULATED: Final = "live-simulated"  # the bundled engine's simulated runner, measured
SIMULATED_STEP_S: Final = 0.02  # the simulated runner's own default
LONGEST_TERM_S: Final = 60.0
MOST_QUANTILES: Final = 1001

Kind = Literal["floor", "published", "measured", "assumed"]
Term = Annotated[float, Field(ge=0, le=LONGEST_TERM_S)]


def _ascending(values: list[float]) -> list[float]:
    if values != sorted(values):
        raise ValueError("quantiles must ascend")
    return values


Quantiles = Annotated[
    list[Term],
    Field(min_length=2, max_length=MOST_QUANTILES),
    AfterValidator(_ascending),
]
Span = Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)]


class Cost(TomlTable):
    """Seconds. Each term must be stated, 0 too: a forgotten one would be free."""

    fixed_s: Annotated[float, Field(gt=0, le=LONGEST_TERM_S)]
    prefill_token_s: Term
    decode_token_s: Term
    context_token_s: Term
    swap_block_s: Term

    def step_s(self, *, prefill: float, decode: float, context: float) -> float:
        tokens_s = self.prefill_token_s * prefill + self.decode_token_s * decode
        return self.fixed_s + tokens_s + self.context_token_s * context


class Covered(TomlTable):
    """The least and the most that the figures rest on; beyond it a step is extrapolated."""

    running: Span | None = None
    batched_tokens: Span | None = None
    context_tokens: Span | None = None

    def beyond(self, ranges: Mapping[str, tuple[float, float]]) -> list[str]:
        """The keys of `ranges` (least and most of each) that lie outside, as text."""
        found = []
        for name, (least, most) in ranges.items():
            span: list[float] | None = getattr(self, name)
            if span is not None and (least < span[0] or most > span[1]):
                covered = f"covers {span[0]:g} to {span[1]:g}"
                found.append(f"{name} {least:g} to {most:g}, where the cost model {covered}")
        return found


class EngineDefaults(TomlTable):
    """An engine's settings that fit this machine."""

    max_num_seqs: Slots | None = None
    num_blocks: Blocks | None = None
    block_size: Tokens | None = None
    max_num_batched_tokens: Tokens | None = None
    max_model_len: Tokens | None = None


GrowthShare = Annotated[float, Field(ge=0, le=1000)]


class Growth(TomlTable):
    """The share by which a lag grows: `deliver_s` with each token that its step sampled,
    `detect_s`, `between_s` and `schedule_s` with each request that runs, and `schedule_s` with each
    token of the prompts admitted to its step, too. More than `up_to` requests or tokens of a step
    count as `up_to`: more were not measured.
    """

    between_request: GrowthShare = 0.0
    detect_request: GrowthShare = 0.0
    deliver_token: GrowthShare = 0.0
    schedule_request: GrowthShare = 0.0
    schedule_prompt_token: GrowthShare = 0.0
    up_to: Annotated[int, Field(ge=1)] = 1_000_000

    def times(self, share: float, requests: int) -> float:
        return 1 + share * min(requests, self.up_to)


class Lags(TomlTable):
    """`send_s`: the client sends → the worker hears. `deliver_s`: a step ends → the client reads
    its token. `detect_s`, by way of leaving: t0 → the frontend sees it. `signal_s`: from there to
    the worker. `step_s`: what a step takes beyond its cost. `between_s`: its end → the next
    boundary. `schedule_s`: the part of a step's cost that passes until its schedule is made.
    `rest_s`: a user's request ends → its next one is sent, in a closed loop."""

    send_s: Quantiles
    deliver_s: Quantiles
    detect_s: Annotated[dict[str, Quantiles], Field(min_length=1)]
    signal_s: Quantiles
    step_s: Quantiles
    between_s: Quantiles
    schedule_s: Quantiles
    rest_s: Quantiles
    growth: Growth = Field(default_factory=Growth)


class FitError(TomlTable):
    """Relative errors of predicted against measured step lengths, by cross-validation: the mean of
    their sizes, the 99th percentile of these, and the signed mean."""

    n: Count
    mape: Annotated[float, Field(ge=0)]
    p99: Annotated[float, Field(ge=0)]
    bias: float


class SimulatedMachine(TomlTable):
    name: str
    title: Annotated[str, Field(min_length=1)]
    kind: Kind
    gpus: Annotated[int, Field(ge=0, le=1024)]
    gpu: str | None = None
    model: str | None = None
    sources: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    assumptions: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    adds_to_stated: bool = False  # the cost comes on top of what a workload's `sim_*` keys state
    cost: Cost
    range: Covered = Field(default_factory=Covered)
    engine: EngineDefaults = Field(default_factory=EngineDefaults)
    lags_from: str | None = None  # another machine's
    lags: Lags | None = None
    error: FitError | None = None

    @model_validator(mode="after")
    def _says_whence(self) -> Self:
        if self.kind != "assumed" and not self.sources:
            raise ValueError(f'a machine of kind "{self.kind}" must name its `sources`')
        if self.kind == "measured" and self.error is None:
            raise ValueError('a machine of kind "measured" must state its [error]')
        return self

    def on_top_of(self, stated_s: Mapping[str, float], *, name: str) -> Self:
        """The workload's own cost of a step, with what this machine takes beyond it."""
        stated = {"fixed_s": SIMULATED_STEP_S, **stated_s}
        cost = {term: own + stated.get(term, 0.0) for term, own in self.cost.model_dump().items()}
        return self.model_copy(
            update={
                "name": name,
                "title": f"Steps as the workload states them (`engine.sim_*`), and {self.name}",
                "assumptions": ["a step takes as long as the workload says", *self.assumptions],
                "cost": Cost(**cost),
            }
        )


def load_machine(name_or_path: str) -> SimulatedMachine:
    """The machine with its lags, wherever they come from. Raises ConfigError."""
    path = find_file(name_or_path, package=SHIPPED_MACHINES, noun="machine")
    machine = validate(SimulatedMachine, {"name": path.stem, **read_toml(path)}, source=str(path))
    if (machine.lags is None) == (machine.lags_from is None):
        raise ConfigError(f"{path}: give either a section [lags] or `lags_from`, a machine's name")
    return machine if machine.lags_from is None else _with_lags(machine, path)


def _with_lags(machine: SimulatedMachine, path: Path) -> SimulatedMachine:
    assert machine.lags_from is not None
    giver = find_file(machine.lags_from, package=SHIPPED_MACHINES, noun="machine")
    lags = validate(
        SimulatedMachine, {"name": giver.stem, **read_toml(giver)}, source=str(giver)
    ).lags
    if lags is None:
        raise ConfigError(
            f"{path}: `lags_from`: {machine.lags_from} has no [lags] of its own; name one that has"
        )
    return machine.model_copy(update={"lags": lags})
