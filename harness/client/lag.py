"""The load's own lag: how late each tick of a short timer was noticed. Below this floor the stamps
of this process mean nothing.

A tick is noticed as a token is: the loop calls back, no greenlet waits, and several samples are
written at once. A killed process loses its last unsaved samples.
"""

import os
import platform
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import gevent

from harness.client.shards import ShardWriter
from harness.client.ticks import KernelTimer, kernel_can_tick
from harness.records import ClientSample

_TICK_NS: Final = 20_000_000
_SAMPLES_A_WRITE: Final = 10
_READ: Final = 1
_LATEST: Final = 500  # ten seconds


class LagWatch:
    """`latest_ns`: the lags of the latest ticks."""

    def __init__(self, *, open_streams: Callable[[], int], give_up: Callable[[str], None]) -> None:
        self._open_streams = open_streams
        self._give_up = give_up
        self._host, self._pid = platform.node(), os.getpid()
        self._shard: ShardWriter[ClientSample] | None = None
        self._samples: list[ClientSample] = []
        self.latest_ns: deque[int] = deque(maxlen=_LATEST)
        self._timer = KernelTimer() if kernel_can_tick() else None
        self._due_ns = time.perf_counter_ns() + _TICK_NS
        loop = gevent.get_hub().loop
        if self._timer is None:  # the loop's own are coarser: so is the floor that they find
            self._watcher = loop.timer(_TICK_NS / 1e9, _TICK_NS / 1e9)
        else:
            self._timer.set(self._due_ns, _TICK_NS)
            self._watcher = loop.io(self._timer.descriptor, _READ)
        self._watcher.start(self._on_tick)

    def begin(self, rows_dir: Path) -> None:
        self.end()
        try:
            self._shard = ShardWriter(rows_dir, ClientSample, self._pid)
        except OSError as error:
            self._stop(error)

    def end(self) -> None:
        self._flush()
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def _on_tick(self) -> None:
        now_ns, first_ns = time.perf_counter_ns(), self._due_ns
        if self._timer is None:
            self._due_ns = now_ns + _TICK_NS
            due = range(first_ns, first_ns + 1)
        else:
            self._due_ns += self._timer.take() * _TICK_NS
            due = range(first_ns, self._due_ns, _TICK_NS)
        self.latest_ns.extend(now_ns - due_ns for due_ns in due)
        if self._shard is None:
            return
        cpu_s, streams = time.process_time(), self._open_streams()
        for due_ns in due:
            self._samples.append(
                ClientSample(
                    t_ns=now_ns,
                    pid=self._pid,
                    lag_ns=now_ns - due_ns,
                    cpu_s=cpu_s,
                    streams=streams,
                    host=self._host,
                )
            )
        if len(self._samples) >= _SAMPLES_A_WRITE:
            self._flush()

    def _flush(self) -> None:
        samples, self._samples = self._samples, []
        if self._shard is None:
            return
        try:
            self._shard.write(*samples)
        except OSError as error:
            self._shard.close()
            self._shard = None
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        """`give_up` may wait, which the loop's callback must not: it gets a greenlet."""
        why = f"the load's own lag can no longer be written down: {error.strerror}"
        gevent.spawn(self._give_up, why)
