"""The load watching itself: how late each tick of a short timer was noticed.

That is the floor below which the stamps of this process mean nothing. One watch lasts as long as
the process; where it writes changes with each load that a web page starts.
"""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import gevent
from gevent import monkey

from harness.load.rows import ShardWriter
from harness.load.ticks import KernelTicks, ThreadTicks, Ticks, kernel_can_tick
from harness.records import ClientSample

_TICK_NS: Final = 10_000_000
_READ: Final = 1


class LagWatch:
    """Writes a sample a tick into `rows_dir`, and nothing while that is None."""

    def __init__(self, *, open_streams: Callable[[], int], give_up: Callable[[str], None]) -> None:
        self.rows_dir: Path | None = None
        self._open_streams = open_streams
        self._give_up = give_up
        gevent.spawn(self._watch)

    def _watch(self) -> None:
        ticks = _ticks()
        hub = gevent.get_hub()
        readable = hub.loop.io(ticks.descriptor, _READ)
        while True:
            while self.rows_dir is None:
                hub.wait(readable)
                ticks.take()
            try:
                with ShardWriter(self.rows_dir, ClientSample, os.getpid()) as shard:
                    self._write(shard, ticks, lambda: hub.wait(readable), self.rows_dir)
            except OSError as error:
                why = f"the load's own lag can no longer be written down: {error.strerror}"
                self._give_up(why)
                self.rows_dir = None

    def _write(
        self,
        shard: ShardWriter[ClientSample],
        ticks: Ticks,
        wait: Callable[[], object],
        rows_dir: Path,
    ) -> None:
        host, pid = platform.node(), os.getpid()
        while self.rows_dir == rows_dir:
            wait()
            now_ns, cpu_s = time.perf_counter_ns(), time.process_time()
            for due_ns in ticks.take():
                shard.write(
                    ClientSample(
                        t_ns=now_ns,
                        pid=pid,
                        lag_ns=now_ns - due_ns,
                        cpu_s=cpu_s,
                        streams=self._open_streams(),
                        host=host,
                    )
                )


def _ticks() -> Ticks:
    if kernel_can_tick():
        return KernelTicks(_TICK_NS)
    return ThreadTicks(  # of the system, not of gevent
        _TICK_NS,
        start_thread=monkey.get_original("_thread", "start_new_thread"),
        sleep=monkey.get_original("time", "sleep"),
    )
