"""The engine's settings, checked when they are made."""

import re
from collections.abc import Mapping
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

ModelDtype = Literal["float32", "bfloat16"]
Component = Literal["backend", "prefill", "decode"]
RunnerName = Literal["torch", "simulated", "handlers", "none"]
SchedulingPolicy = Literal["fcfs", "priority"]
VictimPolicy = Literal["policy", "rebuild-cost"]
ReclaimPolicy = Literal["immediate", "retain"]
PreemptionPolicy = Literal["recompute", "swap"]

RouterPolicy = Literal["least_loaded", "random", "round_robin"]
ShutdownPolicy = Literal["abort", "drain"]

LONGEST_S: Final = 86_400.0
_DEVICES: Final = r"auto|cpu|cuda(:[0-9]{1,3})?"
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "max_num_seqs": (1, inf),
    "num_blocks": (1, inf),
    "block_size": (1, inf),
    "max_model_len": (1, inf),
    "swap_space_blocks": (1, inf),
    "long_prefill_token_threshold": (0, inf),
    "max_num_partial_prefills": (0, inf),
    "force_reclaim_above": (0, 1),
}
# vLLM's share of the context for the threshold that it derives (vllm/config/scheduler.py).
_LONG_PREFILL_SHARE = 0.04


class EngineConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where converted models and compiled steps are kept, by the XDG base directories."""
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "walkaway"


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that a step of the simulated runner takes.

    `fixed_s + prefill_token_s * prefill tokens + decode_token_s * decode tokens + context_token_s *
    tokens of context + swap_block_s * blocks copied out or in`, where a request that is owed one
    token counts as decoding and any other as prefilling, and the context is what the step's
    requests have in the cache before it.
    """

    fixed_s: float = 0.020
    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0
    context_token_s: float = 0.0
    swap_block_s: float = 0.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine; `flags` says what each setting means. Sizes are in tokens and in blocks.

    The defaults are for a CPU; the module `defaults` chooses them for a CUDA device. A
    `long_prefill_token_threshold` of 0 means 4 % of the context if `max_num_partial_prefills` is 2
    or more, else no limit. A `prefill` worker hands each request over after its first token; a
    `decode` worker takes it over, by way of its host blocks.
    """

    component: Component = "backend"

    model: str = "tiny"
    dtype: ModelDtype = "float32"
    device: str = "auto"
    runner: RunnerName = "torch"
    seed: int = 0
    max_num_seqs: int = 8
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 4096
    max_num_batched_tokens: int = 512
    scheduling_policy: SchedulingPolicy = "fcfs"
    victim: VictimPolicy = "policy"
    preemption: PreemptionPolicy = "recompute"
    swap_space_blocks: int = 4096
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    watermark: float = 0.0
    reserve_full_isl: bool = True
    enable_prefix_caching: bool = True
    reclaim: ReclaimPolicy = "retain"
    force_reclaim_above: float = 1.0
    batch_invariant: bool = False
    async_scheduling: bool = False
    compile: bool = False
    step_cost: StepCost = StepCost()
    teacher: str | None = None
    quality_hook: str | None = None

    def __post_init__(self) -> None:
        check_values(msgspec.structs.asdict(self))
        self._check_budget()
        self._check_blocks()
        costs = msgspec.structs.astuple(self.step_cost)
        if not all(isfinite(cost) and cost >= 0 for cost in costs):
            raise EngineConfigError("the simulated runner's costs must be finite, 0 or more")
        if self.runner != "torch" and self.device.startswith("cuda"):
            raise EngineConfigError(
                "only the torch runner uses a device: leave device at auto or cpu"
            )
        if self.compile and (self.runner != "torch" or self.batch_invariant):
            raise EngineConfigError(
                "compile needs the torch runner, and cannot be had together with batch_invariant, "
                "which computes every token in the same way"
            )
        if self.teacher is not None and self.runner != "simulated":
            raise EngineConfigError("teacher needs the simulated runner: --runner simulated")

    @property
    def has_worker(self) -> bool:
        """Whether a worker of the engine's own generates."""
        return self.runner in ("torch", "simulated")

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)

    @property
    def host_blocks(self) -> int:
        is_used = self.preemption == "swap" or self.component == "decode"
        return self.swap_space_blocks if is_used else 0

    @property
    def max_chunk_tokens(self) -> int:
        if self.long_prefill_token_threshold:
            return self.long_prefill_token_threshold
        if self.max_num_partial_prefills > 1:
            return max(1, int(self.max_model_len * _LONG_PREFILL_SHARE))
        return self.max_num_batched_tokens

    def _check_budget(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or running requests would starve"
            )
        if self.enable_chunked_prefill:
            return
        if self.max_num_batched_tokens < self.max_model_len:
            raise EngineConfigError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"must be at least max_model_len ({self.max_model_len}), or a long prompt would "
                "wait for ever"
            )
        if self.long_prefill_token_threshold or self.max_num_partial_prefills > 1:
            raise EngineConfigError(
                "long_prefill_token_threshold and max_num_partial_prefills need chunked prefill"
            )

    def _check_blocks(self) -> None:
        if self.num_blocks * self.block_size < self.max_model_len:
            raise EngineConfigError(
                f"num_blocks x block_size ({self.num_blocks} x {self.block_size}) must hold one "
                f"request of max_model_len ({self.max_model_len}) tokens"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise EngineConfigError(
                f"watermark is a share of the blocks below 1, not {self.watermark}"
            )


class RateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for each API key, by the minute; None: no limit.

    `kills`: a key that runs out of tokens also loses its running requests. Otherwise only its new
    requests are refused.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    kills: bool = False


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the frontend; `flags` says what each means.

    A `stall_timeout_s` longer than `ack_timeout_s` replaces it: the kernel cannot distinguish the
    two cases. The socket holds up to `send_buffer_bytes`, and the server as many again.
    """

    heartbeat_s: float = 5.0
    request_timeout_s: float = 30.0
    ack_timeout_s: float = 10.0
    stall_timeout_s: float = 10.0
    send_buffer_bytes: int = 65_536
    keep_results: int = 1000
    keep_results_s: float = 300.0
    default_deadline_s: float | None = None
    shutdown: ShutdownPolicy = "abort"
    drain_timeout_s: float = 30.0
    router: RouterPolicy = "least_loaded"
    migrate: int = 0
    peer_timeout_s: float = 5.0
    api_keys: tuple[str, ...] = ()
    rate_limits: RateLimits = RateLimits()

    def __post_init__(self) -> None:
        _check_range(self, 0, LONGEST_S, "heartbeat_s", "keep_results_s", "drain_timeout_s")
        _check_range(self, 0.1, LONGEST_S, "request_timeout_s", "ack_timeout_s", "stall_timeout_s")
        _check_range(self, 0.001, LONGEST_S, "default_deadline_s")
        _check_range(self, 4096, 2**30, "send_buffer_bytes")
        _check_range(self, 0, 1_000_000, "keep_results", "migrate")
        _check_range(self, 0.1, LONGEST_S, "peer_timeout_s")
        _check_range(self.rate_limits, 1, 10**9, "requests_per_minute", "tokens_per_minute")

    def __repr__(self) -> str:
        return f"<FrontendSettings {self.shown()}>"

    def shown(self) -> dict[str, object]:
        shown: dict[str, object] = msgspec.to_builtins(self)
        del shown["api_keys"]
        return {**shown, "num_api_keys": len(self.api_keys)}


def check_values(settings: Mapping[str, Any]) -> None:
    """These settings of an engine, each by itself. Raises EngineConfigError."""
    for name, (low, high) in _RANGES.items():
        if name in settings:
            _check(name, settings[name], low, high)
    device = settings.get("device", "auto")
    if not re.fullmatch(_DEVICES, device):
        raise EngineConfigError(f"device must be auto, cpu, cuda or cuda:N, not {device!r}")


def _check_range(settings: msgspec.Struct, low: float, high: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None:
            _check(name, value, low, high)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (isfinite(value) and low <= value <= high):
        wanted = f"at least {low}" if high == inf else f"from {low} to {high}"
        raise EngineConfigError(f"{name} must be {wanted}, not {value}")
