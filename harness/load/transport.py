"""The way to the server: an httpx transport that hands over bytes the moment they arrive.

Stock httpx would do for reading, but not for leaving. Its parser may hold tokens that were received
and not yet handed on, without saying so, and what a user had read at t0 is the point of this
project. Here each receive is passed on whole, so whatever has not been handed over is still in the
kernel, where it can be counted. It also costs a fraction of the processor time for each token.

httpx answers when the headers are there, and a server may send them only with the first token.
Users leave before that too: such a request carries its patience with it, and when that has run out
without headers the transport hangs up and raises `LeftBeforeHeadersError`.

One connection carries one request: an abandoned one could not be used again anyway, and nobody's
first token then depends on who came before. HTTP/1.1, with or without TLS; no proxies, no
redirects, no compression (ask for `identity`).
"""

import contextlib
import fcntl
import os
import socket
import ssl
import struct
import termios
import time
from collections.abc import Iterator
from typing import Final

import httptools
import httpx

from harness.records import WireClose

_RECEIVE_BYTES: Final = 65536


CONNECTION: Final = "walkaway.connection"  # extension of a response: its `Connection`
PATIENCE_NS: Final = "walkaway.patience_ns"  # extension of a request: leave so long after sending


class LeftBeforeHeadersError(Exception):
    """The user's patience ended first: when and how the connection was closed."""

    def __init__(self, t0_ns: int, wire_close: WireClose) -> None:
        super().__init__("left before the headers, as planned")
        self.t0_ns = t0_ns
        self.wire_close = wire_close


class SocketTransport(httpx.BaseTransport):
    """Opens a connection for each request and returns as soon as the headers are there."""

    def __init__(self) -> None:
        self._tls: ssl.SSLContext | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request; the body is read through the `Connection` in the extensions."""
        timeout = request.extensions["timeout"]
        sock = self._connect(request.url, timeout["connect"])
        try:
            _send(sock, request, timeout["write"])
            connection = Connection(sock, timeout["read"])
            connection.receive_head(request.extensions.get(PATIENCE_NS))
        except BaseException:
            sock.close()
            raise
        return httpx.Response(
            connection.status_code,
            headers=connection.headers,
            stream=connection,
            extensions={CONNECTION: connection},
        )

    def _connect(self, url: httpx.URL, timeout_s: float | None) -> socket.socket:
        is_tls = url.scheme == "https"
        try:
            address = (url.host, url.port or (443 if is_tls else 80))
            sock = socket.create_connection(address, timeout_s)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._wrap(sock, url.host) if is_tls else sock
            except BaseException:
                sock.close()
                raise
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection within {timeout_s} s") from error
        except OSError as error:
            raise httpx.ConnectError(f"no connection: {error}") from error

    def _wrap(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls.wrap_socket(sock, server_hostname=host)


def _send(sock: socket.socket, request: httpx.Request, timeout_s: float | None) -> None:
    head = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    head += [b"%b: %b" % pair for pair in request.headers.raw]
    sock.settimeout(timeout_s)
    try:
        sock.sendall(b"\r\n".join(head) + b"\r\n\r\n" + request.read())
    except TimeoutError as error:
        raise httpx.WriteTimeout(f"the request was not taken within {timeout_s} s") from error
    except OSError as error:
        raise httpx.WriteError(f"the request could not be sent: {error}") from error


class Connection(httpx.SyncByteStream):
    """One response being received. `leaves_at_ns` is when a user without more patience leaves.

    Its state: `_body`, bytes parsed but not yet handed over (empty between calls), and how far the
    response has come. The parser calls the `on_` methods.
    """

    def __init__(self, sock: socket.socket, timeout_s: float | None) -> None:
        self.status_code = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False
        self.leaves_at_ns: int | None = None
        self._sock = sock
        self._timeout_s = timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._has_head = False
        self._ends_with_connection = True

    # What the parser tells...

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status_code = self._parser.get_status_code()
        if self.status_code < 200:  # "100 Continue" and its like precede the answer
            self.headers.clear()
            return
        self._has_head = True
        names = {name.lower() for name, _ in self.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self._has_head

    # What the reader asks...

    def receive_head(self, patience_ns: int | None) -> None:
        """Wait for the headers; body bytes that came along are kept for the next receive.

        Raises LeftBeforeHeadersError when they have not come after `patience_ns`.
        """
        if patience_ns is not None:
            self.leaves_at_ns = time.perf_counter_ns() + patience_ns
        while not self._has_head:
            if self.leaves_at_ns is None:
                self._parse(self._receive_raw(self._timeout_s))
            elif not self._parse_within((self.leaves_at_ns - time.perf_counter_ns()) / 1e9):
                raise LeftBeforeHeadersError(*self.hang_up())

    def receive(self) -> bytes | None:
        """The body bytes of one receive (maybe none); waits for it. None: the body is complete."""
        if not self._body:
            if self.is_complete:
                return None
            self._parse(self._receive_raw(self._timeout_s))
        return self._take_body()

    def receive_within(self, wait_s: float) -> bytes | None:
        """Like `receive`, for at most so long; None also when nothing came. 0 never waits."""
        if not self._body and (self.is_complete or not self._parse_within(wait_s)):
            return None
        return self._take_body()

    def unread_bytes(self) -> int:
        """What the kernel holds for us: closing now would send a reset, not an orderly end."""
        answer = fcntl.ioctl(self._sock.fileno(), termios.FIONREAD, b"\0\0\0\0")
        return int(struct.unpack("i", answer)[0])

    def hang_up(self) -> tuple[int, WireClose]:
        """Leave now, however far the answer came: t0, stamped immediately before, and the way."""
        t0_ns = time.perf_counter_ns()
        wire_close = WireClose.RST if self.unread_bytes() else WireClose.FIN
        self.close()
        # Who has left is gone: on a shared core, whatever this process does next must not stand in
        # the way of a server that is just waking up to it.
        os.sched_yield()
        return t0_ns, wire_close

    def close(self) -> None:
        """Close the socket; doing it twice is fine."""
        self._sock.close()

    def __iter__(self) -> Iterator[bytes]:
        """The rest of the body, for httpx's own way of reading."""
        while (chunk := self.receive()) is not None:
            yield chunk

    # How the bytes come in...

    def _parse_within(self, wait_s: float) -> bool:
        """Take in what comes in this time; False when nothing does."""
        try:
            data = self._receive_raw(max(0.0, wait_s))
        except httpx.ReadTimeout:
            return False
        self._parse(data)
        return True

    def _receive_raw(self, timeout_s: float | None) -> bytes:
        self._sock.settimeout(timeout_s)
        try:
            return self._sock.recv(_RECEIVE_BYTES)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError) as error:
            raise httpx.ReadTimeout(f"nothing came for {timeout_s} s") from error
        except OSError as error:
            raise httpx.ReadError(f"the connection broke: {error}") from error

    def _parse(self, data: bytes) -> None:
        if not data:
            if not (self._has_head and self._ends_with_connection):
                raise httpx.RemoteProtocolError(
                    "the server closed the connection before the answer was complete"
                )
            self.is_complete = True
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise httpx.RemoteProtocolError(f"this is not HTTP/1.1: {error}") from error

    def _take_body(self) -> bytes:
        body = b"".join(self._body)
        self._body.clear()
        return body


@contextlib.contextmanager
def opened(client: httpx.Client, request: httpx.Request) -> Iterator[Connection]:
    """Send a request; the connection is closed on the way out, however that is."""
    response = client.send(request, stream=True)
    try:
        yield response.extensions[CONNECTION]
    finally:
        response.close()
