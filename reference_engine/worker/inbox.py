"""Messages on their way from the socket to the step loop.

`put` and `drain` each read the clock under one lock. So a message stamped before a step started is
always applied before that step.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from reference_engine.protocol import ToWorker


class ConnectionLost(NamedTuple):
    """The frontend's connection has ended, and its requests with it.

    `applied` is set once they are gone; only then is another connection accepted.
    """

    applied: threading.Event


class Heard(NamedTuple):
    t_ns: int
    message: ToWorker | ConnectionLost


class Inbox:
    """A queue from one reading thread to one working thread.

    `_messages` and `_closed` change under `_changed` only.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._messages: list[Heard] = []
        self._closed = False

    def put(self, message: ToWorker | ConnectionLost) -> None:
        with self._changed:
            self._messages.append(Heard(self._now_ns(), message))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def drain(self, *, timeout_s: float | None) -> tuple[int, list[Heard]] | None:
        """The step boundary: its time, and all messages heard before it.

        Waits for a message, at most `timeout_s` (None: as long as it takes). None once the inbox is
        closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed, timeout_s)
            if self._closed:
                return None
            messages, self._messages = self._messages, []
            return self._now_ns(), messages
