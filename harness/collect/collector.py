"""All sources of a run, each in its own thread.

Each source writes its rows to its own shard as they come, so they survive any end of the run. They
are read back when the threads have ended.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from harness.collect.gpu import Gpus
from harness.collect.lifecycle import LogFollower, NewSteps, SharedLog
from harness.collect.machine import CpuSampler
from harness.collect.scrape import read_samples
from harness.collect.source import Gathered, Notes, SourceError, poll
from harness.records import CpuSample, GpuSample, LifecycleEvent, MetricSample, StepRow
from harness.store.run_folder import RunRows

FOLLOW_INTERVAL_S = 0.2  # the unread log of a target that dies is lost
CPU_INTERVAL_S = 0.25
LOWEST_PRIORITY = 19


def give_way() -> None:
    """Run this thread only when a core is idle: collecting must not slow the server."""
    if sys.platform == "linux":  # there a priority belongs to a thread, elsewhere to a process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


class PageUrls(NamedTuple):
    """`logs`: the frontends of a server with exact logs. With `worker_logs` its processes are
    killed on purpose: its workers' own logs are followed too, and a page that cannot be read is
    only noted."""

    metrics: Sequence[str]
    logs: Sequence[str] = ()
    worker_logs: Sequence[str] = ()


def with_workers_own(
    of_frontends: Callable[[], Iterable[LifecycleEvent]],
    of_workers: Callable[[], Iterable[LifecycleEvent]],
) -> Iterator[LifecycleEvent]:
    """The frontends' events, and events that only a worker still has: the copy of a killed
    frontend's log ends with the last reading. Workers do not know the clients' names of requests.
    """
    clients, known = dict[str, str | None](), set[tuple[str, str, str, int]]()
    own = list(of_workers())
    for event in of_frontends():
        if own:
            clients[event.request_id] = event.client_request_id
            known.add(_key(event))
        yield event
    for event in own:
        if _key(event) not in known:
            event.client_request_id = clients.get(event.request_id)
            yield event


def _key(event: LifecycleEvent) -> tuple[str, str, str, int]:
    return event.request_id, event.event, event.worker, event.t_ns


class Collector:
    """Starts the sources on entry and stops them on exit. Rows go to shards in `rows_dir`.

    Metrics pages are scraped with pauses that `scrape_pause_s` draws, if given.
    The collector owns and closes `client`, and the GPUs that it watches.

    `latest_scrape` and `names_seen` (names of all metrics ever seen) change in one thread only; the
    first is replaced as a whole, so other threads may read it.
    """

    def __init__(
        self,
        *,
        rows_dir: Path,
        client: httpx.Client,
        pages: PageUrls,
        scrape_pause_s: Callable[[], float] | None,
        clock_ns: Callable[[], int],
        notes: Notes,
    ) -> None:
        self._cpu = CpuSampler()
        self.latest_scrape: list[MetricSample] = []
        self.names_seen: set[str] = set()
        self.lifecycle = Gathered(rows_dir, "lifecycle", LifecycleEvent)
        self.steps = Gathered(rows_dir, "steps", StepRow)
        self._of_workers = Gathered(rows_dir, "worker_lifecycle", LifecycleEvent)
        self._gathered: dict[str, Gathered[Any]] = {
            "lifecycle": self.lifecycle,
            "steps": self.steps,
            "server_metrics": Gathered(rows_dir, "server_metrics", MetricSample),
            "cpu": Gathered(rows_dir, "cpu", CpuSample),
            "gpu": Gathered(rows_dir, "gpu", GpuSample),
        }
        self._gpus: Gpus | None = None
        self._clock_ns = clock_ns
        self._notes = notes
        self._metrics_urls = pages.metrics
        self._scrape_pause_s = scrape_pause_s
        self._client = client
        self._complain = notes.add if pages.worker_logs else notes.warn
        self._logs: list[LogFollower[Any] | SharedLog[Any]] = []
        if pages.logs:
            keep = self.steps.add if len(pages.logs) == 1 else NewSteps(self.steps.add)
            self._logs = [
                SharedLog([self._follower(url, self.steps, keep) for url in pages.logs]),
                *(self._follower(url, self.lifecycle) for url in pages.logs),
                *(
                    self._follower(url, self.lifecycle, self._of_workers.add)
                    for url in pages.worker_logs
                ),
            ]
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(thread_name_prefix="collect", initializer=give_way)
        self._running: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._start(self._sample_cpu, lambda: CPU_INTERVAL_S)
        if (gpus := self._gpus) is not None:
            self._start(self._sample_gpus, lambda: gpus.interval_s)
        if self._logs:
            self._try(*(log.skip_history for log in self._logs))
            self._start(self._follow, lambda: FOLLOW_INTERVAL_S)
        if self._scrape_pause_s is not None:
            self._start(self._scrape, self._scrape_pause_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads.shutdown()
        self._try(self._sample_cpu)
        self._try(self._follow)  # rows since the last turn, if the server still answers
        self._client.close()
        if self._gpus is not None:
            self._try(self._sample_gpus)
            self._gpus.close()
        for of_one_kind in (*self._gathered.values(), self._of_workers):
            of_one_kind.close()
        for thread in self._running:
            thread.result()

    def watch(self, name: str, pid: int) -> None:
        """Sample the CPU time of one more process."""
        self._cpu.watch(name, pid, self._clock_ns())

    def watch_gpus(self, gpus: Gpus) -> None:
        """Call it before the collector is entered."""
        self._gpus = gpus

    def rows(self) -> RunRows:
        rows = {kind: rows.all() for kind, rows in self._gathered.items()}
        rows["lifecycle"] = with_workers_own(self.lifecycle.all, self._of_workers.all)
        return RunRows(**rows)

    def _follower(
        self, url: str, rows: Gathered[Any], keep: Callable[[list[Any]], None] | None = None
    ) -> LogFollower[Any]:
        log = f"{url}/walkaway/{rows.kind}"
        return LogFollower(self._client, log, rows.row_type, self._notes, keep=keep or rows.add)

    def _start(self, tick: Callable[[], None], pause_s: Callable[[], float]) -> None:
        self._running.append(
            self._threads.submit(
                poll, tick, pause_s=pause_s, stop=self._stop, complain=self._complain
            )
        )

    def _try(self, *acts: Callable[[], None]) -> None:
        for act in acts:
            try:
                act()
            except SourceError as error:
                self._complain(str(error))

    def _follow(self) -> None:
        self._try(*(log.catch_up for log in self._logs))

    def _scrape(self) -> None:
        urls, clock_ns = self._metrics_urls, self._clock_ns
        self.latest_scrape = read_samples(self._client, urls, clock_ns=clock_ns)
        self.names_seen.update(sample.name for sample in self.latest_scrape)
        self._gathered["server_metrics"].add(self.latest_scrape)

    def _sample_cpu(self) -> None:
        self._gathered["cpu"].add(self._cpu.sample(self._clock_ns()))

    def _sample_gpus(self) -> None:
        assert self._gpus is not None
        self._gathered["gpu"].add(self._gpus.sample())
