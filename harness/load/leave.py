"""The ways of leaving: what is done to the connection, and t0, stamped immediately before it.

To add a way, add it to `records.Way` and to `leave` below; when a user leaves is a plan, see
`harness.workload.abandon`.

    FIN, RST       the socket is closed: orderly, or with a reset
    HALF_CLOSE     its sending side is closed; what still comes is read
    STOP_READING   nothing is done, and nothing read any more; the kernel goes on acknowledging
                   until its buffer is full
    VANISH         the kernel drops whatever comes for the socket before acknowledging it: to the
                   server this host is gone. It needs Linux, but neither a packet filter of the
                   system nor a privilege; elsewhere it is STOP_READING, and `wire_close` says so
    KILLED         the process that owns the connection gets a SIGKILL
    CANCEL         the server's cancel endpoint is asked; the stream is read to its end

Over TLS the orderly ways, FIN and HALF_CLOSE, first send a close_notify, as RFC 8446 (6.1) asks and
as curl, Go and browsers do; the others leave without a word, as a crash does. After a HALF_CLOSE a
server may answer on by TLS 1.3; by TLS 1.2 it may not, and many servers never do.

https://www.kernel.org/doc/html/latest/networking/filter.html for the filter on a socket.
"""

import ctypes
import os
import socket
import struct
import time
from typing import Final, NamedTuple
from urllib.parse import quote

import httpx

from harness.load.connection import Connection
from harness.load.transport import SocketTransport, WireRequest, head_of, send
from harness.records import Way, WireClose

READS_ON: Final = frozenset({Way.HALF_CLOSE, Way.CANCEL})  # the client still reads after leaving

_SO_ATTACH_FILTER: Final = 26
_DROP_ALL: Final = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction: return 0 bytes


class CloseResult(NamedTuple):
    """When the user left (t0), and what the kernel sent then."""

    t0_ns: int
    wire_close: WireClose


def leave(way: Way, connection: Connection) -> CloseResult:
    """Leave now, however far the answer came. Raises httpx.TransportError if that is impossible.

    A cancel is sent on a connection of its own: `CancelRequest.send`.
    """
    match way:
        case Way.FIN:
            return hang_up(connection)
        case Way.RST:
            return _reset(connection)
        case Way.HALF_CLOSE:
            return _half_close(connection)
        case Way.STOP_READING:
            connection.keep_open()
            return CloseResult(time.perf_counter_ns(), WireClose.NOTHING)
        case Way.VANISH:
            return _vanish(connection)
        case Way.KILLED:
            return _kill(connection)
        case Way.CANCEL:
            raise ValueError("a cancel is sent on a connection of its own")


def hang_up(connection: Connection) -> CloseResult:
    """Close. The kernel sends a reset instead if bytes were not read."""
    t0_ns = time.perf_counter_ns()
    wire_close = WireClose.RST if connection.unread_bytes() else WireClose.FIN
    connection.close()
    _give_way()
    return CloseResult(t0_ns, wire_close)


def _reset(connection: Connection) -> CloseResult:
    t0_ns = time.perf_counter_ns()
    connection.reset()
    _give_way()
    return CloseResult(t0_ns, WireClose.RST)


def _half_close(connection: Connection) -> CloseResult:
    t0_ns = time.perf_counter_ns()
    connection.say_last()
    try:
        connection.sock.shutdown(socket.SHUT_WR)
    except OSError as error:
        raise httpx.WriteError(f"the connection broke: {error}") from error
    _give_way()
    return CloseResult(t0_ns, WireClose.FIN)


def _vanish(connection: Connection) -> CloseResult:
    connection.keep_open()
    instructions = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    t0_ns = time.perf_counter_ns()
    try:
        connection.sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:
        return CloseResult(t0_ns, WireClose.NOTHING)
    return CloseResult(t0_ns, WireClose.SILENCE)


def _kill(connection: Connection) -> CloseResult:
    assert connection.owner is not None
    t0_ns = time.perf_counter_ns()
    connection.owner.kill()
    return CloseResult(t0_ns, WireClose.KERNEL)


def _give_way() -> None:
    # On a shared core the server should wake up to the close before this process goes on.
    os.sched_yield()


class CancelRequest:
    """One request to cancel another; the connection is made before t0."""

    def __init__(
        self,
        transport: SocketTransport,
        target: bytes,
        fields: list[tuple[bytes, bytes]],
        timeout_s: float,
    ) -> None:
        head = head_of(target, fields)
        self._request = WireRequest(head=head, connect_s=timeout_s, next_byte_s=timeout_s)
        self._timeout_s = timeout_s
        self._wire = transport.connect(self._request)

    def close(self) -> None:
        self._wire.sock.close()

    def send(self) -> CloseResult:
        """Raises httpx.TransportError."""
        t0_ns = time.perf_counter_ns()
        send(self._wire, self._request, self._timeout_s)
        return CloseResult(t0_ns, WireClose.NOTHING)

    def problem(self) -> str | None:
        """Wait for the endpoint's answer; None: it agreed."""
        connection = Connection(self._wire.sock, self._timeout_s, tls=self._wire.tls)
        try:
            connection.receive_head(None)
        except httpx.TransportError as error:
            return f"the cancel endpoint did not answer: {error}"
        finally:
            connection.close()
        if 200 <= connection.status_code < 300:
            return None
        return f"the cancel endpoint answered HTTP {connection.status_code}"


def cancel_url(url: str, path: str, request_id: str) -> str:
    """The id of the request replaces {id} in the path."""
    return url.rstrip("/") + path.replace("{id}", quote(request_id, safe=""))
