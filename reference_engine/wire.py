"""The wire between processes: length-prefixed msgpack frames, a greeting, beats, and one loss.

    calling side                      serving side
    Hello(version, peer, secret) ──▶
                                 ◀──  its first word
    messages                     ◀─▶  messages
    Beat, when silent            ◀─▶  Beat, when silent

A side that hears nothing for a while takes the connection for lost, as it does when the connection
ends: a process may be stopped, or a network cut, without any FIN. Whatever came over a connection
ends with it. A peer that breaks the protocol loses its own connection, and nothing else.
"""

import secrets
import struct
from collections.abc import Collection
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar

import msgspec

WIRE_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024  # a step's report at full load is under 1 MiB
MAX_UNSENT_BYTES: Final = 4 * MAX_FRAME_BYTES  # to a peer that does not read
HELLO_BYTES: Final = 1024  # the most that is read of an unknown peer,
HELLO_S: Final = 5.0  # in this time
MAX_PEERS: Final = 256
_LENGTH: Final = struct.Struct("<I")
_Message = TypeVar("_Message")


class ProtocolError(RuntimeError):
    """A frame that breaks the protocol."""


class LearnedBy(StrEnum):
    """How a worker learns that a request is over."""

    CONTROL_MESSAGE = "control_message"
    CONNECTION_DROPPED = "connection_dropped"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", array_like=True):
    """The first frame. `peer` is the calling process's name; it is connected once."""

    version: int = WIRE_VERSION
    peer: str
    secret: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat", array_like=True):
    """Shows that a silent peer is alive."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", array_like=True):
    """Why the serving side refuses a peer, or why its settings cannot work here."""

    message: str


class Beats(NamedTuple):
    """Seconds: of silence after which a beat is sent, and after which a peer is lost."""

    interval_s: float = 1.0
    timeout_s: float = 5.0

    @classmethod
    def within(cls, timeout_s: float) -> "Beats":
        """Several beats fit into the time after which a peer is lost."""
        return cls(min(cls().interval_s, timeout_s / 4), timeout_s)


def check_hello(hello: object, secret: str, connected: Collection[str]) -> Hello:
    """Raises ProtocolError, with a message for the peer, too. `connected`: names of other peers."""
    if not isinstance(hello, Hello):
        raise ProtocolError(f"{type(hello).__name__} before Hello")
    if hello.version != WIRE_VERSION:
        raise ProtocolError(
            f"version {hello.version} of the protocol; this process speaks {WIRE_VERSION}: run the "
            "same walkaway on both sides"
        )
    if not secrets.compare_digest(hello.secret.encode(), secret.encode()):
        raise ProtocolError("a Hello with a wrong secret")
    if not hello.peer:
        raise ProtocolError("a Hello without a name")
    if hello.peer in connected:
        raise ProtocolError(f"{hello.peer} is connected already: another one needs another --name")
    if len(connected) >= MAX_PEERS:
        raise ProtocolError(f"{MAX_PEERS} peers are connected already")
    return hello


_encode: Final = msgspec.msgpack.Encoder().encode


def encode_frame(message: object) -> bytes:
    payload = _encode(message)
    return _LENGTH.pack(len(payload)) + payload


def decode_payload(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes) -> _Message:
    try:
        return decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        # For bad bytes msgspec raises other errors, too: for text that is not UTF-8, and for depth.
        raise ProtocolError(f"a frame that is no message: {error}") from error


class FrameReader:
    """Bytes in, whole payloads out; the caller does the reading. `max_bytes`: of a frame."""

    def __init__(self) -> None:
        self.max_bytes = MAX_FRAME_BYTES
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. Raises ProtocolError for one that is too long."""
        payloads = []
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.max_bytes:
                raise ProtocolError(f"a frame of {length} bytes; at most {self.max_bytes}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return payloads
