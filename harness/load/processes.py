"""The processes of one load: what they tell each other, and what each leaves behind about itself.

Locust's master starts the users of its workers and stops them. Two things it does not know, so they
are said in messages of our own: how many users have walked away from each worker, since the plan
names the number for all of them together; and that a worker cannot go on, which ends the load.

Each process that has users writes a mark when it begins and another when it ends in good order.
Of one that was killed the second is missing, and its rows and ticks tell how far it came.
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

from harness.collect.clock import local_clock
from harness.load.plan import AbandonLoad, LoadPlan
from harness.load.rows import ShardWriter
from harness.records import ProcessMark

_LEFT: Final = "walkaway_left"
_NO_GOING_ON: Final = "walkaway_no_going_on"
_TELL_EVERY_S: Final = 0.05


class Master:
    """Hears the workers. `_left` is how many users have walked away from each of them so far."""

    def __init__(
        self,
        runner: MasterRunner,
        *,
        end: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._stop_after: int | None = None
        self._left: dict[str, int] = {}
        self._end = end
        self._give_up = give_up
        runner.register_message(_LEFT, self._count)
        runner.register_message(_NO_GOING_ON, self._hear_why)

    def follow(self, plan: LoadPlan) -> None:
        """A load by this plan begins."""
        load = plan.load
        self._stop_after = load.stop_after_abandons if isinstance(load, AbandonLoad) else None
        self._left.clear()

    def _count(self, msg: Any, **_: Any) -> None:
        self._left[msg.node_id] = msg.data["users"]
        if self._stop_after is not None and sum(self._left.values()) >= self._stop_after:
            self._stop_after = None
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


def tell_why_not_to_go_on(runner: WorkerRunner, why: str) -> None:
    """Let the master end the load."""
    runner.send_message(_NO_GOING_ON, {"why": why})


def end_when_nobody_is_left(environment: Environment, end: Callable[[], None]) -> None:
    """By itself a master without workers stops the test, but waits until the time is up."""
    environment.events.test_stop.add_listener(lambda **_: end())  # type: ignore[no-untyped-call]


def begin_rows(plan: LoadPlan, runner: Runner | None) -> Path | None:
    """The folder for the rows of a load that begins now, with the mark that it has; None where the
    plan keeps none. On another machine than the master's it may be missing, and is made."""
    if plan.rows_dir is None:
        return None
    rows_dir = Path(plan.rows_dir)
    rows_dir.mkdir(parents=True, exist_ok=True)
    leave_mark("began", runner, plan)
    return rows_dir


def leave_mark(event: Literal["began", "ended"], runner: Runner | None, plan: LoadPlan) -> None:
    """Write that this process has begun with the load, or that it has ended it in good order."""
    assert plan.rows_dir is not None
    mark = ProcessMark(
        event=event,
        host=platform.node(),
        pid=os.getpid(),
        worker=max(0, getattr(runner, "worker_index", 0)),
        clock=local_clock(),
        t_ns=time.perf_counter_ns(),
        at=datetime.now(UTC).isoformat(),
        url=plan.url,
        model=plan.model,
    )
    with ShardWriter(Path(plan.rows_dir), ProcessMark, os.getpid()) as shard:
        shard.write(mark)
