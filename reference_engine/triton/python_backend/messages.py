"""Messages between the server and the process of a model instance, in the wire's frames.

A request is known by `key`, unique in the server. Requests and responses are KServe's own messages,
as bytes. The process answers Initialize with Started. The items of a batch come one by one,
then Execute; Executed says that the model's `execute` has returned; a decoupled model may send
further responses after that.
"""

from typing import Final

import msgspec

Control = tuple[str, str, int | float | str]  # a control input: name, data type, value


class Initialize(msgspec.Struct, frozen=True, tag="initialize", array_like=True):
    """`arguments` are passed to the model's `initialize`."""

    file: str
    arguments: dict[str, str]


class BatchItem(msgspec.Struct, frozen=True, tag="item", array_like=True, kw_only=True):
    """`key` None: an empty place of the batch, with inputs that look like `request`'s, of zeros."""

    key: int | None
    request: bytes
    parameters: dict[str, bool | int | float | str]
    controls: list[Control]
    sequence: int | str
    flags: int
    timeout_us: int
    is_cancelled: bool


class Execute(msgspec.Struct, frozen=True, tag="execute", array_like=True):
    pass


class CancelItem(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    key: int


class Finalize(msgspec.Struct, frozen=True, tag="finalize", array_like=True):
    pass


class Started(msgspec.Struct, frozen=True, tag="started", array_like=True):
    """`problem`: why the model did not."""

    problem: str | None = None


class Response(msgspec.Struct, frozen=True, tag="response", array_like=True):
    """`code` is gRPC's name of the error's status; `body` None: there is no response."""

    key: int
    body: bytes | None = None
    code: str | None = None
    message: str = ""
    is_final: bool = False


class Executed(msgspec.Struct, frozen=True, tag="executed", array_like=True):
    pass


class LogMessage(msgspec.Struct, frozen=True, tag="log", array_like=True):
    """`level` is one of `logging`."""

    level: int
    message: str


MAX_BYTES: Final = 2**31  # of a frame: protobuf's messages, the largest part, end there
ToModel = Initialize | BatchItem | Execute | CancelItem | Finalize
FromModel = Started | Response | Executed | LogMessage
to_model: Final = msgspec.msgpack.Decoder(ToModel)
from_model: Final = msgspec.msgpack.Decoder(FromModel)
