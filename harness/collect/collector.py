"""All sources of a run, each in its thread, and what they gathered.

Every source appends to a list of its own and nobody else writes there; the lists are read when the
threads have ended. They survive whatever ends the run.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import httpx

from harness.collect.cpu import CpuSampler
from harness.collect.gpu import GpuSampler
from harness.collect.lifecycle import LogFollower
from harness.collect.prometheus import Scraper
from harness.collect.source import Notes, SourceError, poll
from harness.records import CpuSample, GpuSample, LifecycleEvent, MetricSample, StepRow
from harness.store import RunRows

FOLLOW_INTERVAL_S = 0.2  # a target that dies takes with it what was not read yet
CPU_INTERVAL_S = 0.25
GPU_INTERVAL_S = 0.1
LOWEST_PRIORITY = 19


def give_way() -> None:
    """Let this thread run when nobody else wants to: watching must not slow what is watched."""
    if sys.platform == "linux":  # there a priority belongs to a thread, elsewhere to a process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


class Collector:
    """Starts the sources on entry and stops them on exit.

    `scrape_pause_s` draws the time from one scrape to the next; without it or without metrics URLs
    nothing is scraped. `lifecycle_url` is None where the server keeps no such log. `cpu` may be
    told of further processes at any time. The `client` is the collector's from now on.
    """

    def __init__(
        self,
        *,
        client: httpx.Client,
        metrics_urls: Sequence[str],
        scrape_pause_s: Callable[[], float] | None,
        lifecycle_url: str | None,
        gpu: GpuSampler,
        clock_ns: Callable[[], int],
        notes: Notes,
    ) -> None:
        self.cpu = CpuSampler()
        self._gpu = gpu
        self._clock_ns = clock_ns
        self._notes = notes
        self._scrape_pause_s = scrape_pause_s if metrics_urls else None
        self._client = client
        self._scraper = Scraper(self._client, metrics_urls, clock_ns=clock_ns)
        self._lifecycle_url = lifecycle_url
        self._lifecycle = LogFollower(
            self._client, f"{lifecycle_url}/walkaway/lifecycle", LifecycleEvent, notes
        )
        self._steps = LogFollower(self._client, f"{lifecycle_url}/walkaway/steps", StepRow, notes)
        self._cpu_rows: list[CpuSample] = []
        self._gpu_rows: list[GpuSample] = []
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(thread_name_prefix="collect", initializer=give_way)
        self._running: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._start(self._sample_cpu, lambda: CPU_INTERVAL_S)
        if self._gpu.names:
            self._start(self._sample_gpu, lambda: GPU_INTERVAL_S)
        if self._lifecycle_url is not None:
            self._try(self._skip_history)
            self._start(self._follow, lambda: FOLLOW_INTERVAL_S)
        if self._scrape_pause_s is not None:
            self._start(self._scraper.scrape, self._scrape_pause_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._threads.shutdown()
        if self._lifecycle_url is not None:
            self._try(self._follow)  # what came since the last turn, if the server still tells
        self._client.close()
        for thread in self._running:
            thread.result()

    def rows(self) -> RunRows:
        """What was gathered so far. The lists grow while the threads run."""
        return RunRows(
            lifecycle=self._lifecycle.rows,
            steps=self._steps.rows,
            server_metrics=self._scraper.samples,
            cpu=self._cpu_rows,
            gpu=self._gpu_rows,
        )

    def latest_scrape(self) -> list[MetricSample]:
        """All samples of the last complete scrape; none before the first."""
        return self._scraper.latest

    def _start(self, tick: Callable[[], None], pause_s: Callable[[], float]) -> None:
        self._running.append(
            self._threads.submit(poll, tick, pause_s=pause_s, stop=self._stop, notes=self._notes)
        )

    def _follow(self) -> None:
        self._steps.catch_up()
        self._lifecycle.catch_up()

    def _skip_history(self) -> None:
        self._steps.skip_history()
        self._lifecycle.skip_history()

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except SourceError as error:
            self._notes.warn(str(error))

    def _sample_cpu(self) -> None:
        self._cpu_rows += self.cpu.sample(self._clock_ns())

    def _sample_gpu(self) -> None:
        self._gpu_rows += self._gpu.sample(self._clock_ns())
