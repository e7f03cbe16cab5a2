"""The measuring part of a run: find the server, start the collector, let the load run, let settle.

Each step leaves its mark in the manifest, so that it tells at any moment how far the run came.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import httpx
import msgspec

from harness.collect.clock import check_clock
from harness.collect.collector import Collector
from harness.collect.gpu import NoGpu, open_gpu_sampler
from harness.collect.prometheus import Scraper, find_unseen, read_roles
from harness.collect.source import Notes, SourceError
from harness.config import as_plain_data
from harness.errors import InterruptedRunError
from harness.interruption import Interruption
from harness.load.plan import LoadPlan, write_plan
from harness.load_process import describe_load, run_load
from harness.manifest import Clock, Manifest, TargetFacts, find_hardware
from harness.order import ResolvedOrder, make_load_plan
from harness.progress import Progress, Snapshot
from harness.server import Server, attach, choose_runner, engine_command, started_engine
from harness.settle import CalmWatch, may_end_early, settle_seconds, typical_step_s
from harness.store import RunFolder, RunRows

SETTLE_POLL_S = 0.02


class Measurement:
    """One measurement in progress.

    Its state is the manifest, filled in step by step, and the collector, once there is one. Both
    belong to the main thread; what the collector's threads write is read when they have ended.
    """

    def __init__(
        self,
        resolved: ResolvedOrder,
        folder: RunFolder,
        manifest: Manifest,
        progress: Progress,
        interruption: Interruption,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.manifest = manifest
        self.notes = Notes()
        self._resolved = resolved
        self._target = resolved.target
        self._folder = folder
        self._progress = progress
        self._interruption = interruption
        self._clock_ns = clock_ns
        self._collector: Collector | None = None

    def rows(self) -> RunRows:
        """What the collector gathered, and a note for each metric that the server never showed."""
        if self._collector is None:
            return RunRows()
        rows = self._collector.rows()
        if rows.server_metrics:
            for role in find_unseen(rows.server_metrics, self._target.metrics):
                name = self._target.metrics[role].name
                self.notes.add(f"the server shows no metric {name} ({role})")
        return rows

    def take(self) -> None:
        """Do it all. Raises TargetError, InterruptedRunError and ConfigError; `manifest` and `rows`
        hold then what there was up to there."""
        with ExitStack() as stack:
            client = stack.enter_context(
                httpx.Client(headers=self._resolved.headers, timeout=10.0, trust_env=False)
            )
            server = self._find_server(stack, client)
            plan = make_load_plan(self._resolved, server, rows_dir=self._folder.shards)
            self._folder.load_plan.touch(mode=0o600)  # its headers may hold a secret
            write_plan(plan, self._folder.load_plan)
            metrics_urls = self._note_target(server)
            self._note_clock(client, server)
            self.manifest.idle.before = self._read_idle(client, metrics_urls)
            self._folder.write_manifest(self.manifest)
            with self._collect(stack, server, metrics_urls) as collector:
                self._load(plan, server, collector)
                self._settle(collector)
                server.check_alive()
                self.manifest.idle.after = self._read_idle(client, metrics_urls)

    def _find_server(self, stack: ExitStack, client: httpx.Client) -> Server:
        model = self._resolved.order.model
        if (url := self._resolved.url) is not None:
            self._progress.phase(f"connecting to {url}")
            return attach(url, self._target, model=model, client=client, engine=None)
        settings = self._resolved.workload.engine
        runner = choose_runner(settings)
        if settings.runner == "auto" and runner == "simulated":
            text = "torch is not installed: the engine simulates its model (steps of a set length)"
            self.notes.add(text)
            self._progress.phase(text)
        self._progress.phase(f"starting the reference engine ({runner} runner)")
        engine, url = stack.enter_context(
            started_engine(
                engine_command(settings, runner, model=model),
                self._folder.log("engine"),
                interrupted=lambda: self._interruption.requested,
            )
        )
        return attach(url, self._target, model=model, client=client, engine=engine)

    def _note_target(self, server: Server) -> list[str]:
        metrics_urls = self._resolved.metrics_urls or [f"{server.url}/metrics"]
        if self.manifest.scrape_interval_s is None:
            metrics_urls = []
            self.notes.add("nothing was scraped: figures that need /metrics are not measurable")
        self.manifest.target = TargetFacts(
            engine=self._target.name,
            url=server.url,
            metrics_urls=metrics_urls,
            model=server.model,
            started_by_us=server.engine is not None,
            spec=as_plain_data(self._target),
            config=server.config,
        )
        return metrics_urls

    def _note_clock(self, client: httpx.Client, server: Server) -> None:
        if not self._target.lifecycle:
            return
        try:
            check = check_clock(client, f"{server.url}/walkaway/clock", clock_ns=self._clock_ns)
        except SourceError as error:
            self.notes.warn(str(error))
            return
        self.manifest.clock = Clock(comparable=check.comparable, round_trip_ns=check.round_trip_ns)

    def _read_idle(self, client: httpx.Client, metrics_urls: list[str]) -> dict[str, float]:
        scraper = Scraper(client, metrics_urls, clock_ns=self._clock_ns)
        try:
            scraper.scrape()
        except SourceError as error:
            self.notes.warn(str(error))
        return read_roles(scraper.latest, self._target.metrics)

    def _collect(self, stack: ExitStack, server: Server, metrics_urls: list[str]) -> Collector:
        gpu = open_gpu_sampler()
        stack.callback(gpu.close)
        if isinstance(gpu, NoGpu):
            self.notes.add(gpu.reason)
        self.manifest.hardware = find_hardware(gpu.names)
        self._collector = Collector(
            headers=self._resolved.headers,
            metrics_urls=metrics_urls,
            scrape_interval_s=self.manifest.scrape_interval_s,
            lifecycle_url=server.url if self._target.lifecycle else None,
            gpu=gpu,
            clock_ns=self._clock_ns,
            notes=self.notes,
        )
        is_local = server.engine is not None or self.manifest.clock.comparable
        if server.config is not None and is_local:
            for name in ("frontend", "worker"):
                self._collector.cpu.watch(name, int(server.config[f"{name}_pid"]))
        return self._collector

    def _load(self, plan: LoadPlan, server: Server, collector: Collector) -> None:
        def show(snapshot: Snapshot) -> None:
            gauges = read_roles(collector.latest_scrape(), self._target.metrics)
            self._progress.update(replace(snapshot, gauges=gauges))

        self._progress.phase(describe_load(plan))
        self.manifest.window.load_started_ns = self._clock_ns()
        try:
            run_load(
                plan,
                self._folder,
                check_server=server.check_alive,
                watch_pid=lambda pid: collector.cpu.watch("load", pid),
                show=show,
                interrupted=lambda: self._interruption.requested,
            )
        finally:
            self.manifest.window.load_ended_ns = self._clock_ns()
            hidden = dict.fromkeys(plan.headers, "***")  # a header may hold a secret
            write_plan(msgspec.structs.replace(plan, headers=hidden), self._folder.load_plan)
        self._refuse_interruption()

    def _settle(self, collector: Collector) -> None:
        """Wait the settle time, or until the server's gauges are as before and can be believed."""
        step_s = typical_step_s(collector.rows().steps)
        seconds = settle_seconds(self._target, self._resolved.workload.settle, step_s)
        self.manifest.settle_s = seconds
        self._progress.phase(f"letting the server settle (at most {seconds:.1f} s)")
        calm = CalmWatch(self.manifest.idle.before)
        end_ns = self._clock_ns() + int(seconds * 1e9)
        while self._clock_ns() < end_ns:
            self._interruption.pause(SETTLE_POLL_S)
            self._refuse_interruption()
            scrape = collector.latest_scrape()
            if may_end_early(self._target) and scrape:
                gauges = read_roles(scrape, self._target.metrics)
                if calm.is_calm(scrape[0].t_ns, gauges):
                    break
        self.manifest.window.settled_ns = self._clock_ns()

    def _refuse_interruption(self) -> None:
        if self._interruption.requested:
            raise InterruptedRunError("interrupted")
