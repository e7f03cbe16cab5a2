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

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import msgspec

WIRE_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024  # a step's report at full load is under 1 MiB
MAX_UNSENT_BYTES: Final = 4 * MAX_FRAME_BYTES  # to a peer that does not read
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


def check_hello(hello: object, secret: str) -> Hello:
    """Raises ProtocolError, with a sentence that is for the peer, too."""
    if not isinstance(hello, Hello):
        raise ProtocolError(f"{type(hello).__name__} before Hello")
    if hello.version != WIRE_VERSION:
        raise ProtocolError(
            f"version {hello.version} of the protocol; this process speaks {WIRE_VERSION}: run the "
            "same walkaway on both sides"
        )
    if not secrets.compare_digest(hello.secret.encode(), secret.encode()):
        raise ProtocolError("a Hello with a wrong secret")
    return hello


_encoder: Final = msgspec.msgpack.Encoder()


def encode_frame(message: object) -> bytes:
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def decode_payload(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes) -> _Message:
    try:
        return decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        # msgspec raises errors of others for bad bytes: for text that is not UTF-8, and for depth.
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


class PeerConnection(asyncio.Protocol, Generic[_Message]):
    """One connection on an event loop, of the calling or of the serving side.

    `on_message` gets every message except Beat, and may raise ProtocolError; that ends the
    connection. `on_lost` is called once, with how the loss was learned, and with the error if the
    peer or we broke the protocol. Nothing is passed on after it.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[_Message],
        *,
        on_message: Callable[[_Message], object],
        on_lost: Callable[[LearnedBy, Exception | None], object],
        beats: Beats | None = None,
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._on_lost = on_lost
        self._beats = beats or Beats()
        self._loop = asyncio.get_running_loop()
        self.reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._heard_at = self._sent_at = self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_lost = False

    def send(self, message: object) -> None:
        """Raises ConnectionError once the connection is lost."""
        if self._transport is None or self._is_lost:
            raise ConnectionResetError("the connection is lost")
        self._sent_at = self._loop.time()
        self._transport.write(encode_frame(message))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._lose(LearnedBy.HEARTBEAT_TIMEOUT, ProtocolError("the peer does not read"))

    def close(self) -> None:
        """End it from our side: `on_lost` is not called, what was sent still goes out."""
        self._stop()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        peer: socket.socket = transport.get_extra_info("socket")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._heard_at = self._sent_at = self._looked_at = self._loop.time()
        self._timer = self._loop.call_later(self._beats.interval_s, self._look)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for payload in self.reader.feed(data):
                message: Any = decode_payload(self._decoder, payload)
                if not isinstance(message, Beat) and not self._is_lost:
                    self._on_message(message)
        except ProtocolError as error:
            self._lose(LearnedBy.CONNECTION_DROPPED, error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(LearnedBy.CONNECTION_DROPPED, None)

    def _look(self) -> None:
        now, (interval_s, timeout_s) = self._loop.time(), self._beats
        if now - self._looked_at > interval_s + timeout_s / 2:
            self._heard_at = now  # this process was asleep: what the peer sent is still unread
        self._looked_at = now
        if now - self._heard_at > timeout_s:
            self._lose(LearnedBy.HEARTBEAT_TIMEOUT, None)
            return
        self._timer = self._loop.call_later(interval_s, self._look)
        if now - self._sent_at >= interval_s:
            self.send(Beat())

    def _lose(self, learned_by: LearnedBy, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._stop()
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(learned_by, error)

    def _stop(self) -> None:
        self._is_lost = True
        if self._timer is not None:
            self._timer.cancel()
