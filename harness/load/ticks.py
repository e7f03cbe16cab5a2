"""A clock that ticks through a descriptor, as tokens come.

An event loop's own timers are a millisecond coarse, which is more than a token waits, and they are
noticed in another way than bytes are. So the kernel ticks: Linux with a timer of its own, and
elsewhere a thread that writes to a pipe. The thread costs twice as much, as at each tick it and the
event loop wait for each other.

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
    """Whether this system has `KernelTicks`."""
    return hasattr(ctypes.CDLL(None), "timerfd_create")


class Ticks(Protocol):
    """A descriptor that can be read once a tick is due, and `take`, to be asked then."""

    descriptor: int

    def take(self) -> Sequence[int]:
        """When each tick that has come since the last time was due: ns of the monotonic clock."""


class KernelTicks:
    """A timerfd. `_next_ns` is when the next tick that was not taken is due."""

    def __init__(self, interval_ns: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        self._interval_ns = interval_ns
        self._next_ns = time.perf_counter_ns() + interval_ns
        setting = struct.pack(
            "=4q", *divmod(interval_ns, 1_000_000_000), *divmod(self._next_ns, 1_000_000_000)
        )
        if self.descriptor < 0 or libc.timerfd_settime(
            self.descriptor, _TFD_TIMER_ABSTIME, setting, None
        ):
            raise OSError(ctypes.get_errno(), "no timer of the kernel's")

    def take(self) -> Sequence[int]:
        (number,) = _COUNT.unpack(os.read(self.descriptor, _COUNT.size))
        first_ns = self._next_ns
        self._next_ns += number * self._interval_ns
        return range(first_ns, self._next_ns, self._interval_ns)


class KernelAlarm:
    """A timerfd that goes off once: `descriptor` can be read from then on, until it is `set`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "no timer of the kernel's")

    def set(self, at_ns: int) -> None:
        """Go off at this time of the monotonic clock; at once where it is past."""
        setting = struct.pack("=4q", 0, 0, *divmod(at_ns, 1_000_000_000))
        if self._libc.timerfd_settime(self.descriptor, _TFD_TIMER_ABSTIME, setting, None):
            raise OSError(ctypes.get_errno(), "no timer of the kernel's")

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
