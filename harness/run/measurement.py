"""The measuring part of a run: find the server, collect, run the load, let the server settle.

Each step is noted in the manifest, so the manifest shows how far a run came.
"""

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import Protocol

import httpx

from harness.collect.collector import Collector, Scraping
from harness.collect.gpu import NoGpu, open_gpu_sampler
from harness.collect.scrape import find_unseen, read_roles
from harness.collect.source import News, Notes, jittered
from harness.errors import InterruptedRunError
from harness.http_client import http_client
from harness.records import LifecycleEvent
from harness.run.load_plan import count_arrivals, load_notes, open_loop_notes, prompt_salt
from harness.run.preflight import Preflight, resolve_server
from harness.run.progress import (
    Interruption,
    LatencySoFar,
    PrefixedProgress,
    Progress,
    Snapshot,
    describe_load,
)
from harness.run.run_config import ResolvedRun, make_load_plan
from harness.run.server import Server
from harness.run.settle import (
    CalmWatch,
    IdlePages,
    asker_of,
    may_end_early,
    probe_service,
    settle_seconds,
    silence_seconds,
    typical_step_s,
)
from harness.store.manifest import IdleReading, Manifest, ScheduledArrivals, find_hardware
from harness.store.run_folder import RunFolder, RunRows
from harness.workload.plan import LoadPlan, write_plan

SETTLE_POLL_S = 0.02


def _import_analysis() -> None:
    """Import pandas and scipy, which takes a second, while the server starts."""
    for module in ("harness.store.parquet", "harness.analysis.summary"):
        import_module(module)


class Load(Protocol):
    """Makes the requests of a measurement: a load process, or the users of a web page."""

    def prepare(self, folder: RunFolder, *, processes: int, until_over: ExitStack) -> None:
        """Called before the server is there. Its processes end with `until_over`."""

    def run(self, plan: LoadPlan, run: "Measurement", *, until_settled: ExitStack) -> None:
        """Run the load until its end, or until interrupted.

        Connections that users left open are held until `until_settled` is closed. Raises
        TargetError if the load or the server dies.
        """


