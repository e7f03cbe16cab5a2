"""Waiting for bytes on one socket, once for every token: as little as that can be.

A socket of gevent's tries first and waits then, with a timer and a watcher for each wait. Of
streams, nothing has come yet whenever one asks: the try is an exception for nothing, the timers
hardly ever fire, and the next wait is for the same. Together they cost more than all that is done
with the token. So here we wait first, and have one timer and one watcher for all waits of a socket.
The timer is set to when a wait would be too long and left alone as the next waits push that on;
when it fires it looks whether somebody has really waited for so long. Even then it is the socket
that is asked what to say: what came as late as the timer is received. The watcher is stopped only
when there is something to be read and nobody waits for it: it would fire again and again.
"""

import socket
import time
from typing import Any, Final, Protocol

from greenlet import getcurrent

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

    Its state: `_waiting`, who waits now, if anybody; `_due_ns`, when that wait is too long (None:
    it takes as long as it takes); `is_watched`, whether the watcher is started; `_fires_ns`, for
    when the timer is set (None: it is not).
    """

    def __init__(self, sock: socket.socket, hub: Any) -> None:
        sock.settimeout(0)
        self._receive = sock.recv
        self._hub = hub
        self._watcher = hub.loop.io(sock.fileno(), _READ)
        self._timer: Any = None
        self._waiting: Any = None
        self._due_ns: int | None = None
        self.is_watched = False
        self._fires_ns: int | None = None

    def receive(self, wait_s: float | None) -> bytes:
        if wait_s is None:
            self._wait()
        elif wait_s > 0:
            self._due_ns = due_ns = time.perf_counter_ns() + int(wait_s * 1e9)
            if self._fires_ns is None or due_ns < self._fires_ns:
                self._set_timer(due_ns)
            self._wait()
        return self._receive(_RECEIVE_BYTES)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
        self._watcher.close()

    def _wait(self) -> None:
        if not self.is_watched:
            self.is_watched = True
            self._watcher.start(self._on_readable)
        self._waiting = getcurrent()
        try:
            while self._hub.switch() is not self:
                """Somebody else's doing: there is nothing to read yet."""
        finally:
            self._waiting = self._due_ns = None

    def _on_readable(self) -> None:
        if self._waiting is None:
            self.is_watched = False
            self._watcher.stop()
        else:
            self._waiting.switch(self)

    def _set_timer(self, fires_ns: int) -> None:
        if self._timer is not None:
            self._timer.close()
        self._fires_ns = fires_ns
        left_s = max(0, fires_ns - time.perf_counter_ns()) / 1e9
        self._timer = self._hub.loop.timer(left_s)
        self._timer.start(self._on_timer, update=True)

    def _on_timer(self) -> None:
        self._fires_ns = None
        due_ns = self._due_ns
        if due_ns is None:
            return
        if time.perf_counter_ns() < due_ns:
            self._set_timer(due_ns)
        else:
            self._waiting.switch(self)
