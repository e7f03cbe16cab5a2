"""Receiving on one socket, of the operating system or of gevent: there the event loop's callback
reads and hands the bytes over, so a token that changes nothing wakes no greenlet.
"""

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from greenlet import getcurrent

_RECEIVE_BYTES: Final = 65536
_READ: Final = 1

# Takes the bytes of one receive (none: the end of the connection) and their time; returns whether
# to wait for more. It must not wait itself.
Take = Callable[[bytes, int], bool]


def receiver(sock: socket.socket) -> "BlockingReceiver | HubReceiver":
    hub = getattr(sock, "hub", None)  # only gevent's sockets have one; gevent is not imported here
    return BlockingReceiver(sock) if hub is None else HubReceiver(sock, hub)


class BlockingReceiver:
    """Close it before the socket. Both methods raise OSError, and TimeoutError or BlockingIOError
    if nothing came for `longest_s` seconds or `until_ns` has passed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self, longest_s: float | None) -> bytes:
        self._sock.settimeout(longest_s)
        return self._sock.recv(_RECEIVE_BYTES)

    def receive_each(self, take: Take, longest_s: float | None, until_ns: int | None) -> None:
        """Hand over receive by receive while `take` returns True. Exceptions of `take` are raised
        here."""
        goes_on = True
        while goes_on:
            now_ns = time.perf_counter_ns()
            due_ns = _due_ns(now_ns, _ns(longest_s), until_ns)
            if due_ns is not None and due_ns <= now_ns:
                raise TimeoutError
            data = self.receive(None if due_ns is None else (due_ns - now_ns) / 1e9)
            goes_on = take(data, time.perf_counter_ns())

    def close(self) -> None:
        """Nothing to release."""


class HubReceiver:
    """Reads a socket of gevent's, which must stay non-blocking. `_waiting` is the greenlet that
    waits now; `_since_ns`, when the latest bytes came; `_fires_ns`, the time for which the timer is
    set."""

    def __init__(self, sock: socket.socket, hub: Any) -> None:
        self._read = partial(os.read, sock.fileno(), _RECEIVE_BYTES)
        self._hub = hub
        self._watcher = hub.loop.io(sock.fileno(), _READ)
        self._timer: Any = None
        self._waiting: Any = None
        self._take: Take | None = None
        self._since_ns = 0
        self._longest_ns: int | None = None
        self._until_ns: int | None = None
        self.is_watched = False
        self._fires_ns: int | None = None

    def receive(self, longest_s: float | None) -> bytes:
        if longest_s is not None and longest_s <= 0:
            return self._read()
        came: list[bytes] = []

        def take(data: bytes, _t_ns: int) -> bool:
            came.append(data)
            return False

        self.receive_each(take, longest_s, None)
        return came[0]

    def receive_each(self, take: Take, longest_s: float | None, until_ns: int | None) -> None:
        self._longest_ns, self._until_ns = _ns(longest_s), until_ns
        self._since_ns = time.perf_counter_ns()
        self._keep_timer()
        if not self.is_watched:
            self.is_watched = True
            self._watcher.start(self._on_readable)
        self._waiting, self._take = getcurrent(), take
        try:
            while self._hub.switch() is not self:
                """Another greenlet woke this one: there is nothing to read yet."""
        finally:
            self._waiting = self._take = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
        self._watcher.close()

    def _on_readable(self) -> None:
        if self._take is None:
            self.is_watched = False
            self._watcher.stop()
            return
        try:
            data = self._read()
            self._since_ns = t_ns = time.perf_counter_ns()
            goes_on = self._take(data, t_ns)
        except BlockingIOError:
            return  # a false alarm
        except Exception as error:  # noqa: BLE001  for the waiting greenlet
            self._waiting.throw(type(error), error, error.__traceback__)
            return
        if not goes_on:
            self._waiting.switch(self)

    def _keep_timer(self) -> None:
        due_ns = _due_ns(self._since_ns, self._longest_ns, self._until_ns)
        if due_ns is None or (self._fires_ns is not None and self._fires_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.close()
        self._fires_ns = due_ns
        left_s = max(0, due_ns - time.perf_counter_ns()) / 1e9
        self._timer = self._hub.loop.timer(left_s)
        self._timer.start(self._on_timer, update=True)

    def _on_timer(self) -> None:
        self._fires_ns = None
        if self._waiting is not None:
            self._on_readable()
        if self._waiting is None:
            return
        due_ns = _due_ns(self._since_ns, self._longest_ns, self._until_ns)
        if due_ns is not None and due_ns <= time.perf_counter_ns():
            self._waiting.throw(TimeoutError)
        else:
            self._keep_timer()


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)


def _due_ns(since_ns: int, longest_ns: int | None, until_ns: int | None) -> int | None:
    if longest_ns is None:
        return until_ns
    due_ns = since_ns + longest_ns
    return due_ns if until_ns is None else min(due_ns, until_ns)
