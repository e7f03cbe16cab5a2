"""The way to the server: httpx's requests and errors, over sockets that hand on bytes at once.

Stock httpx would do for reading, but not for leaving. Its parser may hold tokens that were received
and not yet handed on, without saying so, and what a user had read at t0 is the point of this
project. Here each receive is passed on whole, so whatever has not been handed over is still in the
kernel, where it can be counted. It also costs a fraction of the processor time for each token.

A connection is handed over as soon as the request is sent. The headers are just the first thing to
be received: a server may send them only with the first token, and users leave before that too.

One connection carries one request: an abandoned one could not be used again anyway, and nobody's
first token then depends on who came before. HTTP/1.1, with or without TLS; no proxies, no
redirects, no compression (ask for `identity`).
"""

import contextlib
import fcntl
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


class SocketTransport:
    """Opens a connection for each request. `timeout_s` is the longest wait for any one thing."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tls: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def opened(self, request: httpx.Request) -> Iterator["Connection"]:
        """Send a request; the connection is closed on the way out, however that is."""
        with self._connect(request.url) as sock:
            _send(sock, request, self._timeout_s)
            yield Connection(sock, self._timeout_s)

    def _connect(self, url: httpx.URL) -> socket.socket:
        is_tls = url.scheme == "https"
        try:
            address = (url.host, url.port or (443 if is_tls else 80))
            sock = socket.create_connection(address, self._timeout_s)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._wrap(sock, url.host) if is_tls else sock
            except BaseException:
                sock.close()
                raise
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection within {self._timeout_s} s") from error
        except OSError as error:
            raise httpx.ConnectError(f"no connection: {error}") from error

    def _wrap(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls.wrap_socket(sock, server_hostname=host)


def _send(sock: socket.socket, request: httpx.Request, timeout_s: float) -> None:
    head = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    head += [b"%b: %b" % pair for pair in request.headers.raw]
    sock.settimeout(timeout_s)
    try:
        sock.sendall(b"\r\n".join(head) + b"\r\n\r\n" + request.read())
    except TimeoutError as error:
        raise httpx.WriteTimeout(f"the request was not taken within {timeout_s} s") from error
    except OSError as error:
        raise httpx.WriteError(f"the request could not be sent: {error}") from error


class Connection:
    """One response being received. `status_code` means something once `has_head` is true.

    Its state: `_body`, bytes parsed but not yet handed over (empty between calls), and how far the
    response has come. The parser calls the `on_` methods.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.status_code = 0
        self.has_head = False
        self.is_complete = False
        self._sock = sock
        self._timeout_s = timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._ends_with_connection = True

    # What the parser tells...

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.status_code = self._parser.get_status_code()
        self.has_head = self.status_code >= 200  # "100 Continue" and its like precede the answer

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self.has_head

    # What the reader asks...

    def receive(self) -> bytes | None:
        """The body bytes of one receive; waits for it. None: the body is complete.

        They may be none, above all while the headers come in.
        """
        if self.is_complete:
            return None
        self._parse(self._receive_raw(self._timeout_s))
        return self._take_body()

    def receive_within(self, wait_s: float) -> bytes | None:
        """Like `receive`, for at most so long; None also when nothing came. 0 never waits."""
        if self.is_complete:
            return None
        try:
            data = self._receive_raw(max(0.0, wait_s))
        except httpx.ReadTimeout:
            return None
        self._parse(data)
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
        return t0_ns, wire_close

    def close(self) -> None:
        """Close the socket; doing it twice is fine."""
        self._sock.close()

    # How the bytes come in...

    def _receive_raw(self, timeout_s: float) -> bytes:
        self._sock.settimeout(timeout_s)
        try:
            return self._sock.recv(_RECEIVE_BYTES)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError) as error:
            raise httpx.ReadTimeout(f"nothing came for {timeout_s} s") from error
        except OSError as error:
            raise httpx.ReadError(f"the connection broke: {error}") from error

    def _parse(self, data: bytes) -> None:
        if not data:
            if not (self.has_head and self._ends_with_connection):
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
