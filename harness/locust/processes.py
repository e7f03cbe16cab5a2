"""The processes of one load: their messages to each other, and the marks that each leaves behind.

Messages of our own say what Locust's master does not know: the number of abandons in each worker,
that a worker cannot continue, and that its share of a schedule has ended. Each process with users
writes a mark when it begins and another when it ends in good order; a killed one lacks the second.
The master lists its workers: rows on another machine are copied by hand, and could be forgotten.
"""

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import gevent
from locust.runners import MasterRunner, Runner, WorkerRunner

from harness.client.lag import LagWatch
from harness.client.shards import ShardWriter
from harness.records import ProcessMark, WorkerSeen
from harness.store.manifest import local_clock
from harness.workload.plan import LoadPlan

_LEFT: Final = "walkaway_left"
NO_GOING_ON: Final = "walkaway_no_going_on"
ALL_SENT: Final = "walkaway_all_sent"
_REPORT_EVERY_S: Final = 0.05


class Master:
    """Takes the workers' messages. `_left`: the abandons in each worker so far; `_done`: the
    workers whose share of a schedule has ended."""

    def __init__(
        self,
        runner: MasterRunner,
        *,
        end: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._stop_after: int | None = None
        self._left: dict[str, int] = {}
        self._done: set[str] = set()
        self._runner = runner
        self._end = end
        runner.register_message(_LEFT, self._count)
        runner.register_message(NO_GOING_ON, lambda msg, **_: give_up(msg.data["why"]))
        runner.register_message(ALL_SENT, self._note_share_sent)

    def follow(self, plan: LoadPlan) -> None:
        self._stop_after = plan.stop_after_abandons
        self._left.clear()
        self._done.clear()

    def _count(self, msg: Any, **_: Any) -> None:
        self._left[msg.node_id] = msg.data["users"]
        if self._stop_after is not None and sum(self._left.values()) >= self._stop_after:
            self._stop_after = None
            self._end()

    def _note_share_sent(self, msg: Any, **_: Any) -> None:
        self._done.add(msg.node_id)
        clients = self._runner.clients
        if self._done >= {one.id for one in (*clients.running, *clients.spawning)}:
            self._end()


def report_abandons(runner: WorkerRunner, num_abandons: Callable[[], int]) -> None:
    def keep_reporting() -> None:
        reported = 0
        while True:
            gevent.sleep(_REPORT_EVERY_S)
            if (now := num_abandons()) != reported:
                reported = now
                runner.send_message(_LEFT, {"users": now})

    gevent.spawn(keep_reporting)


def note_workers(runner: MasterRunner, plan: LoadPlan) -> None:
    if plan.rows_dir is None:
        return
    rows_dir = Path(plan.rows_dir)
    rows_dir.mkdir(parents=True, exist_ok=True)
    shard = ShardWriter(rows_dir, WorkerSeen, os.getpid())

    def note(client_id: str, **_: Any) -> None:
        shard.write(WorkerSeen(name=client_id, at=datetime.now(UTC).isoformat()))

    for client_id in runner.clients:
        note(client_id)
    runner.environment.events.worker_connect.add_listener(note)  # type: ignore[no-untyped-call]


class ProcessRecords:
    """The records of this process next to a load's rows: its marks (begun, ended in good order) and
    its lag. A load lasts as long as the process, or begins and ends on a web page."""

    def __init__(self, lag: LagWatch, runner: Runner | None) -> None:
        self._lag = lag
        self._worker = max(0, getattr(runner, "worker_index", 0))
        self._name = runner.client_id if isinstance(runner, WorkerRunner) else ""
        self._clock = local_clock()
        self._plan: LoadPlan | None = None
        self._marks: ShardWriter[ProcessMark] | None = None

    def begin(self, plan: LoadPlan) -> None:
        """Has no effect if the plan keeps no rows. The folder may be missing on another machine
        than the master's, and is made. The file stays open: at the end there may be no handle
        left."""
        if plan.rows_dir is not None:
            rows_dir = Path(plan.rows_dir)
            rows_dir.mkdir(parents=True, exist_ok=True)
            self._marks = ShardWriter(rows_dir, ProcessMark, os.getpid())
            self._marks.write(self._mark("began", plan))
            self._plan = plan
            self._lag.begin(rows_dir)

    def end(self, **_: object) -> None:
        if self._marks is not None and self._plan is not None:
            self._lag.end()
            self._marks.write(self._mark("ended", self._plan))
            self._marks.close()
            self._marks = None

    def _mark(self, event: Literal["began", "ended"], plan: LoadPlan) -> ProcessMark:
        return ProcessMark(
            event=event,
            host=platform.node(),
            pid=os.getpid(),
            worker=self._worker,
            clock=self._clock,
            t_ns=time.perf_counter_ns(),
            at=datetime.now(UTC).isoformat(),
            url=plan.url,
            model=plan.model,
            open_plan=_open_plan(plan) if event == "began" else None,
            name=self._name,
        )


def _open_plan(plan: LoadPlan) -> dict[str, Any] | None:
    if plan.schedule is None:
        return None
    target = plan.target.model_copy(update={"extra_body": {}})
    without_secrets = {"headers": {}, "target": target, "api_key_env": None}
    return plan.model_copy(update=without_secrets).model_dump(mode="json")
