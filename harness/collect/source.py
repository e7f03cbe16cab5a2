"""What every source of measurements has in common: a thread that looks at something now and then.

A source may fail without ending the run: it raises `SourceError`, which becomes a warning (once),
and it is asked again at the next turn. Any other exception is a bug: it ends that source's thread
and is raised when the collector stops.
"""

import threading
from collections.abc import Callable


class SourceError(Exception):
    """A source could not be read just now; the message says which and why."""


class Notes:
    """Remarks for the reader of the run, each kept once, in the order in which they came.

    A text is for information; a warning says that something was lost. Written from several
    threads, under the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, None] = {}
        self._warnings: dict[str, None] = {}

    def add(self, text: str) -> None:
        with self._lock:
            self._texts[text] = None

    def warn(self, text: str) -> None:
        with self._lock:
            self._warnings[text] = None

    def texts(self) -> list[str]:
        with self._lock:
            return list(self._texts)

    def warnings(self) -> list[str]:
        with self._lock:
            return list(self._warnings)


def poll(
    tick: Callable[[], None], *, interval_s: float, stop: threading.Event, notes: Notes
) -> None:
    """Call `tick` every `interval_s` until `stop`; a source in trouble is noted and asked again."""
    while not stop.is_set():
        try:
            tick()
        except SourceError as error:
            notes.warn(str(error))
        stop.wait(interval_s)
