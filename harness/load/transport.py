"""The way to the server: a transport that hands over bytes the moment they arrive.

A stock HTTP client would do for reading, but not for leaving: its parser may silently hold tokens
that were received and not yet handed on, and this project is about what a user had read at t0. Here
each receive is passed on whole (`harness.load.connection`). A stock client also costs several times
the processor time for each token. Errors are httpx's.

A request is open when its headers are there, and a server may send them only with the first token.
Users leave before that too: when the patience of such a request runs out without headers, the
transport raises `PatienceEndedError`, and the client does the leaving.

By default one connection carries one request. An abandoned connection cannot be used again. If the
others were, only a request after an abandon would wait for a handshake: time to first token would
differ between users that leave often and users that stay, for a reason that is not the server's.
With `keep_alive` the connections of users that stay carry one request after the other, as those of
most real clients do: for servers far away, or behind TLS. A connection of a user with a plan to
leave is never passed on, even if the answer was over before.

HTTP/1.1, with or without TLS. No proxies; a redirect is reported and not followed; compressed
answers are refused (`identity` is asked for).
"""

import contextlib
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import httpx

from harness.http_client import is_out_of_handles, tls_context
from harness.load.client_process import ClientProcess
from harness.load.connect import Dns, NoHandleLeftError, Wire, connect, origin_of
from harness.load.connection import Connection, Limit, PatienceEndedError
from harness.records import Way


@dataclass(slots=True, kw_only=True)
class WireRequest:
    """One request as the transport sends it: head and body as they go on the wire.

    `way`: how its user will leave; None: stays. The user leaves `patience_ns` after the request has
    gone out, or at `leaves_at_ns` (monotonic), sent or not. `limit` holds up to the headers, beside
    `connect_s` and `next_byte_s`.

    The transport sets `is_opened` once there is a connection, and `is_resent` when the request goes
    out a second time.
    """

    head: bytes
    body: bytes = b""
    connect_s: float | None
    next_byte_s: float | None
    way: Way | None = None
    patience_ns: int | None = None
    leaves_at_ns: int | None = None
    limit: Limit | None = None
    is_opened: bool = False
    is_resent: bool = False


class GaveUpError(Exception):
    """The user's time to leave came before there was a connection."""


class UnansweredError(httpx.RemoteProtocolError):
    """The connection ended before a byte of an answer came."""


class SocketTransport:
    """Sends requests to one server, and returns as soon as the headers are there. `_pool` holds the
    connections that wait for another request."""

    def __init__(
        self, url: httpx.URL, *, ca_file: str | None = None, keep_alive: bool = False
    ) -> None:
        self._origin = origin_of(url)
        self._trust: Callable[[], ssl.SSLContext] = cache(partial(tls_context, ca_file))
        self._keep_alive = keep_alive
        self._pool: list[Wire] = []
        self._dns = Dns()

    def open(self, request: WireRequest) -> Connection:
        """Send the request. Raises httpx.TransportError, PatienceEndedError and GaveUpError.

        A request without any answer on a used connection, which the server may just have closed,
        goes out once more on a new one (`is_resent`).
        """
        wire = self._pooled() if self._may_share(request) else None
        if wire is not None:
            request.is_opened = True
            with contextlib.suppress(UnansweredError):
                return self._ask(request, wire)
            request.is_resent = True
        return self._ask(request, self.connect(request))

    def connect(self, request: WireRequest) -> Wire:
        """A connection of its own. Raises httpx.TransportError and GaveUpError."""
        with _in_time(request, request.connect_s) as longest_s:
            wire = connect(
                self._origin,
                longest_s,
                trust=self._trust,
                dns=self._dns,
                is_small=request.way is Way.STOP_READING,
            )
        request.is_opened = True
        return wire

    def load_trust(self) -> None:
        """Read the CAs now: the tens of ms would otherwise be in the first request's time to first
        token. Raises ConfigError for an invalid file."""
        if self._origin[0] == "https":
            self._trust()

    def close(self) -> None:
        for wire in self._pool:
            wire.sock.close()
        self._pool.clear()

    def _pooled(self) -> Wire | None:
        """The connection used last. Connections with input since then, most likely an end, are
        closed."""
        while self._pool:
            wire = self._pool.pop()
            if not wire.has_input():
                return wire
            wire.sock.close()
        return None

    def _may_share(self, request: WireRequest) -> bool:
        return self._keep_alive and request.way is None

    def _ask(self, request: WireRequest, wire: Wire) -> Connection:
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

    def _connection(self, request: WireRequest, wire: Wire, *, is_whole: bool) -> Connection:
        """Reuse a connection only if the whole request was sent; otherwise the server reads the
        next request as its tail."""
        pass_on = partial(self._pool.append, wire)
        owner = _client_process(wire) if request.way is Way.KILLED else None
        return Connection(
            wire.sock if owner is None else owner.output,
            request.next_byte_s,
            limit=request.limit,
            owner=owner,
            tls=wire.tls,
            pass_on=pass_on if is_whole and self._may_share(request) else None,
        )


