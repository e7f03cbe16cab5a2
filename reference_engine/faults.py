"""Ways to be wrong on purpose, so that a harness can be proved to see each of them."""

from typing import Final

import msgspec

MAX_DELAY_S: Final = 3600.0


class FaultError(ValueError):
    """An unknown fault, or a value that it cannot take."""


class Faults(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """The faults in force. The defaults are those of a correct engine.

    `ignore-disconnect`: the frontend sees that the client left and does nothing.
    `delay-abort`: the frontend waits so many seconds before it tells the worker.
    `lose-abort`: the worker forgets an abort with this probability.
    `leak-blocks`: so many of an aborted request's blocks are never given back.
    """

    ignore_disconnect: bool = False
    delay_abort: float = 0.0
    lose_abort: float = 0.0
    leak_blocks: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.delay_abort <= MAX_DELAY_S:
            raise FaultError(f"delay-abort takes seconds, from 0 to {MAX_DELAY_S:.0f}")
        if not 0.0 <= self.lose_abort <= 1.0:
            raise FaultError("lose-abort takes a probability from 0 to 1")
        if self.leak_blocks < 0:
            raise FaultError("leak-blocks takes a number of blocks, 0 or more")


def fault_names() -> tuple[str, ...]:
    """The names as they are written on the command line and on the wire."""
    return tuple(field.encode_name for field in msgspec.structs.fields(Faults))


def parse_faults(settings: list[str]) -> Faults:
    """Read `NAME` or `NAME=VALUE` settings. Raises FaultError with what is allowed."""
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
