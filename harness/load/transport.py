"""The way to the server: an httpx transport that hands over bytes the moment they arrive.

Stock httpx would do for reading, but not for leaving. Its parser may hold tokens that were received
and not yet handed on, without saying so, and what a user had read at t0 is the point of this
project. Here each receive is passed on whole (`harness.load.connection`). It also costs a fraction
of the processor time for each token.

httpx answers when the headers are there, and a server may send them only with the first token.
Users leave before that too: such a request carries its patience with it, and when that has run out
without headers the transport raises `PatienceEndedError` and leaves the leaving to the client.

One connection carries one request: an abandoned one could not be used again anyway, and nobody's
first token then depends on who came before. HTTP/1.1, with or without TLS; no proxies, no
redirects, no compression (ask for `identity`).
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Final

import httpx

from harness.load.client_process import ClientProcess
from harness.load.connection import Connection, PatienceEndedError
from harness.records import Way

# Extensions of a response: its `Connection`...
CONNECTION: Final = "walkaway.connection"
# ... and of a request: leave so long after sending, in this way, and the `Limit` of the first wait.
PATIENCE_NS: Final = "walkaway.patience_ns"
WAY: Final = "walkaway.way"
LIMIT: Final = "walkaway.limit"

# Who stops reading is noticed when all buffers between are full: ours is as small as can be.
_SMALL_BUFFER_BYTES: Final = 4096


class SocketTransport(httpx.BaseTransport):
    """Opens a connection for each request and returns as soon as the headers are there."""

    def __init__(self) -> None:
        self._tls: ssl.SSLContext | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request; the body is read through the `Connection` in the extensions."""
        timeout = request.extensions["timeout"]
        way = request.extensions.get(WAY)
        sock = self.connect(request.url, timeout["connect"], is_small=way is Way.STOP_READING)
        try:
            send(sock, request, timeout["write"])
            owner = _in_other_hands(sock) if way is Way.KILLED else None
            connection = Connection(
                sock if owner is None else owner.output,
                timeout["read"],
                limit=request.extensions.get(LIMIT),
                owner=owner,
            )
        except BaseException:
            sock.close()
            raise
        try:
            connection.receive_head(request.extensions.get(PATIENCE_NS))
        except PatienceEndedError:
            raise
        except BaseException:
            connection.close()
            raise
        return httpx.Response(
            connection.status_code,
            headers=connection.headers,
            stream=connection,
            extensions={CONNECTION: connection},
        )

    def connect(
        self, url: httpx.URL, timeout_s: float | None, *, is_small: bool = False
    ) -> socket.socket:
        """A connection of its own. Raises httpx.ConnectTimeout and httpx.ConnectError."""
        is_tls = url.scheme == "https"
        try:
            address = (url.host, url.port or (443 if is_tls else 80))
            sock = _open(address, timeout_s, is_small=is_small)
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


def _in_other_hands(sock: socket.socket) -> ClientProcess:
    try:
        return ClientProcess(sock)
    except OSError as error:
        raise httpx.ConnectError(f"no process to be killed could be started: {error}") from error


def _open(address: tuple[str, int], timeout_s: float | None, *, is_small: bool) -> socket.socket:
    if not is_small:
        return socket.create_connection(address, timeout_s)
    # The size must be known before the handshake, and `create_connection` does not let us set it.
    problem = OSError(f"no address for {address[0]}")
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
            sock.settimeout(timeout_s)
            sock.connect(place)
        except OSError as error:
            sock.close()
            problem = error
        else:
            return sock
    raise problem


def send(sock: socket.socket, request: httpx.Request, timeout_s: float | None) -> None:
    """Put the whole request on the wire. Raises httpx.WriteTimeout and httpx.WriteError."""
    head = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    head += [b"%b: %b" % pair for pair in request.headers.raw]
    sock.settimeout(timeout_s)
    try:
        sock.sendall(b"\r\n".join(head) + b"\r\n\r\n" + request.read())
    except TimeoutError as error:
        raise httpx.WriteTimeout(f"the request was not taken within {timeout_s} s") from error
    except OSError as error:
        raise httpx.WriteError(f"the request could not be sent: {error}") from error


@contextlib.contextmanager
def opened(client: httpx.Client, request: httpx.Request) -> Iterator[Connection]:
    """Send a request; wait for its headers, or as long as its patience lasts.

    The connection is closed on the way out, however that is, unless it is to be kept.
    """
    try:
        connection: Connection = client.send(request, stream=True).extensions[CONNECTION]
    except PatienceEndedError as early:
        connection = early.connection
    try:
        yield connection
    finally:
        connection.close()
