"""What every source of measurements has in common: a thread that looks at something now and then.

A source may fail without ending the run: it raises `SourceError`, which becomes a warning (once),
and it is asked again at the next turn. Any other exception is a bug: it ends that source's thread
and is raised when the collector stops.

Between two turns lies a pause, drawn by a function, so that a source need not keep time with what
it looks at.
"""

import random
import threading
from collections.abc import Callable
from typing import Final

JITTER: Final = 0.25  # of the interval: enough to lose step with any step within a few turns


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


def jittered(
    interval_s: float, rng: random.Random, *, shortest_s: float | None = None
) -> Callable[[], float]:
    """Pauses uniform within 25 % of the interval, whose mean it is.

    An interval that is no less than `shortest_s` is drawn no shorter than that, and then no longer
    than as far beyond the interval.
    """
    width_s = JITTER * interval_s
    if shortest_s is not None and interval_s >= shortest_s:
        width_s = min(width_s, interval_s - shortest_s)
    return lambda: rng.uniform(interval_s - width_s, interval_s + width_s)


def poll(
    tick: Callable[[], None],
    *,
    pause_s: Callable[[], float],
    stop: threading.Event,
    notes: Notes,
) -> None:
    """Call `tick` with pauses between, until `stop`; trouble is noted and it is asked again."""
    while not stop.is_set():
        try:
            tick()
        except SourceError as error:
            notes.warn(str(error))
        stop.wait(pause_s())
