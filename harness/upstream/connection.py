"""A connection of HTTP/1.1 (or 1.0): requests in, answers out, and how the other side leaves.

The connection is read at all times, also while an answer is computed or nothing is sent. So FIN and
RST are seen when they come:

    FIN                 eof_received
    RST                 connection_lost, with the error of the read or of the write that failed
    RST after a FIN     `HangUps`, since asyncio reads nothing after a FIN

Whether the client of a FIN still reads cannot be seen until something has been written to it.
"""

import asyncio
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol, cast

import httptools

MOST_BODY_BYTES: Final = 16 * 1024 * 1024
MOST_UNSENT_BYTES: Final = 64 * 1024 * 1024
_MOST_PIPELINED: Final = 16
_SEND_BUFFER_BYTES: Final = 16 * 1024  # of the kernel: small, so that a stalled reader shows soon
_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)

Headers = Iterable[tuple[str, str]]


class ReceivedRequest(NamedTuple):
    """`headers`: their names in small letters."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    is_http10: bool
    keeps_alive: bool


class ConnectionWatcher(Protocol):
    """Who answers a request on the connection, and learns what becomes of it. `closed` may be
    called after the answer, and both ways may come one after the other."""

    def closed(self, how: str) -> None: ...
    def stalled(self) -> None: ...
    def drained(self) -> None: ...
    def lost(self) -> None: ...


class HangUps:
    """Sees the RST of connections whose FIN has come. Where there is no epoll, only the next write
    shows it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._calls: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._loop = loop
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        self._calls[descriptor] = call
        if self._epoll is not None:
            self._epoll.register(descriptor, 0)  # epoll reports errors and hang-ups unasked

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None and self._epoll is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _look(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            self._calls[descriptor]()


class UpstreamConnection(asyncio.Protocol):
    """`serve` gets each request when the answer before it has ended. It answers by `whole`, or by
    `start`, `send` and `finish`; whoever needs to learn of the client's leaving is the `watcher`.

    `keeps_half_closed`: a FIN does not end the connection while a request is answered. It is
    `among` the others while it is open.
    """

    def __init__(
        self,
        number: int,
        serve: Callable[["UpstreamConnection", ReceivedRequest], None],
        hang_ups: HangUps,
        *,
        keeps_half_closed: bool,
        among: set["UpstreamConnection"],
    ) -> None:
        self.number = number
        self.num_requests = 0
        self.unsent_bytes = 0  # which the kernel had not taken after the newest write
        self.watcher: ConnectionWatcher | None = None
        self._serve, self._hang_ups, self._among = serve, hang_ups, among
        self._keeps_half_closed = keeps_half_closed
        self._parser = httptools.HttpRequestParser(self)
        self._ready = deque[ReceivedRequest]()
        self._request: ReceivedRequest | None = None  # that is being answered
        self._is_chunked = self._has_fin = False
        self.on_message_begin()

    # What the other side does

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._among.add(self)
        self._transport.set_write_buffer_limits(high=0)
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        if self._size > MOST_BODY_BYTES or len(self._ready) > _MOST_PIPELINED:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        self._next()

    def eof_received(self) -> bool:
        self._has_fin = True
        if self.watcher is not None:
            self.watcher.closed("fin")
        if self._keeps_half_closed and self._request is not None:
            self._hang_ups.watch(self._socket.fileno(), self._hung_up)
        else:
            self._transport.abort()
        return True

    def pause_writing(self) -> None:
        if self.watcher is not None:
            self.watcher.stalled()

    def resume_writing(self) -> None:
        self.unsent_bytes = 0
        if self.watcher is not None:
            self.watcher.drained()

    def connection_lost(self, error: Exception | None) -> None:
        """This side ended the connection if there is no error."""
        self._hang_ups.forget(self._socket.fileno())
        if self.watcher is not None:
            if error is not None:
                self.watcher.closed("rst")
            self.watcher.lost()
        self._among.discard(self)

    def _hung_up(self) -> None:
        self._hang_ups.forget(self._socket.fileno())
        if self.watcher is not None:
            self.watcher.closed("rst")
        self._transport.abort()

    # What is sent

    def start(self, status: int, headers: Headers, *, length: int | None = None) -> None:
        """Send the head. `length`: of the body; None: it ends with `finish`."""
        request = self._request
        assert request is not None
        self._is_chunked = length is None and not request.is_http10
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if length is not None:
            lines.append(f"content-length: {length}")
        elif self._is_chunked:
            lines.append("transfer-encoding: chunked")
        if not self._stays_open:
            lines.append("connection: close")
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) + (b"0\r\n\r\n" if is_last else b"")
        self._transport.write(data)
        if not self.is_lost:  # else the buffer is empty
            self.unsent_bytes = self._transport.get_write_buffer_size()

    @property
    def is_lost(self) -> bool:
        """A read or a write has failed, and `connection_lost` comes."""
        return self._transport.is_closing()

    def finish(self) -> None:
        """The answer is whole: the next request, or the end of the connection."""
        if self._stays_open and not self._has_fin:
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._transport.close()
        self._request = None

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        assert self._request is not None
        self.start(status, headers, length=len(body))
        if self._request.method != "HEAD":
            self.send(body)
        self.finish()

    def cut(self) -> None:
        """End the connection in order (FIN), whatever the answer still lacks."""
        self._request = None
        self._transport.close()

    def reset(self) -> None:
        self._request = None
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        self._transport.abort()

    @property
    def _stays_open(self) -> bool:
        """HTTP/1.0 knows the end of a body without a length by the end of the connection."""
        request = self._request
        return request is not None and request.keeps_alive and not request.is_http10

    # Requests, as httptools reads them

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed(self._without_offer() + data[upgrade.args[0] :])

    def _without_offer(self) -> bytes:
        """The head of the newest request, of which httptools gives no body, without its offer to
        speak another protocol: nobody here takes that up."""
        request = self._ready.pop()
        self._parser = httptools.HttpRequestParser(self)
        lines = [f"{request.method} {request.target} HTTP/1.1"]
        kept = (one for one in request.headers.items() if one[0] not in ("upgrade", "connection"))
        lines += [f"{name}: {value}" for name, value in kept]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _next(self) -> None:
        if self._request is None and self._ready and not self._transport.is_closing():
            self._request = self._ready.popleft()
            self.watcher = None
            self.num_requests += 1
            self._serve(self, self._request)

    def _refuse(self, status: HTTPStatus) -> None:
        """Refuses a request that is not read to its end; an answer in progress breaks off."""
        if self._request is None:
            line = f"HTTP/1.1 {status} {status.phrase}\r\n"
            self._transport.write(f"{line}connection: close\r\ncontent-length: 0\r\n\r\n".encode())
            self._transport.close()
        else:
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._target, self._fields, self._parts = b"", dict[str, str](), list[bytes]()
        self._size = 0

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        is_asked = self._fields.get("expect", "").lower() == "100-continue"
        if is_asked and self._request is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= MOST_BODY_BYTES:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        parser: Any = self._parser
        request = ReceivedRequest(
            method=parser.get_method().decode(),
            target=self._target.decode("latin-1"),
            headers=self._fields,
            body=b"".join(self._parts),
            is_http10=parser.get_http_version() == "1.0",
            keeps_alive=parser.should_keep_alive(),
        )
        self._ready.append(request)
