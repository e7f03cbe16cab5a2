"""The way to the server: an httpx transport that hands over bytes the moment they arrive.

Stock httpx would do for reading, but not for leaving. Its parser may hold tokens that were received
and not yet handed on, without saying so, and what a user had read at t0 is the point of this
project. Here each receive is passed on whole (`harness.load.connection`). It also costs a fraction
of the processor time for each token.

httpx answers when the headers are there, and a server may send them only with the first token.
Users leave before that too: such a request carries its patience with it, and when that has run out
without headers the transport raises `PatienceEndedError` and leaves the leaving to the client.

By default one connection carries one request. An abandoned one could not be used again anyway; were
those of the others, then who asks after an abandon would wait for a handshake and who stayed would
not, and time to first token would differ between users who leave much and users who do not, for a
reason that is not the server's. `keep_alive` makes the connections of users who are to stay carry
one request after the other, as most real clients do: for servers far away, or behind TLS. Those of
users who are to leave are never passed on, also where the answer was over before they left.

HTTP/1.1, with or without TLS. No proxies; a redirect is reported and not followed; of compressed
answers none is read (`identity` is asked for).
"""

import contextlib
import ssl
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Final

import httpx

from harness.load.client_process import ClientProcess
from harness.load.connection import Connection, PatienceEndedError
from harness.load.dial import NoHandleLeftError, Wire, dial, origin_of
from harness.load.idle import IdleWires
from harness.reach import is_out_of_handles, tls_context
from harness.records import Way

# Extensions of a request: leave so long after sending, in this way, and the `Limit` of the first
# wait.
PATIENCE_NS: Final = "walkaway.patience_ns"
WAY: Final = "walkaway.way"
LIMIT: Final = "walkaway.limit"
# Put there by the transport where the request went out a second time.
RESENT: Final = "walkaway.resent"


class UnansweredError(httpx.RemoteProtocolError):
    """The connection ended before a byte of an answer had come."""


class SocketTransport(httpx.BaseTransport):
    """Sends a request and returns as soon as the headers are there.

    Users ask with `opened`: of what httpx's client does for each request they need nothing, and its
    cookie jar alone costs as much as a dozen tokens.

    Its state: `_idle`, the connections that wait for another request.
    """

    def __init__(self, *, ca_file: str | None = None, keep_alive: bool = False) -> None:
        self._trust: Callable[[], ssl.SSLContext] = cache(partial(tls_context, ca_file))
        self._keep_alive = keep_alive
        self._idle = IdleWires()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request for a client of httpx's, which reads the body from the stream."""
        connection = self.open(request)
        return httpx.Response(connection.status_code, headers=connection.headers, stream=connection)

    def open(self, request: httpx.Request) -> Connection:
        """Send the request. Raises httpx.TransportError, and PatienceEndedError.

        What goes out on a connection that the server was closing just then, and had no answer at
        all, goes out once more on a new one, and says so (`RESENT`).
        """
        wire = self._idle.take(origin_of(request.url)) if self._may_share(request) else None
        if wire is not None:
            with contextlib.suppress(UnansweredError):
                return self._ask(request, wire)
            request.extensions[RESENT] = True
        return self._ask(request, self.connect(request))

    def connect(self, request: httpx.Request) -> Wire:
        """A connection of its own. Raises httpx.ConnectTimeout and httpx.ConnectError."""
        return dial(
            origin_of(request.url),
            request.extensions["timeout"]["connect"],
            trust=self._trust,
            is_small=request.extensions.get(WAY) is Way.STOP_READING,
        )

    def load_trust(self) -> None:
        """Read the CAs now: it takes tens of ms, and would be in the first request's time to first
        token. Raises ConfigError for a file that is none."""
        self._trust()

    def close(self) -> None:
        """Close the connections that nobody uses."""
        self._idle.close()

    def _may_share(self, request: httpx.Request) -> bool:
        return self._keep_alive and request.extensions.get(WAY) is None

    def _ask(self, request: httpx.Request, wire: Wire) -> Connection:
        connection = None
        try:
            is_whole = send(wire, request, request.extensions["timeout"]["write"])
            connection = self._connection(request, wire, is_whole=is_whole)
            connection.receive_head(request.extensions.get(PATIENCE_NS))
        except PatienceEndedError:
            raise
        except BaseException as error:
            if connection is not None:
                connection.close()
            wire.sock.close()
            if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError) and not (
                connection and connection.received_bytes
            ):
                raise UnansweredError(str(error)) from error
            raise
        return connection

    def _connection(self, request: httpx.Request, wire: Wire, *, is_whole: bool) -> Connection:
        """Only what has taken the whole request carries another: the next would be its rest."""
        asked = request.extensions
        pass_on = partial(self._idle.put, origin_of(request.url), wire)
        owner = _in_other_hands(wire) if asked.get(WAY) is Way.KILLED else None
        return Connection(
            wire.sock if owner is None else owner.output,
            asked["timeout"]["read"],
            limit=asked.get(LIMIT),
            owner=owner,
            tls=wire.tls,
            pass_on=pass_on if is_whole and self._may_share(request) else None,
        )


def _in_other_hands(wire: Wire) -> ClientProcess:
    try:
        return ClientProcess(wire.sock)
    except OSError as error:
        why = f"no process to be killed could be started: {error}"
        raise (NoHandleLeftError if is_out_of_handles(error) else httpx.ConnectError)(
            why
        ) from error


def send(wire: Wire, request: httpx.Request, timeout_s: float | None) -> bool:
    """Put the whole request on the wire. Raises httpx.WriteTimeout and httpx.WriteError.

    False, and no error, where it was not taken whole but an answer is there already, or an end: who
    refuses may have stopped reading.
    """
    head = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    head += [b"%b: %b" % pair for pair in request.headers.raw]
    try:
        wire.send(b"\r\n".join(head) + b"\r\n\r\n" + request.read(), timeout_s)
    except OSError as error:
        if wire.has_input():
            return False
        if isinstance(error, TimeoutError):
            raise httpx.WriteTimeout(f"the request was not taken within {timeout_s} s") from error
        raise httpx.WriteError(f"the request could not be sent: {error}") from error
    return True


@contextlib.contextmanager
def opened(transport: SocketTransport, request: httpx.Request) -> Iterator[Connection]:
    """Send a request; wait for its headers, or as long as its patience lasts.

    The connection is closed on the way out, however that is, unless it is to be kept.
    """
    try:
        connection = transport.open(request)
    except PatienceEndedError as early:
        connection = early.connection
    try:
        yield connection
    finally:
        connection.close()
