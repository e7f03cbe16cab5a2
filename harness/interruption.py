"""Ctrl-C and SIGTERM: the first one asks for an orderly end, the second insists."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Handles the two signals inside its `with` block (main thread only).

    `requested` is set by the handler and looked at by whoever waits. It is a plain attribute and no
    event: a handler runs on the main thread, which may hold the event's lock at that moment.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: list[object] = []

    def handle(self, _signum: int, _frame: FrameType | None) -> None:
        """Note the first signal; raise KeyboardInterrupt at the second."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def pause(self, seconds: float) -> None:
        """Let a little time pass, with the signals handled meanwhile."""
        threading.Event().wait(seconds)

    def __enter__(self) -> Self:
        self._previous = [signal.signal(number, self.handle) for number in HANDLED]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in zip(HANDLED, self._previous, strict=True):
            signal.signal(number, previous)  # type: ignore[arg-type]
