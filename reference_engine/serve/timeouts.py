"""Bounds on waits: for a send or an output, for a request's deadline, for its client's pings.

`asyncio.timeout` makes a timer for each wait and throws it away. A `Patience` suits many waits that
are mostly short: entering one is an assignment, and one timer checks now and then whether the
present wait is too long. Then the wait is cancelled, as with `asyncio.timeout`.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final

_LOOKS: Final = 4  # within the time, where there may be progress


class RanOutError(Exception):
    """A wait took too long."""


class Patience:
    """`with patience: await something()` raises RanOutError after `seconds`; 0: never.

    For waits of the task that makes it, one at a time. `goes_on`: whether there was progress since
    the last call. While there is, the wait goes on; without progress it ends up to a quarter late.
    """

    def __init__(self, seconds: float, goes_on: Callable[[], bool] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._seconds = seconds
        self._goes_on = goes_on
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._num_cancelled = 0

    def stop(self) -> None:
        """Call it after the last wait: an earlier one may have left a timer."""
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> None:
        self._since = self._loop.time()
        if self._timer is None and self._seconds:
            self._look_later(self._since)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._since = None
        if not self._is_over:
            return
        self._is_over = False
        assert self._task is not None
        is_ours_alone = self._task.uncancel() <= self._num_cancelled
        if is_ours_alone and kind is asyncio.CancelledError:
            raise RanOutError from error

    def _look_later(self, since: float) -> None:
        end = since + self._seconds
        if self._goes_on is not None:
            end = min(end, self._loop.time() + self._seconds / _LOOKS)
        self._timer = self._loop.call_at(end, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        if self._goes_on is not None and self._goes_on():
            self._since = self._loop.time()
        if self._loop.time() < self._since + self._seconds:
            self._look_later(self._since)
            return
        assert self._task is not None
        self._is_over = True
        self._num_cancelled = self._task.cancelling()
        self._task.cancel()


class RequestTimers:
    """A request's deadline and its next ping, until `stop`. None: no such bound."""

    def __init__(
        self,
        *,
        deadline_s: float | None,
        on_deadline: Callable[[], object],
        ping_s: float | None,
        on_no_ping: Callable[[], object],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = self._after(deadline_s, on_deadline)
        self._ping_s = ping_s
        self._on_no_ping = on_no_ping
        self._next_ping = self._after(ping_s, on_no_ping)

    def ping(self) -> None:
        if self._next_ping is not None:
            self._next_ping.cancel()
            self._next_ping = self._after(self._ping_s, self._on_no_ping)

    def stop(self) -> None:
        for timer in (self._deadline, self._next_ping):
            if timer is not None:
                timer.cancel()

    def _after(
        self, seconds: float | None, callback: Callable[[], object]
    ) -> asyncio.TimerHandle | None:
        return None if seconds is None else self._loop.call_later(seconds, callback)
