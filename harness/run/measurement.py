"""The measuring part of a run: find the server, collect, run the load, let the server settle."""

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from harness.collect.collector import Collector, PageUrls
from harness.collect.scrape import find_unseen, read_roles
from harness.collect.source import jittered
from harness.records import RequestRow
from harness.run.first_answers import check_not_refused, check_requests
from harness.run.kills import Killer, complete_lines
from harness.run.live_figures import LiveRun
from harness.run.load_plan import count_arrivals, load_notes, open_loop_notes, prompt_salt
from harness.run.loading import wait_for_answer
from harness.run.preflight import (
    find_gpus,
    find_server,
    note_clock,
    note_target,
    read_first,
    with_lengths,
    with_slots,
)
from harness.run.progress import PrefixedProgress, Snapshot, describe_load
from harness.run.run_config import make_load_plan
from harness.run.run_state import RunState, begin_manifest
from harness.run.server import Server
from harness.run.settle import (
    Asker,
    CalmWatch,
    IdlePages,
    longest_check_s,
    may_end_early,
    probe_service,
    settle_seconds,
    silence_seconds,
    typical_step_s,
)
from harness.store.manifest import IdleReading, ScheduledArrivals, find_hardware
from harness.store.run_folder import RunFolder, RunRows
from harness.workload.load import AbandonLoad
from harness.workload.plan import LoadPlan, write_plan

SETTLE_POLL_S = 0.02


def _import_analysis() -> None:
    """Import pandas and scipy, which takes a second, while the server starts."""
    import harness.analysis.summary
    import harness.store.parquet  # noqa: F401


class LoadRunner(Protocol):
    """Makes the requests of a measurement: a load process, or the users of a web page."""

    def prepare(self, folder: RunFolder, *, processes: int, until_over: ExitStack) -> None:
        """Prepare before the server is there. Its processes end with `until_over`."""

    def run(self, plan: LoadPlan, run: "Measurement", *, until_settled: ExitStack) -> None:
        """Run the load until its end, or until interrupted.

        Connections that users left open are held until `until_settled` is closed. Raises
        TargetError if the load or the server dies.
        """


