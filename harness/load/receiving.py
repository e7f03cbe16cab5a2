"""Waiting for bytes on one socket, once for every token: as little as that can be.

A socket of gevent's tries first and waits then, with a timer for each wait. Of streams, nothing has
come yet whenever one asks: the try is an exception for nothing, and the timers hardly ever fire.
Both together cost more than all that is done with the token. So here we wait first, and have one
timer for all waits of a socket. It is set to when a wait would be too long and left alone as the
next waits push that on; when it fires it looks whether somebody has really waited for so long.
"""

import socket
import time
from typing import Any, Final, Protocol

_RECEIVE_BYTES: Final = 65536
_READ: Final = 1


class Receiver(Protocol):
    """Receives on one socket. To be closed before the socket is."""

    def receive(self, wait_s: float | None) -> bytes:
        """What comes within so many seconds (None: whenever it comes; 0 never waits).

        Nothing (b"") is the end of the connection. Raises TimeoutError or BlockingIOError when
        nothing comes in time, and OSError.
        """

    def close(self) -> None: ...


def receiver(sock: socket.socket) -> Receiver:
    """The way to receive on this socket. One that has a hub is gevent's (not imported here)."""
    hub = getattr(sock, "hub", None)
    return BlockingReceiver(sock) if hub is None else HubReceiver(sock, hub)


class BlockingReceiver:
    """On a socket of the system's."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self, wait_s: float | None) -> bytes:
        self._sock.settimeout(wait_s)
        return self._sock.recv(_RECEIVE_BYTES)

    def close(self) -> None:
        """There is nothing to release."""


class HubReceiver:
    """On a socket of gevent's, which waits in its `hub`. The socket must not be made to wait.

    Its state: `_due_ns`, when the wait in progress is too long (None: nobody waits, or for as long
    as it takes), and `_fires_ns`, for when the timer is set (None: it is not).
    """

    def __init__(self, sock: socket.socket, hub: Any) -> None:
        sock.settimeout(0)
        self._receive = sock.recv
        self._wait = hub.wait
        self._hub = hub
        self._readable = hub.loop.io(sock.fileno(), _READ)
        self._timer: Any = None
        self._due_ns: int | None = None
        self._fires_ns: int | None = None

    def receive(self, wait_s: float | None) -> bytes:
        if wait_s is None:
            self._wait(self._readable)
        elif wait_s > 0:
            self._wait_until(time.perf_counter_ns() + int(wait_s * 1e9))
        return self._receive(_RECEIVE_BYTES)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
        self._readable.close()

    def _wait_until(self, due_ns: int) -> None:
        self._due_ns = due_ns
        if self._fires_ns is None or due_ns < self._fires_ns:
            self._set_timer(due_ns)
        try:
            self._wait(self._readable)
        except TimeoutError:
            if time.perf_counter_ns() >= due_ns:
                raise
            # It was meant for the wait before, whose bytes came at the same moment.
            self._wait_until(due_ns)
        finally:
            self._due_ns = None

    def _set_timer(self, fires_ns: int) -> None:
        if self._timer is not None:
            self._timer.close()
        self._fires_ns = fires_ns
        left_s = max(0, fires_ns - time.perf_counter_ns()) / 1e9
        self._timer = self._hub.loop.timer(left_s)
        self._timer.start(self._look, update=True)

    def _look(self) -> None:
        self._fires_ns = None
        due_ns = self._due_ns
        if due_ns is None:
            return
        if time.perf_counter_ns() < due_ns:
            self._set_timer(due_ns)
        else:
            self._hub.cancel_wait(self._readable, TimeoutError("nothing came"))
