"""uvicorn's HTTP/1.1 protocol, which reports a client's leaving at once, and its listening socket.

Pipelining is refused: while uvicorn generates an earlier answer, it stops reading a connection on
which the next request has arrived, and would not notice that it closes. A client that closes its
side is gone, even if it could still read: the two look alike from here.
"""

import asyncio
import math
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from reference_engine.api.schemas import ApiError
from reference_engine.config import FrontendSettings
from reference_engine.context import DetectionMethod
from reference_engine.serve.detection import EXTENSION, ClientConnection, method_of

MAX_HEAD_BYTES: Final = 65_536  # if the head comes in several pieces
_LINGER_S: Final = 1.0
_PROBES: Final = 4  # keep-alive probes within the time for an acknowledgement
# Places in struct tcp_info of linux/tcp.h.
_ACKNOWLEDGED_AT: Final = 120  # tcpi_bytes_acked, 64 bits; Linux 4.1
_WINDOW_AT: Final = 228  # tcpi_snd_wnd: bytes, 32 bits; Linux 5.4


class WatchedProtocol(HttpToolsProtocol):
    """One request at a time on a connection, with a ClientConnection in its scope.

    `_num_unparsed`: bytes that the parser keeps because no part of the request is complete yet.
    `_reading`: a timer that runs until a request's last byte has come.
    """

    settings: FrontendSettings

    _client: ClientConnection | None = None
    _num_unparsed = 0
    _is_in_body = False
    _is_refused = False
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.settings.send_buffer_bytes)
        self.gone = asyncio.Event()
        self._start_reading()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_unparsed += len(data)
        super().data_received(data)
        if self._num_unparsed > MAX_HEAD_BYTES:
            self.refuse(431, f"request head: at most {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_body = False
        self._start_reading()

    def on_headers_complete(self) -> None:
        earlier: RequestResponseCycle | None = self.cycle  # None before the first request
        if earlier is not None and not earlier.response_complete:
            self.transport.abort()
            return
        self._num_unparsed, self._is_in_body = 0, True
        connection = self.transport.get_extra_info("socket")
        self._client = ClientConnection(
            self.transport, self.flow.resume_reading, partial(num_acknowledged, connection)
        )
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: self._client}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed, self._is_in_body = 0, False
        self._stop_reading()
        super().on_message_complete()

    def eof_received(self) -> None:
        if self._client is not None and not self.cycle.response_complete:
            self._client.lost(DetectionMethod.CONNECTION)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self.gone.set()
        if self._client is not None:
            method = method_of(exc)
            connection = self.transport.get_extra_info("socket")
            if method is DetectionMethod.HEARTBEAT and is_full(connection):
                method = DetectionMethod.STALL  # the kernel times these clients out, too
            self._client.lost(method)
        super().connection_lost(exc)
        if self._client is not None:
            self._client.closed()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, f"{msg} This server speaks HTTP/1.1.")

    def refuse_if_unread(self, status: int, message: str) -> None:
        if self._reading is not None and (self._is_in_body or self._num_unparsed):
            self.refuse(status, message)

    def refuse(self, status: int, message: str) -> None:
        """Answer the request that is being read with an error, and close.

        The client may still be sending. Closing on unread data would reset the connection and lose
        the answer, so the rest is read and dropped for a moment.
        """
        if self.transport.is_closing() or self._is_refused:
            return
        self._is_refused = True
        self._stop_reading()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None:
            is_being_answered = (
                cycle.response_started if self._is_in_body else not cycle.response_complete
            )
            if is_being_answered:
                self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(_whole_answer(ApiError(status, message).response()))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._reading = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _start_reading(self) -> None:
        if self._reading is None:
            timeout_s = self.settings.request_timeout_s
            self._reading = self.loop.call_later(timeout_s, self._read_for_too_long)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _read_for_too_long(self) -> None:
        timeout_s = self.settings.request_timeout_s
        self.refuse_if_unread(408, f"the request did not arrive completely within {timeout_s:g} s")
        if not self._is_refused:
            self.transport.close()  # not one byte has arrived


def _whole_answer(response: Response) -> bytes:
    head = [
        b"HTTP/1.1 %d %s" % (response.status_code, HTTPStatus(response.status_code).phrase.encode())
    ]
    head += [b"%s: %s" % header for header in response.raw_headers]
    return b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)])


def protocol_for(settings: FrontendSettings) -> type[WatchedProtocol]:
    """A class, since uvicorn makes the protocols itself."""
    return type("ConfiguredProtocol", (WatchedProtocol,), {"settings": settings})


def bound_silence(connection: socket.socket, settings: FrontendSettings) -> None:
    """Let the kernel end connections whose other end has vanished, and limit its send buffer.

    `connection` may be a listening socket: accepted sockets inherit its options on Linux. The
    kernel cannot distinguish a client that has vanished from one that does not read, so with bytes
    in flight the longer of the two time-outs holds. With none in flight, it probes after
    `heartbeat_s`.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform != "linux":
        return  # the system's own timeouts hold
    idle_s = max(1, math.ceil(settings.heartbeat_s or settings.ack_timeout_s))
    between_s = max(1, math.floor(settings.ack_timeout_s / _PROBES))
    timeout_ms = math.ceil(max(settings.ack_timeout_s, settings.stall_timeout_s) * 1000)
    for option, value in (
        (socket.TCP_KEEPIDLE, min(idle_s, 32767)),
        (socket.TCP_KEEPINTVL, min(between_s, 32767)),
        (socket.TCP_USER_TIMEOUT, timeout_ms),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def num_acknowledged(connection: socket.socket) -> int:
    return _tcp_info(connection, _ACKNOWLEDGED_AT, "=Q") or 0


def is_full(connection: socket.socket) -> bool:
    return _tcp_info(connection, _WINDOW_AT, "=I") == 0


def _tcp_info(connection: socket.socket, at: int, kind: str) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        info = connection.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, at + struct.calcsize(kind)
        )
        value: int = struct.unpack_from(kind, info, at)[0]
    except (OSError, struct.error):
        return None
    return value


_BACKLOG: Final = 1024


class ListenError(RuntimeError):
    """The address cannot be listened on."""


def reserve_port(host: str, port: int, settings: FrontendSettings) -> socket.socket:
    """A socket that is bound but does not listen: connections are refused until `open_port`."""
    with _listening_on(host, port):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(address[:2])
        except OSError:
            listener.close()
            raise
    bound_silence(listener, settings)
    return listener


def open_port(listener: socket.socket) -> None:
    with _listening_on(*listener.getsockname()[:2]):
        listener.listen(_BACKLOG)


@contextmanager
def _listening_on(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ListenError(
            f"cannot listen on {host}, port {port}: {error}; choose another --host or --port"
        ) from error