class Measurement:
    """One measurement in progress.

    The manifest, filled in step by step, and the collector belong to the main thread; rows of the
    collector's threads are read when the threads have ended.
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        folder: RunFolder,
        manifest: Manifest,
        progress: Progress,
        interruption: Interruption,
        *,
        load: Load,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.manifest = manifest
        self.notes = Notes()
        self.resolved = resolved
        self.progress = progress
        self.server: Server | None = None
        self._target = resolved.target
        self.folder = folder
        self._interruption = interruption
        self._clock_ns = clock_ns
        self._load = load
        self._latency = LatencySoFar()
        self._events_seen = 0
        self._collector: Collector | None = None
        self._pages: IdlePages | None = None
        self._calm = CalmWatch({})
        self._imports = threading.Thread(target=_import_analysis)
        self._is_exact = resolved.target.lifecycle and resolved.workload.collect.exact

    def rows(self) -> RunRows:
        """The collector's rows. Notes metrics that the server never showed."""
        if self._collector is None:
            return RunRows()
        names = set(self._collector.names_seen())
        if self._pages is not None:
            names |= self._pages.names_read
        if names:
            unseen = find_unseen(names, self._target.metrics)
            if 0 < len(unseen) < len(self._target.metrics):  # if all, preflight has warned
                missing = (f"{self._target.metrics[role].name} ({role})" for role in unseen)
                self.notes.add(f"the server shows no metric {', '.join(missing)}")
        return self._collector.rows()

    def events_since(self, seen: int) -> News[LifecycleEvent]:
        return News([], seen) if self._collector is None else self._collector.lifecycle.since(seen)

    def gauges(self) -> dict[str, float]:
        """The last scrape, by role; without scrapes, the queue lengths of the latest step."""
        if self._collector is None:
            return {}
        if scrape := self._collector.latest_scrape():
            return read_roles(scrape, self._target.metrics)
        steps = self._collector.steps.latest()[-1:]
        return {"running": steps[0].num_running, "waiting": steps[0].num_waiting} if steps else {}

    def check_server(self) -> None:
        assert self.server is not None
        self.server.check_alive()

    def watch(self, name: str, pid: int) -> None:
        assert self._collector is not None
        self._collector.cpu.watch(name, pid)

    def show(self, snapshot: Snapshot) -> None:
        if self.manifest.clock.comparable:
            new, self._events_seen = self.events_since(self._events_seen)
            self._latency.add(snapshot.left_ns, new)
        self.progress.update(
            replace(snapshot, gauges=self.gauges(), cancel_latency_s=self._latency.typical_s)
        )

    @property
    def is_interrupted(self) -> bool:
        return self._interruption.requested

    def step_s(self) -> float | None:
        return None if self._collector is None else typical_step_s(self._collector.steps.latest())

    def follow_with(
        self, resolved: ResolvedRun, folder: RunFolder, manifest: Manifest, load: Load
    ) -> "Measurement":
        following = Measurement(
            resolved,
            folder,
            manifest,
            PrefixedProgress(self.progress, "probe phase"),
            self._interruption,
            load=load,
            clock_ns=self._clock_ns,
        )
        following.server = self.server
        return following

    def take(self, children: ExitStack, *, when_loaded: Callable[[], None]) -> None:
        """Load the server and watch it; call `when_loaded` after the last load.

        The load process and the server, if this starts one, end with `children`. Raises
        TargetError, InterruptedRunError and ConfigError; `manifest` and `rows` then hold the data
        so far.
        """
        processes = self.resolved.workload.run.processes
        self._load.prepare(self.folder, processes=processes, until_over=children)
        self._imports.start()
        with ExitStack() as stack:
            client = stack.enter_context(self._client(10.0))
            if self.server is None:
                self.server = self._find_server(children, client)
            server = self.server
            preflight = self._preflight(client)
            urls = preflight.note_target(server)
            pages = self._pages = IdlePages(
                client, urls, self._target, notes=self.notes, clock_ns=self._clock_ns
            )
            self.server = server = preflight.with_slots(server)
            first = preflight.with_lengths(self._plan_load(server))
            if self._is_exact:
                preflight.note_clock(server)
            preflight.read_first(pages)
            self.folder.write_manifest(self.manifest)
            with self._collect(stack, server, urls) as collector:
                for number in range(loops := self.resolved.workload.run.loops):
                    plan = first.with_seed(first.run.seed + number)
                    is_last = number == loops - 1
                    with ExitStack() as until_settled:
                        self._run_load(plan, until_settled)
                        if is_last:
                            when_loaded()
                        self._settle(collector)
                        server.check_alive()
                        self._read_settled(pages, is_last=is_last)
                        self.manifest.window.held_until_ns.append(self._clock_ns())
            self.progress.phase("checking that the server still serves")
            # Everything has been read: these requests are in no figure.
            asker = asker_of(server, self._target, client, self._clock_ns)
            longest_s = self.resolved.workload.run.timeout_s
            self.manifest.probing = probe_service(asker, longest_s=longest_s)

    def _find_server(self, children: ExitStack, client: httpx.Client) -> Server:
        return resolve_server(
            self.resolved,
            self.folder.log("engine"),
            children,
            client=client,
            notes=self.notes,
            progress=self.progress,
            interruption=self._interruption,
        )

    def _client(self, timeout_s: float) -> httpx.Client:
        """A request of the harness may take as long as one of the load."""
        return http_client(
            self.resolved.headers,
            ca_file=self.resolved.config.ca_file,
            timeout_s=timeout_s,
            longest_s=max(timeout_s, self.resolved.workload.run.timeout_s),
        )

    def _preflight(self, client: httpx.Client) -> Preflight:
        return Preflight(
            self.resolved,
            client,
            self.manifest,
            notes=self.notes,
            progress=self.progress,
            clock_ns=self._clock_ns,
        )

    def _plan_load(self, server: Server) -> LoadPlan:
        plan = make_load_plan(self.resolved, server, rows_dir=self.folder.shards)
        run_id, created_at = self.manifest.run_id, self.manifest.created_at
        salt = prompt_salt(server, run_id=run_id, created_at=created_at)
        plan = plan.model_copy(update={"prompt_salt": salt})
        for text in load_notes(self.resolved.workload, self._target, server):
            self.notes.add(text)
        for text in open_loop_notes(plan):
            self.notes.add(text)
            self.progress.phase(text)
        return plan

    def _read_settled(self, pages: IdlePages, *, is_last: bool) -> None:
        idle = self.manifest.idle
        idle.after = pages.roles()
        if self.resolved.workload.run.loops > 1:
            idle.loops.append(IdleReading(t_ns=self._clock_ns(), values=idle.after))
        # Without an exact log, a second reading shows whether work goes on.
        if not is_last or not idle.after or self._is_exact:
            return
        if self._calm.is_idle(self._clock_ns(), idle.after):
            idle.later = dict(idle.after)
            return
        idle.later = pages.roles_later(
            idle.before,
            idle.after,
            pause=self._interruption.pause,
            interrupted=lambda: self._interruption.requested,
        )

    def _collect(self, stack: ExitStack, server: Server, metrics_urls: list[str]) -> Collector:
        gpu = open_gpu_sampler()
        stack.callback(gpu.close)
        if isinstance(gpu, NoGpu):
            self.notes.add(gpu.reason)
        self.manifest.hardware = find_hardware(gpu.names)
        self._collector = Collector(
            rows_dir=self.folder.shards,
            client=self._client(5.0),
            scraping=self._scraping(metrics_urls),
            lifecycle_url=server.url if self._is_exact else None,
            gpu=gpu,
            clock_ns=self._clock_ns,
            notes=self.notes,
        )
        is_local = server.engine is not None or self.manifest.clock.comparable
        if server.config is not None and is_local:
            for name in ("frontend", "worker"):
                self._collector.cpu.watch(name, int(server.config[f"{name}_pid"]))
        return self._collector

    def _scraping(self, metrics_urls: list[str]) -> Scraping | None:
        """Scrape times are jittered against the server's steps, and fixed by the run's seed."""
        interval_s = self.manifest.scrape_interval_s
        if interval_s is None or not metrics_urls:
            return None
        rng = random.Random(f"{self.manifest.seed}/scrapes")
        shortest_s = self._target.min_scrape_interval_s
        return Scraping(metrics_urls, jittered(interval_s, rng, shortest_s=shortest_s))

    def _run_load(self, plan: LoadPlan, until_settled: ExitStack) -> None:
        self._latency, self._events_seen = LatencySoFar(), 0
        self.progress.phase(describe_load(plan))
        self._note_arrivals(plan)
        self._imports.join()  # an import would compete with the load for a core
        if self.manifest.window.load_started_ns is None:
            self.manifest.window.load_started_ns = self._clock_ns()
        self.folder.load_plan.touch(mode=0o600)  # its headers may hold a secret
        write_plan(plan, self.folder.load_plan)
        try:
            self._load.run(plan, self, until_settled=until_settled)
        finally:
            self.manifest.window.load_ended_ns = self._clock_ns()
            write_plan(plan.without_secrets(), self.folder.load_plan)
        self._refuse_interruption()

    def _note_arrivals(self, plan: LoadPlan) -> None:
        if plan.schedule is None:
            return
        so_far = self.manifest.arrivals.planned if self.manifest.arrivals is not None else 0
        self.manifest.arrivals = ScheduledArrivals(
            planned=so_far + count_arrivals(plan), max_streams=plan.schedule.max_streams
        )

    def _settle(self, collector: Collector) -> None:
        """Wait the settle time, or until exact gauges are back at their values before the load."""
        seconds = settle_seconds(self._target, self.resolved.workload.settle, self.step_s())
        seconds += silence_seconds(self._target, self.resolved.workload)
        self.manifest.settle_s = seconds
        self.progress.phase(f"letting the server settle (at most {seconds:.1f} s)")
        calm = self._calm = CalmWatch(self.manifest.idle.before)
        may_end = may_end_early(self._target)
        end_ns = self._clock_ns() + int(seconds * 1e9)
        while self._clock_ns() < end_ns:
            self._interruption.pause(SETTLE_POLL_S)
            self._refuse_interruption()
            scrape = collector.latest_scrape()
            if scrape:
                calm.take(scrape[0].t_ns, read_roles(scrape, self._target.metrics))
            if may_end and calm.is_calm:
                break
        self.manifest.window.settled_ns = self._clock_ns()

    def _refuse_interruption(self) -> None:
        if self._interruption.requested:
            raise InterruptedRunError("interrupted")