@dataclass(kw_only=True)
class Measurement(RunState):
    """One measurement in progress.

    The manifest and the collector belong to the main thread; rows of the collector's threads are
    read when the threads have ended.
    """

    load: LoadRunner
    server: Server | None = None
    _collector: Collector | None = None
    _pages: IdlePages | None = None
    live: LiveRun | None = None
    _events_seen: int = 0
    _imports: threading.Thread = field(
        default_factory=lambda: threading.Thread(target=_import_analysis)
    )

    @property
    def is_interrupted(self) -> bool:
        return self.interruption.requested

    @property
    def _kills(self) -> AbandonLoad | None:
        """The load, if it has processes of the engine killed meanwhile."""
        load = self.resolved.workload.load
        return load if isinstance(load, AbandonLoad) and load.kill is not None else None

    @property
    def _is_exact(self) -> bool:
        return self.target.lifecycle and self.resolved.workload.collect.exact

    def rows(self) -> RunRows:
        if self._collector is None:
            return RunRows()
        assert self._pages is not None
        metrics, names = self.target.metrics, self._collector.names_seen | self._pages.names_read
        unseen = find_unseen(names, metrics) if names else []
        if 0 < len(unseen) < len(metrics):  # if all, preflight has warned
            missing = ", ".join(f"{metrics[role].name} ({role})" for role in unseen)
            self.notes.add(f"the server shows no metric {missing}")
        return self._collector.rows()

    def gauges(self) -> dict[str, float]:
        """The last scrape, by role; without scrapes, the queue lengths of the latest steps."""
        if self._collector is None:
            return {}
        if scrape := self._collector.latest_scrape:
            return read_roles(scrape, self.target.metrics)
        steps = {row.worker: row for row in self._collector.steps.latest()}.values()
        if not steps:
            return {}
        return {
            "running": sum(row.num_running for row in steps),
            "waiting": sum(row.num_waiting for row in steps),
        }

    def step_s(self) -> float | None:
        return None if self._collector is None else typical_step_s(self._collector.steps.latest())

    def check_server(self) -> None:
        assert self.server is not None
        self.server.check_alive()

    def watch(self, name: str, pid: int) -> None:
        assert self._collector is not None
        self._collector.watch(name, pid)

    def show(self, snapshot: Snapshot, rows: Sequence[RequestRow]) -> None:
        """`rows`: of the requests that have ended since the last call."""
        latency_s = self.follow(rows).cancel_latency_s
        self.progress.update(replace(snapshot, gauges=self.gauges(), cancel_latency_s=latency_s))

    def follow(self, rows: Sequence[RequestRow]) -> LiveRun:
        """The live figures with these new rows, and with the events collected since."""
        assert self.live is not None
        assert self._collector is not None
        self.live.take_rows(rows)
        new, self._events_seen = self._collector.lifecycle.since(self._events_seen)
        self.live.take_events(new)
        return self.live

    def probe_phase(self, load: LoadRunner) -> "Measurement":
        resolved = self.resolved.probe_phase
        assert resolved is not None
        return Measurement(
            resolved=resolved,
            folder=RunFolder.create(self.folder.probe_phase.path),
            manifest=begin_manifest(resolved, run_id=f"{self.folder.name}-probe"),
            progress=PrefixedProgress(self.progress, "probe phase"),
            interruption=self.interruption,
            clock_ns=self.clock_ns,
            load=load,
            server=self.server,
        )

    def take(self, children: ExitStack, *, when_loaded: Callable[[], None]) -> None:
        """Load the server and watch it; call `when_loaded` after the last load.

        The load process and the server, if this starts one, end with `children`. Raises
        TargetError, InterruptedRunError and ConfigError; `manifest` and `rows` then hold the data
        so far.
        """
        settings = self.resolved.workload.run
        self.load.prepare(self.folder, processes=settings.processes, until_over=children)
        self._imports.start()
        with self.new_client(10.0) as client:
            server = self.server = self.server or find_server(self, client, children)
            asker = Asker(
                client=client,
                url=server.url,
                target=self.target,
                model=server.model,
                clock_ns=self.clock_ns,
            )
            wait_for_answer(self, asker)
            first = check_requests(self, asker)
            check_not_refused(first)
            asker = first.asker
            facts = note_target(self, client, server)
            pages = self._pages = IdlePages(
                client=client,
                urls=facts.metrics_urls,
                target=self.target,
                notes=self.notes,
                clock_ns=self.clock_ns,
            )
            server = self.server = with_slots(self, facts, server, asker)
            plan = with_lengths(self, client, server, self._plan_load(server))
            plan = plan.model_copy(update={"counted_answers": first.counted})
            if self._is_exact:
                note_clock(self, client, server)
            read_first(self, facts, pages)
            plan = plan.model_copy(update={"target": self.target})  # of several models, its own
            self.folder.write_manifest(self.manifest)
            with self._collect(server, facts.metrics_urls) as collector:
                for number in range(settings.loops):
                    is_last = number == settings.loops - 1
                    self._loop(
                        plan.with_seed(plan.run.seed + number),
                        collector,
                        pages,
                        when_loaded=when_loaded if is_last else None,
                    )
            if self.target.http:
                most_s = longest_check_s(self.timeout_s)
                self.progress.phase(f"checking that the server still serves (at most {most_s:g} s)")
                # Everything has been read: these requests are in no figure.
                self.manifest.probing = probe_service(asker, longest_s=self.timeout_s)

    def _plan_load(self, server: Server) -> LoadPlan:
        plan = make_load_plan(self.resolved, server, rows_dir=self.folder.shards)
        run_id, created_at = self.manifest.run_id, self.manifest.created_at
        salt = prompt_salt(server, run_id=run_id, created_at=created_at)
        for text in load_notes(self.resolved.workload, self.target, server):
            self.notes.add(text)
        for text in open_loop_notes(plan):
            self.notes.add(text)
            self.progress.phase(text)
        return plan.model_copy(update={"prompt_salt": salt})

    def _collect(self, server: Server, metrics_urls: list[str]) -> Collector:
        collector = self._collector = Collector(
            rows_dir=self.folder.shards,
            client=self.new_client(5.0),
            pages=PageUrls(
                metrics=metrics_urls,
                logs=server.urls if self._is_exact else (),
                worker_logs=server.worker_urls if self._is_exact and self._kills else (),
            ),
            scrape_pause_s=self._scrape_pause_s() if metrics_urls else None,
            clock_ns=self.clock_ns,
            notes=self.notes,
        )
        is_local = server.engine is not None or self.manifest.clock.comparable
        if (gpus := find_gpus(self, server, is_local=is_local)) is not None:
            collector.watch_gpus(gpus)
        self.manifest.hardware = find_hardware([] if gpus is None else gpus.names)
        if server.config is not None and is_local:
            for name, pid in server.pids.items():
                collector.watch(name, pid)
        return collector

    def _scrape_pause_s(self) -> Callable[[], float] | None:
        """Scrape times are jittered against the server's steps, and fixed by the run's seed."""
        interval_s = self.manifest.scrape_interval_s
        if interval_s is None:
            return None
        rng = random.Random(f"{self.manifest.seed}/scrapes")
        return jittered(interval_s, rng, shortest_s=self.target.min_scrape_interval_s)

    def _loop(
        self,
        plan: LoadPlan,
        collector: Collector,
        pages: IdlePages,
        *,
        when_loaded: Callable[[], None] | None,
    ) -> None:
        with ExitStack() as until_settled:
            self._run_load(plan, until_settled)
            if when_loaded is not None:
                when_loaded()
            calm = self._settle(collector)
            self.check_server()
            self._read_settled(pages, calm, is_last=when_loaded is not None)
            self.manifest.window.held_until_ns.append(self.clock_ns())

    def _run_load(self, plan: LoadPlan, until_settled: ExitStack) -> None:
        self.progress.phase(describe_load(plan))
        if plan.schedule is not None:
            so_far = self.manifest.arrivals.planned if self.manifest.arrivals is not None else 0
            self.manifest.arrivals = ScheduledArrivals(
                planned=so_far + count_arrivals(plan), max_streams=plan.schedule.max_streams
            )
        self._imports.join()  # an import would compete with the load for a core
        self.interruption.check()
        if self.manifest.window.load_started_ns is None:
            self.manifest.window.load_started_ns = self.clock_ns()
        self.folder.load_plan.touch(mode=0o600)  # its headers may hold a secret
        write_plan(plan, self.folder.load_plan)
        self.live = LiveRun(has_log=self.manifest.clock.comparable, started_ns=self.clock_ns())
        try:
            with self._killer():
                self.load.run(plan, self, until_settled=until_settled)
        finally:
            self.manifest.window.load_ended_ns = self.clock_ns()
            write_plan(plan.without_secrets(), self.folder.load_plan)
        self.interruption.check()

    def _killer(self) -> AbstractContextManager[object]:
        if (load := self._kills) is None:
            return nullcontext()
        assert self.server is not None
        assert self.server.engine is not None
        assert load.kill is not None
        return Killer(
            load.kill,
            every_s=load.kill_every_s,
            name_of=partial(self.resolved.workload.engine.name_of, load.kill),
            announced=partial(complete_lines, self.server.engine.log),
            kills=self.manifest.kills,
            clock_ns=self.clock_ns,
        )

    def _settle(self, collector: Collector) -> CalmWatch:
        """Wait the settle time, or until exact gauges are back at their values before the load."""
        seconds = settle_seconds(self.target, self.resolved.workload.settle, self.step_s())
        seconds += silence_seconds(self.target, self.resolved.workload)
        self.manifest.settle_s = seconds
        self.progress.phase(f"letting the server settle (at most {seconds:.1f} s)")
        calm = CalmWatch(self.manifest.idle.before)
        may_end = may_end_early(self.target)
        end_ns = self.clock_ns() + int(seconds * 1e9)
        while self.clock_ns() < end_ns and not (may_end and calm.is_calm):
            self.interruption.pause(SETTLE_POLL_S)
            self.interruption.check()
            if scrape := collector.latest_scrape:
                calm.take(scrape[0].t_ns, read_roles(scrape, self.target.metrics))
        self.manifest.window.settled_ns = self.clock_ns()
        return calm

    def _read_settled(self, pages: IdlePages, calm: CalmWatch, *, is_last: bool) -> None:
        idle = self.manifest.idle
        idle.after = pages.roles()
        if self.resolved.workload.run.loops > 1:
            idle.loops.append(IdleReading(t_ns=self.clock_ns(), values=idle.after))
        # Without an exact log, a second reading shows whether work continues.
        if not is_last or not idle.after or self._is_exact:
            return
        if calm.is_idle(self.clock_ns(), idle.after):
            idle.later = dict(idle.after)
        else:
            idle.later = pages.roles_later(idle.before, idle.after, interruption=self.interruption)