def _client_process(wire: Wire) -> ClientProcess:
    try:
        return ClientProcess(wire.sock)
    except OSError as error:
        why = f"no process to be killed could be started: {error}"
        raise (NoHandleLeftError if is_out_of_handles(error) else httpx.ConnectError)(
            why
        ) from error


@contextlib.contextmanager
def _in_time(request: WireRequest, longest_s: float | None) -> Iterator[float | None]:
    """Yield how long to wait, in seconds: `longest_s`, or less if the request's limit passes or its
    user leaves earlier; then raise that."""
    now_ns = time.perf_counter_ns()
    until_ns, why = _first_end(request)
    if why is None or (longest_s is not None and until_ns >= now_ns + longest_s * 1e9):
        yield longest_s
        return
    if until_ns <= now_ns:
        raise why
    try:
        yield (until_ns - now_ns) / 1e9
    except httpx.TimeoutException as late:
        raise why from late


def _first_end(request: WireRequest) -> tuple[int, Exception | None]:
    limit, leaves_at_ns = request.limit, request.leaves_at_ns
    if leaves_at_ns is not None and (limit is None or leaves_at_ns < limit.at_ns):
        return leaves_at_ns, GaveUpError()
    return (0, None) if limit is None else (limit.at_ns, httpx.ReadTimeout(limit.complaint))


def _leaves_at_ns(request: WireRequest) -> int | None:
    if request.patience_ns is None:
        return request.leaves_at_ns
    return time.perf_counter_ns() + request.patience_ns


def _send_in_time(wire: Wire, request: WireRequest) -> bool:
    """Like `send`; also False if its user leaves before it has gone out."""
    try:
        with _in_time(request, request.next_byte_s) as longest_s:
            return send(wire, request, longest_s)
    except GaveUpError:
        return False


def send(wire: Wire, request: WireRequest, timeout_s: float | None) -> bool:
    """Put the whole request on the wire. Raises httpx.WriteTimeout and httpx.WriteError.

    False, and no error, if it was not taken whole but an answer, or an end, is already there: a
    server that refuses may have stopped reading.
    """
    try:
        wire.send(request.head + request.body, timeout_s)
    except OSError as error:
        if wire.has_input():
            return False
        if isinstance(error, TimeoutError):
            raise httpx.WriteTimeout(f"the request was not taken within {timeout_s} s") from error
        raise httpx.WriteError(f"the request could not be sent: {error}") from error
    return True


def head_of(target: bytes, fields: list[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
    lines = [b"POST %b HTTP/1.1" % target, *(b"%b: %b" % pair for pair in fields)]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""])


@contextlib.contextmanager
def opened(transport: SocketTransport, request: WireRequest) -> Iterator[Connection]:
    """Send a request; wait for its headers, or as long as its patience lasts. The connection is
    closed on the way out, unless it is to be kept."""
    try:
        connection = transport.open(request)
    except PatienceEndedError as early:
        connection = early.connection
    try:
        yield connection
    finally:
        connection.close()
