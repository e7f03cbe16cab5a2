"""The measuring part of a run: find the server, start the collector, let the load run, let settle.

Each step leaves its mark in the manifest, so that it tells at any moment how far the run came.
"""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import httpx
import msgspec

from harness.calibration import CalibrationError, calibrate
from harness.collect.clock import check_clock
from harness.collect.collector import Collector, Scraping
from harness.collect.gathered import News
from harness.collect.gpu import NoGpu, open_gpu_sampler
from harness.collect.prometheus import find_unseen, read_roles
from harness.collect.source import Notes, SourceError, jittered
from harness.config import as_plain_data
from harness.errors import InterruptedRunError
from harness.finding import find_server
from harness.idle_pages import IdlePages
from harness.interruption import Interruption
from harness.live import LatencySoFar
from harness.load.plan import LoadPlan, write_plan
from harness.load_order import load_notes, prompt_salt
from harness.load_process import describe_load, run_load
from harness.load_settings import SlotRecoverySettings
from harness.manifest import (
    Clock,
    IdleReading,
    Manifest,
    ScheduledArrivals,
    TargetFacts,
    find_hardware,
)
from harness.open_loop_order import count_arrivals, open_loop_notes
from harness.order import ResolvedOrder, make_load_plan
from harness.progress import Progress, Snapshot
from harness.reach import http_client
from harness.records import LifecycleEvent
from harness.server import Server
from harness.server_facts import (
    FITS_NOTHING,
    metrics_pages,
    scrape_note,
    scrape_warning,
    told_blocks,
    told_slots,
    told_version,
    unseen_metrics,
)
from harness.serving import Asker, count_slots, probe_service
from harness.settle import (
    CalmWatch,
    may_end_early,
    settle_seconds,
    silence_seconds,
    typical_step_s,
)
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
        run_load: Callable[..., None] = run_load,
    ) -> None:
        self.manifest = manifest
        self.notes = Notes()
        self._resolved = resolved
        self._target = resolved.target
        self._folder = folder
        self._progress = progress
        self._interruption = interruption
        self._clock_ns = clock_ns
        self._run_load = run_load
        self._collector: Collector | None = None
        self._pages: IdlePages | None = None
        self._is_exact = resolved.target.lifecycle and resolved.workload.collect.exact

    def rows(self) -> RunRows:
        """What the collector gathered, and a note of the metrics that the server never showed."""
        if self._collector is None:
            return RunRows()
        names = set(self._collector.names_seen())
        if self._pages is not None:
            names |= self._pages.names_read
        if names:
            unseen = find_unseen(names, self._target.metrics)
            if 0 < len(unseen) < len(self._target.metrics):  # without any the start has warned
                missing = (f"{self._target.metrics[role].name} ({role})" for role in unseen)
                self.notes.add(f"the server shows no metric {', '.join(missing)}")
        return self._collector.rows()

    def events_since(self, seen: int) -> News[LifecycleEvent]:
        """What has come to the server's log after so many of its events."""
        return News([], seen) if self._collector is None else self._collector.lifecycle.since(seen)

    def gauges(self) -> dict[str, float]:
        """The last scrape, by role; where nothing was scraped, what the latest step tells."""
        if self._collector is None:
            return {}
        if scrape := self._collector.latest_scrape():
            return read_roles(scrape, self._target.metrics)
        steps = self._collector.steps.latest()[-1:]
        return {"running": steps[0].num_running, "waiting": steps[0].num_waiting} if steps else {}

    def step_s(self) -> float | None:
        """How long a step of the engine typically took so far; None where it tells of none."""
        return None if self._collector is None else typical_step_s(self._collector.steps.latest())

    def take(self) -> None:
        """Do it all. Raises TargetError, InterruptedRunError and ConfigError; `manifest` and `rows`
        hold then what there was up to there."""
        with ExitStack() as stack:
            client = stack.enter_context(self._client(10.0))
            server = find_server(
                self._resolved,
                self._folder.log("engine"),
                stack,
                client=client,
                notes=self.notes,
                progress=self._progress,
                interruption=self._interruption,
            )
            pages = self._note_target(client, server)
            self._pages = pages
            self._note_version(client, server)
            server = self._with_slots(client, server)
            first = self._plan_load(client, server)
            self._folder.load_plan.touch(mode=0o600)  # its headers may hold a secret
            write_plan(first, self._folder.load_plan)
            self._note_clock(client, server)
            self._read_first(pages)
            self._folder.write_manifest(self.manifest)
            with self._collect(stack, server, pages.urls) as collector:
                for number in range(loops := self._resolved.workload.run.loops):
                    plan = msgspec.structs.replace(first, seed=first.seed + number)
                    with ExitStack() as until_settled:
                        self._load(plan, server, collector, until_settled)
                        self._settle(collector)
                        server.check_alive()
                        self._read_settled(pages, is_last=number == loops - 1)
                        self.manifest.window.held_until_ns.append(self._clock_ns())
            self._probe(client, server)

    def _plan_load(self, client: httpx.Client, server: Server) -> LoadPlan:
        """The plan, with prompts as long on this server's tokenizer as they should be."""
        plan = make_load_plan(self._resolved, server, rows_dir=self._folder.shards)
        run_id, created_at = self.manifest.run_id, self.manifest.created_at
        salt = prompt_salt(server, run_id=run_id, created_at=created_at)
        plan = msgspec.structs.replace(plan, prompt_salt=salt)
        for text in load_notes(self._resolved.workload, self._target, server):
            self.notes.add(text)
        for text in open_loop_notes(plan):
            self.notes.add(text)
            self._progress.phase(text)
        if self._target.bytes_are_tokens:
            return plan
        self._progress.phase("asking the server how many tokens it makes of a prompt")
        try:
            scale = calibrate(client, plan)
        except CalibrationError as error:
            self.notes.warn(
                f"the length of prompts is not known in the server's tokens: {error}; a byte was "
                "taken for a token"
            )
            return plan
        self.manifest.prompt_scale = scale
        return msgspec.structs.replace(plan, prompt_scale=scale)

    def _client(self, timeout_s: float) -> httpx.Client:
        """For requests of our own, which may take as long as those of the load may be silent."""
        return http_client(
            self._resolved.headers,
            ca_file=self._resolved.order.ca_file,
            timeout_s=timeout_s,
            longest_s=max(timeout_s, self._resolved.workload.run.timeout_s),
        )

    def _asker(self, client: httpx.Client, server: Server) -> Asker:
        body = {"model": server.model, **self._target.extra_body}
        path, clock_ns = self._target.path, self._clock_ns
        return Asker(client=client, url=server.url, path=path, body=body, clock_ns=clock_ns)

    def _note_version(self, client: httpx.Client, server: Server) -> None:
        if self.manifest.target is not None:
            self.manifest.target.version = told_version(client, server, self._target)

    def _with_slots(self, client: httpx.Client, server: Server) -> Server:
        """The server with its number of batch slots: as it tells it, or found by trying where it is
        needed and nobody says it."""
        load = self._resolved.workload.load
        is_needed = isinstance(load, SlotRecoverySettings) and load.slots is None
        is_told = self._target.slots_from == "config" and server.config is not None
        told = told_slots(client, server, self._target)
        if told is not None:
            return self._keep_slots(server, told, "as its page /props tells")
        if is_told or not is_needed:
            return server
        self._progress.phase("trying how many requests the server runs at once")
        timeout_s = self._resolved.workload.run.timeout_s
        found = count_slots(self._asker(client, server), longest_s=timeout_s)
        if found is None:
            return server
        how = "the smallest number of parallel requests at which one more waits"
        return self._keep_slots(server, found, f"found by trying: {how}")

    def _keep_slots(self, server: Server, slots: int, how: str) -> Server:
        self.notes.add(f"batch slots: {slots}, {how}")
        if self.manifest.target is not None:
            self.manifest.target.slots_found = slots
        return replace(server, slots_found=slots)

    def _read_first(self, pages: IdlePages) -> None:
        """Before the load: what the mapping does not find there is best known at once, by name."""
        if (samples := pages.samples()) is None:
            return
        self.manifest.idle.before = read_roles(samples, self._target.metrics)
        if self.manifest.target is not None:
            self.manifest.target.blocks_found = told_blocks(samples, self._target)
        text = unseen_metrics(samples, pages.urls, self._target)
        if text is None:
            return
        if text.startswith(FITS_NOTHING):
            self.notes.warn(text)
        self._progress.phase(text)

    def _read_settled(self, pages: IdlePages, *, is_last: bool) -> None:
        idle = self.manifest.idle
        idle.after = pages.roles()
        if self._resolved.workload.run.loops > 1:
            idle.loops.append(IdleReading(t_ns=self._clock_ns(), values=idle.after))
        # Once more where no exact log tells whether what is left goes on.
        if is_last and idle.after and not self._is_exact:
            idle.later = pages.roles_later(
                idle.before,
                idle.after,
                pause=self._interruption.pause,
                is_cut=lambda: self._interruption.requested,
            )

    def _probe(self, client: httpx.Client, server: Server) -> None:
        """Is it wedged? After everything was read: these requests are in no figure."""
        self._progress.phase("asking whether the server still serves")
        timeout_s = self._resolved.workload.run.timeout_s
        self.manifest.probing = probe_service(self._asker(client, server), longest_s=timeout_s)

    def _note_target(self, client: httpx.Client, server: Server) -> IdlePages:
        metrics_urls = metrics_pages(self._resolved.metrics_urls, server, self._target)
        interval_s = self.manifest.scrape_interval_s
        if (note := scrape_note(interval_s, metrics_urls)) is not None:
            self.notes.add(note)
        if (warning := scrape_warning(interval_s, self._target)) is not None:
            self.notes.warn(warning)
        self.manifest.target = TargetFacts(
            engine=self._target.name,
            url=server.url,
            metrics_urls=metrics_urls,
            model=server.model,
            started_by_us=server.engine is not None,
            spec=as_plain_data(self._target),
            config=server.config,
        )
        return IdlePages(
            client, metrics_urls, self._target, notes=self.notes, clock_ns=self._clock_ns
        )

    def _note_clock(self, client: httpx.Client, server: Server) -> None:
        if not self._is_exact:
            return
        try:
            check = check_clock(client, f"{server.url}/walkaway/clock", clock_ns=self._clock_ns)
        except SourceError as error:
            self.notes.warn(str(error))
            return
        self.manifest.clock = Clock(comparable=check.comparable, round_trip_ns=check.round_trip_ns)

    def _collect(self, stack: ExitStack, server: Server, metrics_urls: list[str]) -> Collector:
        gpu = open_gpu_sampler()
        stack.callback(gpu.close)
        if isinstance(gpu, NoGpu):
            self.notes.add(gpu.reason)
        self.manifest.hardware = find_hardware(gpu.names)
        self._collector = Collector(
            rows_dir=self._folder.shards,
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
        """Scrapes keep no time with the server's steps, and come alike in each run of a seed."""
        interval_s = self.manifest.scrape_interval_s
        if interval_s is None or not metrics_urls:
            return None
        rng = random.Random(f"{self.manifest.seed}/scrapes")
        shortest_s = self._target.min_scrape_interval_s
        return Scraping(metrics_urls, jittered(interval_s, rng, shortest_s=shortest_s))

    def _load(
        self, plan: LoadPlan, server: Server, collector: Collector, until_settled: ExitStack
    ) -> None:
        latency, seen = LatencySoFar(), 0

        def show(snapshot: Snapshot) -> None:
            nonlocal seen
            if self.manifest.clock.comparable:
                new, seen = self.events_since(seen)
                latency.add(snapshot.left_ns, new)
            self._progress.update(
                replace(snapshot, gauges=self.gauges(), cancel_latency_s=latency.typical_s)
            )

        self._progress.phase(describe_load(plan))
        self._note_arrivals(plan)
        if self.manifest.window.load_started_ns is None:
            self.manifest.window.load_started_ns = self._clock_ns()
        write_plan(plan, self._folder.load_plan)
        try:
            self._run_load(
                plan,
                self._folder,
                until_settled=until_settled,
                check_server=server.check_alive,
                watch=collector.cpu.watch,
                show=show,
                interrupted=lambda: self._interruption.requested,
            )
        finally:
            self.manifest.window.load_ended_ns = self._clock_ns()
            hidden = dict.fromkeys(plan.headers, "***")  # a header may hold a secret
            write_plan(msgspec.structs.replace(plan, headers=hidden), self._folder.load_plan)
        self._refuse_interruption()

    def _note_arrivals(self, plan: LoadPlan) -> None:
        """How many requests are going to come: what has no row in the end was not sent."""
        if plan.open_loop is None:
            return
        so_far = self.manifest.arrivals.planned if self.manifest.arrivals is not None else 0
        self.manifest.arrivals = ScheduledArrivals(
            planned=so_far + count_arrivals(plan), max_streams=plan.open_loop.max_streams
        )

    def _settle(self, collector: Collector) -> None:
        """Wait the settle time, or until the server's gauges are as before and can be believed."""
        seconds = settle_seconds(self._target, self._resolved.workload.settle, self.step_s())
        seconds += silence_seconds(self._target, self._resolved.workload)
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
