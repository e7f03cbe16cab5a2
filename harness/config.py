"""Workloads and targets: what to do, and how to speak to the server under test.

Both are TOML files, shipped by name or given as a path. They are read once, checked, and from then
on frozen; the resolved copy is saved with the run.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from harness.errors import ConfigError
from harness.toml_file import apply_settings, read_toml, validate

SHIPPED_WORKLOADS = "workloads"
SHIPPED_TARGETS = "harness.targets"

MetricRole = Literal[
    "running",
    "waiting",
    "free_blocks",
    "kv_usage",
    "generated_tokens",
    "prompt_tokens",
    "preemptions",
    "aborted",
    "recomputed_tokens",
]
Trust = Literal["exact", "exact_when_idle", "lower", "stuck"]

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0)]
Scalar = int | float | str | bool


def _parse_token_range(value: object) -> list[int]:
    match value:
        case [int(low), int(high)] if 1 <= low <= high:
            return [low, high]
        case _:
            raise ValueError(f"must be [lowest, highest] with 1 <= lowest <= highest, not {value}")


def _parse_think(value: object) -> str | float:
    match value:
        case "step" | "none":
            return str(value)
        case bool():
            pass
        case int() | float() if value >= 0:
            return float(value)
    raise ValueError(f'must be "step", "none" or a number of seconds >= 0, not {value!r}')


TokenRange = Annotated[list[int], PlainValidator(_parse_token_range)]
Think = Annotated[str | float, PlainValidator(_parse_think)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSettings(_Section):
    """`[run]`: how long and with how many users."""

    seed: Annotated[int, Field(ge=0)] = 0
    users: Count
    max_seconds: Annotated[float, Field(gt=0)]
    timeout_s: Annotated[float, Field(gt=0)] = 60.0


class AbandonSettings(_Section):
    """`[load]` of kind "abandon": closed-loop users who leave (see `harness.load.plan`)."""

    kind: Literal["abandon"]
    abandon_after_tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    stay_share: Annotated[float, Field(ge=0, le=1)]
    think: Think = "step"
    prompt_tokens: TokenRange
    answer_tokens: Count
    stay_tokens: Count
    stop_after_abandons: Count | None = None

    @model_validator(mode="after")
    def _must_leave_before_the_end(self) -> Self:
        if max(self.abandon_after_tokens) >= self.answer_tokens:
            raise ValueError(
                f"`abandon_after_tokens` goes up to {max(self.abandon_after_tokens)} but "
                f"`answer_tokens` is {self.answer_tokens}: nobody can leave an answer that is over;"
                f" `answer_tokens` must be larger"
            )
        return self


class SlotRecoverySettings(_Section):
    """`[load]` of kind "slot_recovery". Without `slots` the target is asked how many it has."""

    kind: Literal["slot_recovery"]
    slots: Count | None = None
    trials: Count
    prompt_tokens: TokenRange
    answer_tokens: Count
    control_answer_tokens: Count
    probe_tokens: Count
    abandon_after_tokens: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _must_leave_before_the_end(self) -> Self:
        if self.abandon_after_tokens >= self.answer_tokens:
            raise ValueError(
                f"`abandon_after_tokens` is {self.abandon_after_tokens} but `answer_tokens` is "
                f"{self.answer_tokens}: `answer_tokens` must be larger"
            )
        return self


class EngineSettings(_Section):
    """`[engine]`: settings of the bundled engine; what is absent is left to its own defaults."""

    runner: Literal["auto", "torch", "simulated"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: str | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    max_num_seqs: Count | None = None
    num_blocks: Count | None = None
    block_size: Count | None = None
    max_model_len: Count | None = None
    max_num_batched_tokens: Count | None = None
    sim_fixed_ms: Milliseconds | None = None
    sim_prefill_token_ms: Milliseconds | None = None
    sim_decode_token_ms: Milliseconds | None = None
    faults: list[str] = []
    allow_faults: bool = False


class SettleSettings(_Section):
    """`[settle]`: how long to wait for the server after the load; overrides the target's."""

    seconds: Seconds | None = None
    steps: Annotated[int, Field(ge=0)] | None = None


class Workload(_Section):
    """One question, and the load that answers it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    question: Annotated[str, Field(min_length=1)]
    run: RunSettings
    load: Annotated[AbandonSettings | SlotRecoverySettings, Field(discriminator="kind")]
    engine: EngineSettings = EngineSettings()
    settle: SettleSettings = SettleSettings()


class MetricSource(_Section):
    """Where a quantity is read on a target, when it moves, and how far it can be believed.

    Trust: `exact` at any time; `exact_when_idle` only when nothing runs; `lower` the true value may
    be higher; `stuck` never moves, whatever the documentation says.
    """

    name: Annotated[str, Field(min_length=1)]
    labels: dict[str, str] = {}
    refresh: str
    trust: Trust


class Target(_Section):
    """How to speak to one kind of server and what it tells about itself."""

    name: str
    description: str
    path: Annotated[str, Field(pattern="^/")] = "/v1/completions"
    extra_body: dict[str, Scalar] = {}
    stream_options: dict[str, bool] | None = None
    continuous_usage: bool = False
    lifecycle: bool = False
    slots_from: Literal["config", "workload"] = "workload"
    scrape_interval_s: Annotated[float, Field(gt=0)] | None = None
    settle_s: Seconds
    settle_steps: Annotated[int, Field(ge=0)] | None = None
    metrics: dict[MetricRole, MetricSource] = {}


def load_workload(name_or_path: str, settings: Sequence[str] = ()) -> Workload:
    """A workload by shipped name or by path, with `--set` settings applied. Raises ConfigError."""
    path = find_file(name_or_path, package=SHIPPED_WORKLOADS, noun="workload")
    data = apply_settings({"name": path.stem, **read_toml(path)}, settings)
    return validate(Workload, data, source=str(path), settings=settings)


def load_target(name_or_path: str) -> Target:
    """A target description by shipped name or by path. Raises ConfigError."""
    path = find_file(name_or_path, package=SHIPPED_TARGETS, noun="engine")
    return validate(Target, {"name": path.stem, **read_toml(path)}, source=str(path))


def shipped(package: str) -> dict[str, Path]:
    """The TOML files that a package carries, by name."""
    folder = Path(str(files(package)))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_file(name_or_path: str, *, package: str, noun: str) -> Path:
    """A shipped name, else a path; an unknown one is answered with the shipped names."""
    known = shipped(package)
    if name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    names = ", ".join(known)
    raise ConfigError(
        f"unknown {noun} `{name_or_path}`: neither a file nor one of those shipped: {names}"
    )


def as_plain_data(section: BaseModel) -> dict[str, Any]:
    """The section as plain data, defaults filled in, for the run's manifest."""
    return section.model_dump(mode="json")
