"""An event loop in which waiting takes no time: with nothing to do, its clock jumps ahead."""

import asyncio
import selectors
from typing import Any


class _ImpatientSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(None if timeout is None else 0)
        if timeout is not None and not events:
            self.now_s += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For tests without sockets: timers fire in order, at once. Waiting for nothing hangs."""

    def __init__(self) -> None:
        self._impatient = _ImpatientSelector()
        super().__init__(self._impatient)

    def time(self) -> float:
        return self._impatient.now_s
