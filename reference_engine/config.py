"""The engine's settings, checked once, at birth."""

from math import isfinite

import msgspec


class EngineConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost model of the simulated runner: seconds a step takes.

    `fixed_s + prefill_token_s * prefill tokens + decode_token_s * decode tokens`, where a request
    that is owed one token counts as decoding and any other as prefilling.
    """

    fixed_s: float = 0.020
    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. Sizes are in tokens and blocks of `block_size` tokens."""

    model: str = "tiny"
    device: str = "auto"
    runner: str = "torch"
    seed: int = 0
    max_num_seqs: int = 8
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 4096
    max_num_batched_tokens: int = 512
    step_cost: StepCost = StepCost()

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "num_blocks", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or running requests would starve"
            )
        if self.num_blocks * self.block_size < self.max_model_len:
            raise EngineConfigError(
                f"num_blocks x block_size ({self.num_blocks} x {self.block_size}) must hold one "
                f"request of max_model_len ({self.max_model_len}) tokens"
            )
        if not all(
            isfinite(cost) and cost >= 0 for cost in msgspec.structs.astuple(self.step_cost)
        ):
            raise EngineConfigError("the simulated runner's costs must be finite, 0 or more")
        if self.runner == "simulated" and self.device == "cuda":
            raise EngineConfigError("the simulated runner computes nothing: it needs no device")
