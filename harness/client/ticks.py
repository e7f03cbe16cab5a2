"""A timer of the kernel whose descriptor becomes readable. An event loop's own timers are a
millisecond coarse, longer than a token waits. Linux only.
"""

import ctypes
import os
import struct
from typing import Final

_CLOCK_MONOTONIC: Final = 1
_TFD_TIMER_ABSTIME: Final = 1
_COUNT: Final = struct.Struct("=Q")


def kernel_can_tick() -> bool:
    return hasattr(ctypes.CDLL(None), "timerfd_create")


class KernelTimer:
    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "no timer of the kernel's")

    def set(self, at_ns: int, interval_ns: int = 0) -> None:
        times = (*divmod(interval_ns, 1_000_000_000), *divmod(at_ns, 1_000_000_000))
        setting = struct.pack("=4q", *times)
        if self._libc.timerfd_settime(self.descriptor, _TFD_TIMER_ABSTIME, setting, None):
            raise OSError(ctypes.get_errno(), "no timer of the kernel's")

    def take(self) -> int:
        (number,) = _COUNT.unpack(os.read(self.descriptor, _COUNT.size))
        return int(number)

    def close(self) -> None:
        os.close(self.descriptor)
