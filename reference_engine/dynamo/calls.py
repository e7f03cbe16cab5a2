"""The messages of calls between two processes: one calls, the other one serves handlers.

    caller                                   process with handlers
    Hello(version, peer, secret)  ──▶
                                  ◀──        Serving, or Failed
    Call                          ──▶        the handler starts
                                  ◀──        StreamItem, one for each yield
    Taken, as the consumer reads  ──▶        a handler is held back while WINDOW_BYTES are not taken
    CancelCall(stop or kill)      ──▶        the handler's context is cancelled
                                  ◀──        StreamEnd, once the handler has ended

The calls of a process share one connection; each has a number.
"""

from typing import Any, Final

import msgspec

from reference_engine.context import Cancellation, Context, Signal
from reference_engine.wire import MAX_FRAME_BYTES, Beat, Failed, Hello

WINDOW_BYTES: Final = 1024 * 1024  # the most that a caller keeps unread, and one item
_FRAME_ROOM: Final = 64 * 1024  # for what is in a frame in addition to a payload
_encoder: Final = msgspec.msgpack.Encoder()


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call", array_like=True):
    """`signal`: the context was cancelled before the call; its handler starts all the same."""

    number: int
    endpoint: str
    request: msgspec.Raw
    context_id: str
    metadata: dict[str, str]
    signal: Signal | None = None


class CancelCall(msgspec.Struct, frozen=True, kw_only=True, tag="cancel", array_like=True):
    number: int
    signal: Signal
    why: Cancellation | None = None


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag="taken", array_like=True):
    number: int
    num_bytes: int


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag="serving", array_like=True):
    instance_id: int


class StreamItem(msgspec.Struct, frozen=True, kw_only=True, tag="item", array_like=True):
    number: int
    data: msgspec.Raw


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end", array_like=True):
    number: int
    error: str | None = None


ToHandlers = Hello | Call | CancelCall | Taken | Beat
ToCaller = Serving | Failed | StreamItem | StreamEnd | Beat


def encode(value: Any) -> msgspec.Raw:
    """Raises TypeError or ValueError for what is not JSON-like, or is too long."""
    data = _encoder.encode(value)
    if len(data) > MAX_FRAME_BYTES - _FRAME_ROOM:
        raise ValueError(f"{len(data)} bytes in one message; at most {MAX_FRAME_BYTES} fit")
    return msgspec.Raw(data)


def check_linkage(context: Context) -> None:
    """Raises TypeError or ValueError for what would break the connection, which others use, too."""
    linkage = context.id(), context.metadata
    try:
        msgspec.convert(linkage, tuple[str, dict[str, str]])
    except msgspec.ValidationError as error:
        raise TypeError(f"a context's id and metadata are text: {error}") from None
    if len(_encoder.encode(linkage)) > _FRAME_ROOM // 2:
        raise ValueError(f"a context's id and metadata take at most {_FRAME_ROOM // 2} bytes")


def decode(data: msgspec.Raw) -> Any:
    return msgspec.msgpack.decode(data)
