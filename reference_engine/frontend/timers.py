"""What a request has a right to wait for: its deadline, and its client's next ping."""

import asyncio
from collections.abc import Callable


class RequestTimers:
    """Runs from its making until `stop`. None: no such bound."""

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
        """The bound for the next ping runs from now."""
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
