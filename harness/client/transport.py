"""The way to the server: a transport that hands over bytes the moment they arrive. A stock HTTP
client's parser may hold tokens that were received and not yet handed on. Errors are httpx's.

Users leave before the headers too: when the patience of a request runs out, `open` returns the
connection without headers, and the client does the leaving.

By default one connection carries one request: an abandoned one cannot be used again, so with reuse
only requests after an abandon would wait for a handshake. With `keep_alive` the connections of
users that stay carry one request after the other; one with a plan to leave is never passed on.

HTTP/1.1, with or without TLS. No proxies, redirects or compressed answers.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from harness.client.connect import connect, dns_of
from harness.client.connection import Deadline, Http1Connection
from harness.client.wire_log import Tap
from harness.http_client import tls_context
from harness.records import Way


@dataclass(slots=True, kw_only=True)
class WireRequest:
    """Head and body as they go on the wire. `way`: how its user will leave; None: stays.

    The user leaves `patience_ns` after the request has gone out, or at `leaves_at_ns` (monotonic),
    sent or not. `limit` holds up to the headers, in addition to `connect_s` and `next_byte_s`. The
    transport sets `is_opened` once there is a connection, and `is_resent` when it sends a second
    time.
    """

    head: bytes
    body: bytes = b""
    connect_s: float | None
    next_byte_s: float | None
    way: Way | None = None
    patience_ns: int | None = None
    leaves_at_ns: int | None = None
    limit: Deadline | None = None
    is_opened: bool = False
    is_resent: bool = False
    tap: Tap | None = None


class GaveUpError(Exception):
    """The user's time to leave came before there was a connection, or (raised in the greenlet that
    waits) leaves at once."""


class SocketTransport:
    """Sends requests to one server, and returns as soon as the headers are there. `_pool` holds the
    connections that wait for another request. `address`: of the host, if the run has found it.
    Raises ConfigError for an invalid `ca_file`."""

    def __init__(
        self,
        url: httpx.URL,
        *,
        ca_file: str | None = None,
        keep_alive: bool = False,
        address: str | None = None,
    ) -> None:
        self._dns = dns_of(url, address)
        # Read now: the tens of ms would otherwise be in the first request's time to first token.
        self._context = tls_context(ca_file) if url.scheme == "https" else None
        self._keep_alive = keep_alive
        self._pool: list[Http1Connection] = []
        self.num_reused = 0

    @contextlib.contextmanager
    def open(self, request: WireRequest) -> Iterator[Http1Connection]:
        """Wait for the headers, or as long as the request's patience lasts. The connection is
        closed on the way out, unless it is to be kept. Raises httpx.TransportError and GaveUpError.

        A request without any answer on a used connection, which the server may just have closed,
        goes out once more on a new one.
        """
        connection = self._ask_again(request) if self._may_share(request) else None
        if connection is None:
            connection = self.connect(request)
            self._ask(request, connection)
        try:
            yield connection
        finally:
            connection.close()

    def connect(self, request: WireRequest) -> Http1Connection:
        with _in_time(request, request.connect_s) as longest_s:
            sock, tls = connect(
                self._dns,
                longest_s,
                context=self._context,
                is_small=request.way is Way.STOP_READING,
            )
        request.is_opened = True
        if request.tap is not None:
            request.tap.connected(time.perf_counter_ns())
        return Http1Connection(sock, request.next_byte_s, tls=tls)

    def close(self) -> None:
        for connection in self._pool:
            connection.sock.close()
        self._pool.clear()

    def _may_share(self, request: WireRequest) -> bool:
        return self._keep_alive and request.way is None

    def _ask_again(self, request: WireRequest) -> Http1Connection | None:
        used = self._pooled()
        if used is None:
            return None
        request.is_opened = True
        connection = Http1Connection(used.sock, request.next_byte_s, tls=used.tls)
        try:
            self._ask(request, connection)
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            if connection.received_bytes:
                raise
            request.is_resent = True
            return None
        self.num_reused += 1
        return connection

    def _pooled(self) -> Http1Connection | None:
        while self._pool:
            connection = self._pool.pop()
            if not connection.has_input():
                return connection
            connection.sock.close()
        return None

    def _ask(self, request: WireRequest, connection: Http1Connection) -> None:
        try:
            is_whole = False
            with (
                contextlib.suppress(GaveUpError),
                _in_time(request, request.next_byte_s) as longest_s,
            ):
                is_whole = connection.send(request.head + request.body, longest_s)
            if request.tap is not None:
                request.tap.wrote(time.perf_counter_ns(), request.head + request.body)
            if request.way is Way.KILLED:
                connection.give_to_process()
            connection.limit = request.limit
            if is_whole and self._may_share(request):
                # Otherwise the server would read the next request as the tail of this one.
                connection.pass_on = self._pool.append
            leaves_at_ns = request.leaves_at_ns
            if request.patience_ns is not None:
                leaves_at_ns = time.perf_counter_ns() + request.patience_ns
            with contextlib.suppress(GaveUpError):
                connection.receive_head(leaves_at_ns)
        except BaseException:
            connection.close()
            raise


@contextlib.contextmanager
def _in_time(request: WireRequest, longest_s: float | None) -> Iterator[float | None]:
    """Yield how long to wait, in seconds: `longest_s`, or less if the request's limit passes or its
    user leaves earlier; then raise that."""
    ends: list[tuple[int, Exception]] = []
    if request.limit is not None:
        ends.append((request.limit.at_ns, httpx.ReadTimeout(request.limit.complaint)))
    if request.leaves_at_ns is not None:
        ends.append((request.leaves_at_ns, GaveUpError()))
    if not ends:
        yield longest_s
        return
    until_ns, why = min(ends, key=lambda end: end[0])
    left_s = (until_ns - time.perf_counter_ns()) / 1e9
    if longest_s is not None and longest_s <= left_s:
        yield longest_s
        return
    if left_s <= 0:
        raise why
    try:
        yield left_s
    except httpx.TimeoutException as late:
        raise why from late


def head_of(target: bytes, fields: list[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
    lines = [b"POST %b HTTP/1.1" % target, *(b"%b: %b" % pair for pair in fields)]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""])
