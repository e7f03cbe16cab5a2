"""All sources of a run, each in its own thread.

Each source writes its rows to its own shard as they come, so they survive any end of the run. They
are read back when the threads have ended.
"""

import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from harness.collect.cpu import CpuSampler
from harness.collect.gpu import GpuSampler
from harness.collect.lifecycle import LogFollower
from harness.collect.scrape import Scraper
from harness.collect.source import Gathered, Notes, SourceError, poll
from harness.records import CpuSample, GpuSample, LifecycleEvent, MetricSample, StepRow
from harness.store.run_folder import RunRows

FOLLOW_INTERVAL_S = 0.2  # the unread log of a target that dies is lost
CPU_INTERVAL_S = 0.25
GPU_INTERVAL_S = 0.1
LOWEST_PRIORITY = 19


def give_way() -> None:
    """Run this thread only when a core is idle: collecting must not slow the server."""
    if sys.platform == "linux":  # there a priority belongs to a thread, elsewhere to a process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


class Scraping(NamedTuple):
    """The pages to read, and the function that draws the pause between two scrapes."""

    urls: Sequence[str]
    pause_s: Callable[[], float]


class Collector:
    """Starts the sources on entry and stops them on exit.

    Without `scraping` nothing is scraped. `lifecycle_url` is None if the server has no such log.
    `cpu` takes further processes at any time. The collector owns and closes `client`. Rows go to
    shards in `rows_dir`.
    """

    def __init__(
        self,
        *,
        rows_dir: Path,
        client: httpx.Client,
        scraping: Scraping | None,
        lifecycle_url: str | None,
        gpu: GpuSampler,
        clock_ns: Callable[[], int],
        notes: Notes,
    ) -> None:
        self.cpu = CpuSampler()
        self._gpu = gpu
        self._clock_ns = clock_ns
        self._notes = notes
        self._scraping = scraping
        self._client = client
        self.lifecycle = Gathered(rows_dir, "lifecycle", LifecycleEvent)
        self.steps = Gathered(rows_dir, "steps", StepRow)
        self._samples = Gathered(rows_dir, "server_metrics", MetricSample)
        self._cpu_rows = Gathered(rows_dir, "cpu", CpuSample)
        self._gpu_rows = Gathered(rows_dir, "gpu", GpuSample)
        self._gathered: Sequence[Gathered[Any]] = (
            self.lifecycle,
            self.steps,
            self._samples,
            self._cpu_rows,
            self._gpu_rows,
        )
        self._scraper = Scraper(
            client,
            () if scraping is None else scraping.urls,
            clock_ns=clock_ns,
            keep=self._samples.add,
        )
        self._lifecycle_url = lifecycle_url
        logs = f"{lifecycle_url}/walkaway"
        self._event_log = LogFollower(
            client, f"{logs}/lifecycle", LifecycleEvent, notes, keep=self.lifecycle.add
        )
        self._step_log = LogFollower(client, f"{logs}/steps", StepRow, notes, keep=self.steps.add)
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
        if self._scraping is not None:
            self._start(self._scraper.scrape, self._scraping.pause_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads.shutdown()
        if self._lifecycle_url is not None:
            self._try(self._follow)  # rows since the last turn, if the server still answers
        self._client.close()
        for of_one_kind in self._gathered:
            of_one_kind.close()
        for thread in self._running:
            thread.result()

    def rows(self) -> RunRows:
        """All rows so far, read back lazily."""
        return RunRows(
            lifecycle=self.lifecycle.all(),
            steps=self.steps.all(),
            server_metrics=self._samples.all(),
            cpu=self._cpu_rows.all(),
            gpu=self._gpu_rows.all(),
        )

    def names_seen(self) -> Collection[str]:
        return self._scraper.names

    def latest_scrape(self) -> list[MetricSample]:
        return self._scraper.latest

    def _start(self, tick: Callable[[], None], pause_s: Callable[[], float]) -> None:
        self._running.append(
            self._threads.submit(poll, tick, pause_s=pause_s, stop=self._stop, notes=self._notes)
        )

    def _follow(self) -> None:
        self._step_log.catch_up()
        self._event_log.catch_up()

    def _skip_history(self) -> None:
        self._step_log.skip_history()
        self._event_log.skip_history()

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except SourceError as error:
            self._notes.warn(str(error))

    def _sample_cpu(self) -> None:
        self._cpu_rows.add(self.cpu.sample(self._clock_ns()))

    def _sample_gpu(self) -> None:
        self._gpu_rows.add(self._gpu.sample(self._clock_ns()))
