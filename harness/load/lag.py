"""How late this process wakes up: the floor below which its stamps mean nothing.

A load generator that is itself busy reads tokens late and leaves late. The meter is told when a
tick was due and when it was noticed; the worst lateness of each window becomes a sample.
"""

from typing import Final

from harness.records import ClientSample

TIMER_NS: Final = 10_000_000
_WINDOW_NS: Final = 100_000_000


class LagMeter:
    """Collects lateness. State: the current window's start and the worst of it so far."""

    def __init__(self, *, pid: int, now_ns: int) -> None:
        self._pid = pid
        self._window_started_ns = now_ns
        self._worst_ns = 0

    def woke(self, *, due_ns: int, now_ns: int, cpu_s: float, streams: int) -> ClientSample | None:
        """Note one wake-up; returns a sample when it ends a window."""
        self._worst_ns = max(self._worst_ns, now_ns - due_ns)
        if now_ns - self._window_started_ns < _WINDOW_NS:
            return None
        sample = ClientSample(
            t_ns=now_ns, pid=self._pid, lag_ns=self._worst_ns, cpu_s=cpu_s, streams=streams
        )
        self._window_started_ns = now_ns
        self._worst_ns = 0
        return sample
