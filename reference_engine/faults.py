"""Deliberate faults, with which a harness can be shown to see each kind of wrong behaviour."""

from typing import Final

import msgspec

MAX_DELAY_S: Final = 3600.0
MAX_GROWTH_MB: Final = 100.0  # for each request
_MEGABYTES: Final = ("grow_memory", "grow_with_answers")
_SECONDS: Final = ("delay_abort", "hold_blocks", "stale_gauge", "stall_survivors_on_abort")


class FaultError(ValueError):
    """An unknown fault, or a value that it cannot take."""


class Faults(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """The faults in force, described in docs/faults.md. With the defaults the engine is correct."""

    ignore_disconnect: bool = False
    ignore_disconnect_unary: bool = False
    ignore_disconnect_while_waiting: bool = False
    delay_abort: float = 0.0
    lose_abort: float = 0.0
    die_on_abort: bool = False
    abort_by_prefix: bool = False
    abort_parent_only: bool = False
    stall_survivors_on_abort: float = 0.0
    leak_blocks: int = 0
    leak_slot: bool = False
    hold_blocks: float = 0.0
    drop_prefix_on_cancel: bool = False
    double_count: bool = False
    never_count: bool = False
    stale_gauge: float = 0.0
    queued_abort_ends_running: bool = False
    running_abort_ends_running: bool = False
    next_short: bool = False
    reuse_before_step_ends: bool = False
    wedge_after: int = 0
    clean_up_on_traffic: bool = False
    prefill_runs_on: bool = False
    second_prefill_dies: bool = False
    end_twice: bool = False
    grow_memory: float = 0.0
    abort_after_done: bool = False
    label_length: bool = False
    forget_aborted_tokens: bool = False
    cancel_does_nothing: bool = False
    poll_rearms: bool = False
    spoil_prompt: bool = False
    count_left_as_waiting: bool = False
    grow_with_answers: float = 0.0
    abort_says_stop: bool = False
    compute_refused: bool = False

    def __post_init__(self) -> None:
        for name in _SECONDS:
            if not 0.0 <= getattr(self, name) <= MAX_DELAY_S:
                spelled = name.replace("_", "-")
                raise FaultError(f"{spelled} takes seconds, from 0 to {MAX_DELAY_S:.0f}")
        if not 0.0 <= self.lose_abort <= 1.0:
            raise FaultError("lose-abort takes a probability from 0 to 1")
        if self.leak_blocks < 0:
            raise FaultError("leak-blocks takes a number of blocks, 0 or more")
        if self.wedge_after < 0:
            raise FaultError("wedge-after takes a number of aborts, 0 or more")
        for name in _MEGABYTES:
            if not 0.0 <= getattr(self, name) <= MAX_GROWTH_MB:
                spelled = name.replace("_", "-")
                raise FaultError(f"{spelled} takes megabytes, from 0 to {MAX_GROWTH_MB:.0f}")
        if self.double_count and self.never_count:
            raise FaultError("double-count and never-count exclude each other")


def fault_names() -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(Faults))


def parse_faults(settings: list[str]) -> Faults:
    raw: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in fault_names():
            raise FaultError(f"unknown fault {name!r}; there are: {', '.join(fault_names())}")
        raw[name] = value or "true"
    try:
        return msgspec.convert(raw, Faults, strict=False)
    except msgspec.ValidationError as error:
        raise FaultError(f"--fault: {error}") from error
