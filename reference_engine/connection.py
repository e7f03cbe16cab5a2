"""One connection of the wire on an event loop. The worker, which has threads instead, needs none of
this, and starts without asyncio.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from reference_engine.wire import (
    MAX_UNSENT_BYTES,
    Beat,
    Beats,
    FrameReader,
    LearnedBy,
    ProtocolError,
    decode_payload,
    encode_frame,
)

_Message = TypeVar("_Message")


class PeerConnection(asyncio.Protocol, Generic[_Message]):
    """A connection, of the calling or of the serving side.

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
