"""A clock that ticks through a descriptor, as tokens come.

An event loop's own timers are a millisecond coarse, longer than a token waits, and are not noticed
the way bytes are. So the kernel ticks: on Linux by a timerfd, elsewhere by a thread that writes to
a pipe. The thread costs twice as much, as at each tick it and the event loop wait for each other.

https://man7.org/linux/man-pages/man2/timerfd_create.2.html
"""

import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

_CLOCK_MONOTONIC: Final = 1
_TFD_TIMER_ABSTIME: Final = 1
_COUNT: Final = struct.Struct("=Q")
_DUE: Final = struct.Struct("=q")


def kernel_can_tick() -> bool:
    return hasattr(ctypes.CDLL(None), "timerfd_create")


class Ticks(Protocol):
    """`descriptor` becomes readable when a tick is due."""

    descriptor: int

    def take(self) -> Sequence[int]:
        """The due time of each tick since the last call: ns of the monotonic clock."""


class _KernelTimer:
    """A timerfd: `descriptor` becomes readable at the time that was set."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "no timer of the kernel's")

    def _set(self, at_ns: int, interval_ns: int = 0) -> None:
        """Go off at this time of the monotonic clock, at once if it is past, and again after each
        interval."""
        times = (*divmod(interval_ns, 1_000_000_000), *divmod(at_ns, 1_000_000_000))
        setting = struct.pack("=4q", *times)
        if self._libc.timerfd_settime(self.descriptor, _TFD_TIMER_ABSTIME, setting, None):
            raise OSError(ctypes.get_errno(), "no timer of the kernel's")


class KernelTicks(_KernelTimer):
    def __init__(self, interval_ns: int) -> None:
        super().__init__()
        self._interval_ns = interval_ns
        self._next_ns = time.perf_counter_ns() + interval_ns
        self._set(self._next_ns, interval_ns)

    def take(self) -> Sequence[int]:
        (number,) = _COUNT.unpack(os.read(self.descriptor, _COUNT.size))
        first_ns = self._next_ns
        self._next_ns += number * self._interval_ns
        return range(first_ns, self._next_ns, self._interval_ns)


class KernelAlarm(_KernelTimer):
    def set(self, at_ns: int) -> None:
        self._set(at_ns)

    def close(self) -> None:
        os.close(self.descriptor)


class ThreadTicks:
    """A pipe, written to by a thread that sleeps."""

    def __init__(
        self,
        interval_ns: int,
        *,
        start_thread: Callable[[Callable[[], None], tuple[()]], object],
        sleep: Callable[[float], None],
    ) -> None:
        self.descriptor, self._writer = os.pipe()
        self._interval_ns = interval_ns
        self._sleep = sleep
        start_thread(self._tick, ())

    def take(self) -> Sequence[int]:
        return _DUE.unpack(os.read(self.descriptor, _DUE.size))

    def _tick(self) -> None:
        due_ns = time.perf_counter_ns()
        while True:
            due_ns += self._interval_ns
            self._sleep(max(0, due_ns - time.perf_counter_ns()) / 1e9)
            os.write(self._writer, _DUE.pack(due_ns))
