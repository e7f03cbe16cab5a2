"""The load process: started early, given its plan, and watched until it ends."""

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from typing import Protocol

import psutil

from harness.client.shards import ShardReader
from harness.errors import TargetError
from harness.records import ClientSample, ProcessMark, RequestRow
from harness.run.process import QUIT_S, Child, free_port, python_module
from harness.run.progress import Snapshot
from harness.store.run_folder import RunFolder
from harness.workload.plan import LoadPlan

LOOPBACK = "127.0.0.1"
WATCH_S = 0.2
CHECK_EVERY = 5  # turns of `WATCH_S`
LAGS_SHOWN = 100  # the latest few seconds
GRACE_S = 60.0  # for its start and its end, in addition to the plan's own time
LAST_ROWS_S = 10.0  # for a worker that only writes its last rows
LAST_ROWS_POLL_S = 0.02


def load_command(folder: RunFolder, processes: int) -> list[str]:
    """Locust without a web page. A single process reads its plan from standard input.

    Locust itself starts several: a master without users and `processes` workers, which read the
    plan from the run's folder. The master moves a dead worker's users to the others.
    """
    locustfile = str(files("workloads") / "locustfile.py")
    plan = "-" if processes == 1 else str(folder.load_plan)
    return python_module(
        "locust",
        *("-f", locustfile, "--headless", "--only-summary"),
        *("--walkaway-plan", plan, "--walkaway-exit-with", "0"),
        *(together(processes) if processes > 1 else ()),
    )


def together(processes: int) -> list[str]:
    port = str(free_port())
    return [
        *("--processes", str(processes), "--enable-rebalancing"),
        *("--master-bind-host", LOOPBACK, "--master-bind-port", port, "--master-port", port),
        *("--expect-workers-max-wait", f"{GRACE_S:.0f}"),
    ]


class LoadWatcher(Protocol):
    """The part of a measurement that a load uses."""

    folder: RunFolder

    @property
    def is_interrupted(self) -> bool: ...
    def check_server(self) -> None: ...
    def watch(self, name: str, pid: int) -> None: ...
    def show(self, snapshot: Snapshot, rows: Sequence[RequestRow]) -> None: ...


@dataclass(kw_only=True)
class LoadProcess:
    """Runs the loads of one measurement, each in its own process.

    The first process is started early and waits for its plan: importing Locust takes a second.
    """

    command: Callable[[RunFolder, int], list[str]] = load_command
    last_rows_s: float = LAST_ROWS_S
    pause: Callable[[float], object] = threading.Event().wait
    _waiting: Child | None = None

    def prepare(self, folder: RunFolder, *, processes: int, until_over: ExitStack) -> None:
        """Start the process of the first load; it ends with `until_over`.

        Workers share one standard input, so several processes are started only with their plan.
        """
        if processes == 1:
            child = Child("load", self.command(folder, 1), folder.log("load"), quit_s=0)
            self._waiting = until_over.enter_context(child)

    def run(self, plan: LoadPlan, run: LoadWatcher, *, until_settled: ExitStack) -> None:
        """Run a load to its end, or until interrupted.

        Connections that its users left open are reset when `until_settled` is closed. Raises
        TargetError if the server is gone, or the load process dies or hangs.
        """
        load, self._waiting = self._waiting, None
        if load is None:
            command = self.command(run.folder, plan.run.processes)
            load = Child("load", command, run.folder.log("load"))
        until_settled.callback(self._end_workers, run.folder, load.pid)
        until_settled.enter_context(load)
        run.watch("load", load.pid)
        load.quit_s = QUIT_S  # from now on it has rows to write
        if plan.run.processes == 1:
            load.say(plan.model_dump_json().encode())
        self._follow(plan, load, run)

    def _follow(self, plan: LoadPlan, load: Child, run: LoadWatcher) -> None:
        folder = run.folder
        shards = ShardReader(folder.shards, RequestRow)
        marks = ShardReader(folder.shards, ProcessMark)
        samples = ShardReader(folder.shards, ClientSample)
        counts: Counter[str] = Counter()
        lags: deque[int] = deque(maxlen=LAGS_SHOWN)
        started_s = time.monotonic()
        for turn in count(1):
            code = load.wait(WATCH_S)
            if code == 0:  # the load is over when its workers are
                self.let_workers_end(folder, load.pid, interrupted=lambda: run.is_interrupted)
            if code == 0 or run.is_interrupted:
                return
            if code is not None:
                raise TargetError(f"the load process ended with code {code}:\n{load.tail()}")
            if turn % CHECK_EVERY == 0:
                run.check_server()
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > plan.run.max_seconds + plan.run.timeout_s + GRACE_S:
                raise TargetError(f"the load process did not end in time:\n{load.tail()}")
            for mark in marks.read_new():
                if mark.pid != load.pid:
                    run.watch(f"load {mark.worker}", mark.pid)
            rows = shards.read_new()
            counts.update(row.outcome.value for row in rows)
            lags.extend(sample.lag_ns for sample in samples.read_new())
            run.show(
                Snapshot(
                    elapsed_s=elapsed_s,
                    limit_s=plan.run.max_seconds,
                    outcomes=dict(counts),
                    stop_after_abandons=plan.stop_after_abandons,
                    client_lag_s=max(lags) / 1e9 if lags else None,
                ),
                rows,
            )

    def let_workers_end(
        self, folder: RunFolder, session: int, *, interrupted: Callable[[], bool] = lambda: False
    ) -> set[int]:
        """Wait until every worker of this session has written its last rows. Returns the late ones.

        Locust's master does not wait for its workers: a slow one may still write after its end.
        """
        marks = ShardReader(folder.shards, ProcessMark)
        at_work: set[int] = set()
        waited_s = 0.0
        while True:
            for mark in marks.read_new():
                (at_work.add if mark.event == "began" else at_work.discard)(mark.pid)
            at_work = {pid for pid in at_work if _is_running(pid, session)}
            if not at_work or interrupted() or waited_s >= self.last_rows_s:
                return at_work
            self.pause(LAST_ROWS_POLL_S)
            waited_s += LAST_ROWS_POLL_S

    def _end_workers(self, folder: RunFolder, session: int) -> None:
        for pid in self.let_workers_end(folder, session):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_running(pid: int, session: int) -> bool:
    """False also for a pid that another process has taken over."""
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
