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
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import itemgetter
from typing import Final

import httpx

from harness.http_client import is_out_of_handles, tls_context
from harness.load.client_process import ClientProcess
from harness.load.connect import NoHandleLeftError, Origin, Places, Wire, dial, origin_of
from harness.load.connection import Connection, Limit, PatienceEndedError
from harness.records import Way


class IdleWires:
    """What is open and unused. There are never more than requests were once under way together."""

    def __init__(self) -> None:
        self._idle: defaultdict[Origin, list[Wire]] = defaultdict(list)

    def put(self, origin: Origin, wire: Wire) -> None:
        """Keep a connection on which nothing is expected any more."""
        self._idle[origin].append(wire)

    def take(self, origin: Origin) -> Wire | None:
        """The one that was used last; those on which the server has since spoken, most likely to
        hang up, are closed."""
        while wires := self._idle[origin]:
            wire = wires.pop()
            if not wire.has_input():
                return wire
            wire.sock.close()
        return None

    def close(self) -> None:
        """Close them all."""
        for wires in self._idle.values():
            for wire in wires:
                wire.sock.close()
        self._idle.clear()


# Extensions of a request: when its user leaves, so long after it has gone out or at a time
# (monotonic), be it on its way or not; in which way; and the `Limit` of all until the first wait.
PATIENCE_NS: Final = "walkaway.patience_ns"
LEAVES_AT_NS: Final = "walkaway.leaves_at_ns"
WAY: Final = "walkaway.way"
LIMIT: Final = "walkaway.limit"
# Put there by the transport where there was a connection, and where the request went out a second
# time.
OPENED: Final = "walkaway.opened"
RESENT: Final = "walkaway.resent"


class GaveUpError(Exception):
    """The user's time to leave came before there was a connection."""


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
        self._places = Places()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request for a client of httpx's, which reads the body from the stream."""
        connection = self.open(request)
        return httpx.Response(connection.status_code, headers=connection.headers, stream=connection)

    def open(self, request: httpx.Request) -> Connection:
        """Send the request. Raises httpx.TransportError, PatienceEndedError and GaveUpError.

        What goes out on a connection that the server was closing just then, and had no answer at
        all, goes out once more on a new one, and says so (`RESENT`).
        """
        wire = self._idle.take(origin_of(request.url)) if self._may_share(request) else None
        if wire is not None:
            request.extensions[OPENED] = True
            with contextlib.suppress(UnansweredError):
                return self._ask(request, wire)
            request.extensions[RESENT] = True
        return self._ask(request, self.connect(request))

    def connect(self, request: httpx.Request) -> Wire:
        """A connection of its own. Raises httpx.TransportError and GaveUpError."""
        with _in_time(request, request.extensions["timeout"]["connect"]) as longest_s:
            wire = dial(
                origin_of(request.url),
                longest_s,
                trust=self._trust,
                places=self._places,
                is_small=request.extensions.get(WAY) is Way.STOP_READING,
            )
        request.extensions[OPENED] = True
        return wire

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
            is_whole = _send_in_time(wire, request)
            connection = self._connection(request, wire, is_whole=is_whole)
            connection.receive_head(_leaves_at_ns(request))
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


@contextlib.contextmanager
def _in_time(request: httpx.Request, longest_s: float | None) -> Iterator[float | None]:
    """How long to wait, in seconds: `longest_s`, or less where the request's limit passes or its
    user leaves before; then it is that which is told."""
    now_ns = time.perf_counter_ns()
    ends = list(_ends(request))
    until_ns, why = min(ends, key=itemgetter(0), default=(None, None))
    if until_ns is None or (longest_s is not None and until_ns >= now_ns + longest_s * 1e9):
        yield longest_s
        return
    assert why is not None
    if until_ns <= now_ns:
        raise why
    try:
        yield (until_ns - now_ns) / 1e9
    except httpx.TimeoutException as late:
        raise why from late


def _ends(request: httpx.Request) -> Iterator[tuple[int, Exception]]:
    limit: Limit | None = request.extensions.get(LIMIT)
    if limit is not None:
        yield limit.at_ns, httpx.ReadTimeout(limit.complaint)
    leaves_at_ns: int | None = request.extensions.get(LEAVES_AT_NS)
    if leaves_at_ns is not None:
        yield leaves_at_ns, GaveUpError()


def _leaves_at_ns(request: httpx.Request) -> int | None:
    """When the user leaves whose request has gone out just now."""
    patience_ns: int | None = request.extensions.get(PATIENCE_NS)
    if patience_ns is None:
        return request.extensions.get(LEAVES_AT_NS)
    return time.perf_counter_ns() + patience_ns


def _send_in_time(wire: Wire, request: httpx.Request) -> bool:
    """Like `send`; also False, and no error, where its user leaves before it has gone out."""
    try:
        with _in_time(request, request.extensions["timeout"]["write"]) as longest_s:
            return send(wire, request, longest_s)
    except GaveUpError:
        return False


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
