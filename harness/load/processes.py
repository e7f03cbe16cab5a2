"""The processes of one load: their messages to each other, and the marks that each leaves behind.

Locust's master starts the users of its workers and stops them. Two things it does not know, so they
are said in messages of our own: how many users have walked away from each worker, since the plan
names the number for all of them together; and that a worker cannot go on, which ends the load.

Each process that has users writes a mark when it begins and another when it ends in good order.
A killed process lacks the second, and its rows and ticks show how far it came. The master writes
down the workers that connected: the rows of a worker on another machine are copied by hand, and
without that list forgotten rows would go unnoticed.
"""

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, Runner, WorkerRunner

from harness.load.lag import LagWatch
from harness.load.rows import ShardWriter
from harness.records import ProcessMark, WorkerSeen
from harness.store.manifest import local_clock
from harness.workload.plan import LoadPlan

_LEFT: Final = "walkaway_left"
_NO_GOING_ON: Final = "walkaway_no_going_on"
_ALL_SENT: Final = "walkaway_all_sent"
_TELL_EVERY_S: Final = 0.05


class Master:
    """Hears the workers. `_left` is how many users have walked away from each of them so far,
    `_done` are those whose part of a schedule has ended."""

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
        self._give_up = give_up
        runner.register_message(_LEFT, self._count)
        runner.register_message(_NO_GOING_ON, self._hear_why)
        runner.register_message(_ALL_SENT, self._hear_of_the_end)

    def follow(self, plan: LoadPlan) -> None:
        """A load by this plan begins."""
        self._stop_after = plan.stop_after_abandons
        self._left.clear()
        self._done.clear()

    def _count(self, msg: Any, **_: Any) -> None:
        self._left[msg.node_id] = msg.data["users"]
        if self._stop_after is not None and sum(self._left.values()) >= self._stop_after:
            self._stop_after = None
            self._end()

    def _hear_of_the_end(self, msg: Any, **_: Any) -> None:
        self._done.add(msg.node_id)
        clients = self._runner.clients
        if self._done >= {one.id for one in (*clients.running, *clients.spawning)}:
            self._end()

    def _hear_why(self, msg: Any, **_: Any) -> None:
        self._give_up(msg.data["why"])


def tell_how_many_left(runner: WorkerRunner, num_left: Callable[[], int]) -> None:
    """Let the master know, until the process ends."""

    def keep_telling() -> None:
        told = 0
        while True:
            gevent.sleep(_TELL_EVERY_S)
            if (now := num_left()) != told:
                told = now
                runner.send_message(_LEFT, {"users": now})

    gevent.spawn(keep_telling)


def tell_that_all_was_sent(runner: WorkerRunner) -> None:
    """Let the master, which a page has started, know that this part of a schedule has ended."""
    runner.send_message(_ALL_SENT, {})


def tell_why_not_to_go_on(runner: WorkerRunner, why: str) -> None:
    """Let the master end the load."""
    runner.send_message(_NO_GOING_ON, {"why": why})


def end_when_nobody_is_left(environment: Environment, end: Callable[[], None]) -> None:
    """By itself a master without workers stops the test, but waits until the time is up."""
    environment.events.test_stop.add_listener(lambda **_: end())  # type: ignore[no-untyped-call]


def note_workers(runner: MasterRunner, plan: LoadPlan) -> None:
    """Write down each worker that connects to this master, where the plan keeps rows."""
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


class ProcessMarks:
    """Says in the rows' folder that this process has begun with the load, and in the end that it
    has ended it in good order.

    On another machine than the master's the folder may be missing, and is made. The file is open
    all the time: at the end of a load there may be no handle left.
    """

    def __init__(self, rows_dir: Path, plan: LoadPlan, runner: Runner | None) -> None:
        rows_dir.mkdir(parents=True, exist_ok=True)
        self._plan = plan
        self._worker = max(0, getattr(runner, "worker_index", 0))
        self._name = runner.client_id if isinstance(runner, WorkerRunner) else ""
        self._clock = local_clock()
        self._shard = ShardWriter(rows_dir, ProcessMark, os.getpid())
        self._leave("began")

    def end(self) -> None:
        """To be called once, as the last thing."""
        self._leave("ended")
        self._shard.close()

    def _leave(self, event: Literal["began", "ended"]) -> None:
        mark = ProcessMark(
            event=event,
            host=platform.node(),
            pid=os.getpid(),
            worker=self._worker,
            clock=self._clock,
            t_ns=time.perf_counter_ns(),
            at=datetime.now(UTC).isoformat(),
            url=self._plan.url,
            model=self._plan.model,
            open_plan=_open_plan(self._plan) if event == "began" else None,
            name=self._name,
        )
        self._shard.write(mark)


def _open_plan(plan: LoadPlan) -> dict[str, Any] | None:
    if plan.schedule is None:
        return None
    target = plan.target.model_copy(update={"extra_body": {}})
    told = plan.model_copy(update={"headers": {}, "target": target, "api_key_env": None})
    return told.model_dump(mode="json")


class AboutThisProcess:
    """The records of this process beside a load's rows: its marks, and its lag.

    A load lasts as long as the process, or begins and ends on a web page.
    """

    def __init__(self, lag: LagWatch, runner: Runner | None) -> None:
        self._lag = lag
        self._runner = runner
        self._marks: ProcessMarks | None = None

    def begin(self, plan: LoadPlan) -> None:
        """Nothing is kept where the plan keeps no rows."""
        if plan.rows_dir is not None:
            rows_dir = Path(plan.rows_dir)
            self._marks = ProcessMarks(rows_dir, plan, self._runner)
            self._lag.begin(rows_dir)

    def end(self, **_: object) -> None:
        """The load has ended in good order; doing it twice is fine."""
        if self._marks is not None:
            self._lag.end()
            self._marks.end()
            self._marks = None
