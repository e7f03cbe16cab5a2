"""Workloads and targets: what to do, and how to speak to the server under test.

Both are TOML files, shipped by name or given as a path. They are read once, checked, and from then
on frozen; the resolved copy is saved with the run.
"""

import re
from collections.abc import Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

from harness.errors import ConfigError
from harness.records import Trust
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

# Far beyond what one machine can use, and small enough that a slip of the finger is said at once
# instead of filling the memory or waiting for ever.
MOST_TOKENS: Final = 10_000_000
MOST_BLOCKS: Final = 1_000_000
MOST_STREAMS: Final = 10_000
LONGEST_S: Final = 7 * 86_400
LARGEST_INT: Final = 2**63 - 1

Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Streams = Annotated[int, Field(ge=1, le=MOST_STREAMS)]
Blocks = Annotated[int, Field(ge=1, le=MOST_BLOCKS)]
Scalar = int | float | str | bool
Seed = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
Duration = Annotated[float, Field(gt=0, le=LONGEST_S)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]
# Closer than 10 ms, reading the page is the load that one measures.
ScrapeInterval = Annotated[float, Field(ge=0.01, le=LONGEST_S)]


def _parse_token_range(value: object) -> list[int]:
    match value:
        case [int(low), int(high)] if 1 <= low <= high <= MOST_TOKENS:
            return [low, high]
        case _:
            raise ValueError(
                f"must be [lowest, highest] with 1 <= lowest <= highest <= {MOST_TOKENS}, "
                f"not {value}"
            )


def _parse_think(value: object) -> str | float:
    match value:
        case "step" | "none":
            return str(value)
        case bool():
            pass
        case int() | float() if 0 <= value <= LONGEST_S:
            return float(value)
    raise ValueError(
        f'must be "step", "none" or a number of seconds from 0 to {LONGEST_S}, not {value!r}'
    )


def _parse_scalar(value: object) -> Scalar:
    match value:
        case str() | bool():
            return value
        case int() if abs(value) <= LARGEST_INT:
            return value
        case float() if isfinite(value):
            return value
    raise ValueError(f"must be a number, text in quotes, true or false, not {value!r}")


def _check_path(value: str) -> str:
    if not re.fullmatch(r"/[!-~]*", value):
        raise ValueError(f'must begin with "/" and hold no spaces, not {value!r}')
    return value


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError(
            f"must be made of letters, digits, dots, dashes and underscores, not {value!r}"
        )
    return value


TokenRange = Annotated[list[int], PlainValidator(_parse_token_range)]
Think = Annotated[str | float, PlainValidator(_parse_think)]
ExtraValue = Annotated[Scalar, PlainValidator(_parse_scalar)]
UrlPath = Annotated[str, AfterValidator(_check_path)]
Name = Annotated[str, AfterValidator(_check_name)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSettings(_Section):
    """`[run]`: how long and with how many users."""

    seed: Seed = 0
    users: Streams
    max_seconds: Duration
    timeout_s: Duration = 60.0


class AbandonSettings(_Section):
    """`[load]` of kind "abandon": closed-loop users who leave (see `harness.load.plan`)."""

    kind: Literal["abandon"]
    abandon_after_tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    stay_share: Annotated[float, Field(ge=0, le=1)]
    think: Think = "step"
    prompt_tokens: TokenRange
    answer_tokens: Tokens
    stay_tokens: Tokens
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
    slots: Streams | None = None
    trials: Count
    prompt_tokens: TokenRange
    answer_tokens: Tokens
    control_answer_tokens: Tokens
    probe_tokens: Tokens
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
    seed: Seed | None = None
    max_num_seqs: Streams | None = None
    num_blocks: Blocks | None = None
    block_size: Tokens | None = None
    max_model_len: Tokens | None = None
    max_num_batched_tokens: Tokens | None = None
    sim_fixed_ms: Milliseconds | None = None
    sim_prefill_token_ms: Milliseconds | None = None
    sim_decode_token_ms: Milliseconds | None = None
    faults: list[str] = []
    allow_faults: bool = False


class SettleSettings(_Section):
    """`[settle]`: how long to wait for the server after the load; overrides the target's."""

    seconds: Seconds | None = None
    steps: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None


class CollectSettings(_Section):
    """`[collect]`: how closely the server is watched; what is absent is left to the target."""

    scrape_interval_s: ScrapeInterval | None = None


class Workload(_Section):
    """One question, and the load that answers it."""

    name: Name
    question: Annotated[str, Field(min_length=1)]
    run: RunSettings
    load: Annotated[AbandonSettings | SlotRecoverySettings, Field(discriminator="kind")]
    engine: EngineSettings = EngineSettings()
    settle: SettleSettings = SettleSettings()
    collect: CollectSettings = CollectSettings()


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
    path: UrlPath = "/v1/completions"
    extra_body: dict[str, ExtraValue] = {}
    stream_options: dict[str, bool] | None = None
    continuous_usage: bool = False
    lifecycle: bool = False
    slots_from: Literal["config", "workload"] = "workload"
    scrape_interval_s: ScrapeInterval | None = None
    settle_s: Seconds
    settle_steps: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    metrics: dict[MetricRole, MetricSource] = {}


def load_workload(name_or_path: str, settings: Sequence[str] = ()) -> Workload:
    """A workload by shipped name or by path, with `--set` settings applied. Raises ConfigError."""
    path = find_file(name_or_path, package=SHIPPED_WORKLOADS, noun="workload")
    data = apply_settings({"name": name_of(path), **read_toml(path)}, settings)
    return validate(Workload, data, source=str(path), settings=settings)


def load_target(name_or_path: str) -> Target:
    """A target description by shipped name or by path. Raises ConfigError."""
    path = find_file(name_or_path, package=SHIPPED_TARGETS, noun="engine")
    return validate(Target, {"name": path.stem, **read_toml(path)}, source=str(path))


def name_of(path: Path) -> str:
    """The name of a workload that does not tell its own: its file's, fit for a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("._-") or "workload"


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
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name the {noun}'s TOML file in it")
    names = ", ".join(known)
    raise ConfigError(
        f"unknown {noun} `{name_or_path}`: neither a file nor one of those shipped: {names}"
    )


def as_plain_data(section: BaseModel) -> dict[str, Any]:
    """The section as plain data, defaults filled in, for the run's manifest."""
    return section.model_dump(mode="json")
