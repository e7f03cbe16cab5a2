"""The ways of leaving: what is done to the connection, and t0, stamped immediately before it.

    FIN, RST       the socket is closed: orderly, or with a reset
    HALF_CLOSE     its sending side is closed; what still comes is read
    STOP_READING   nothing is read any more; the kernel acknowledges until its buffer is full
    VANISH         the kernel drops whatever comes for the socket before acknowledging it: to the
                   server this host is gone. Linux only, without a privilege; elsewhere it is
                   STOP_READING, and `wire_close` says so
    KILLED         the process that owns the connection gets a SIGKILL
    CANCEL         the server's cancel endpoint is asked, and the stream read on (`Http1Exchange`)

The ways over gRPC are in kserve.py. To add a way: name it in `Way` with its properties
(harness/records.py), act on it in `_act` below, label it in dashboards/sections/cancel.py, and give
it a row in docs/workloads.md and, for TLS, in docs/connections.md. Some ways need more than an act
on the connection:

    transport.py                   STOP_READING: a small receive buffer; KILLED: an owning process
    exchange.py                    CANCEL: a request of its own; KILLED: what the process had read
    wire_log.py                    the system call that its line in the log names
    harness/simulate/exchange.py   what the simulated kernel sends
    harness/search/                drawn by a search: requests.py, words.py, wire_requests.py
    harness/run/load_plan.py       CANCEL, KILLED: refused where they cannot be done
    harness/analysis/tokens.py     FIN: the share of resets for unread data

Over TLS FIN and HALF_CLOSE first send a close_notify (RFC 8446, 6.1); the others leave without a
word, as a crash does. https://www.kernel.org/doc/html/latest/networking/filter.html
"""

import ctypes
import os
import socket
import struct
import time
from typing import Final, NamedTuple

import httpx

from harness.client.connection import Http1Connection
from harness.errors import in_words
from harness.records import Way, WireClose

_SO_ATTACH_FILTER: Final = 26
_DROP_ALL: Final = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction: return 0 bytes


class CloseResult(NamedTuple):
    t0_ns: int
    wire_close: WireClose


def leave(way: Way, connection: Http1Connection) -> CloseResult:
    left = _act(way, connection)
    # On a shared core the server should wake up to the close before this process continues.
    os.sched_yield()
    return left


def _act(way: Way, connection: Http1Connection) -> CloseResult:
    match way:
        case Way.FIN:
            t0_ns = time.perf_counter_ns()
            # The kernel sends a reset instead if bytes were not read.
            wire_close = WireClose.RST if connection.unread_bytes() else WireClose.FIN
            connection.close()
            return CloseResult(t0_ns, wire_close)
        case Way.RST:
            left = CloseResult(time.perf_counter_ns(), WireClose.RST)
            connection.reset()
            return left
        case Way.HALF_CLOSE:
            return _half_close(connection)
        case Way.STOP_READING:
            connection.is_kept = True
            return CloseResult(time.perf_counter_ns(), WireClose.NOTHING)
        case Way.VANISH:
            return _vanish(connection)
        case Way.KILLED:
            assert connection.owner is not None
            left = CloseResult(time.perf_counter_ns(), WireClose.KERNEL)
            connection.owner.kill()
            return left
        case Way.CANCEL | Way.DEADLINE | Way.CHANNEL_CLOSED | Way.PROCESS_KILLED:
            raise ValueError(f"{way} is no act on the connection itself")


def _half_close(connection: Http1Connection) -> CloseResult:
    t0_ns = time.perf_counter_ns()
    connection.say_last()
    try:
        connection.sock.shutdown(socket.SHUT_WR)
    except OSError as error:
        raise httpx.WriteError(f"the connection broke: {in_words(error)}") from error
    return CloseResult(t0_ns, WireClose.FIN)


def _vanish(connection: Http1Connection) -> CloseResult:
    connection.is_kept = True
    instructions = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    t0_ns = time.perf_counter_ns()
    try:
        connection.sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:
        return CloseResult(t0_ns, WireClose.NOTHING)
    return CloseResult(t0_ns, WireClose.SILENCE)
