"""The contents of a step's report: the lifecycle events until then, and the gauges."""

from collections.abc import Callable
from typing import NamedTuple

from reference_engine.core.request import Request
from reference_engine.core.scheduler import Scheduler
from reference_engine.protocol import Event


class EventLog:
    """`step`: the one in progress; at a boundary, the one about to start."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._events: list[Event] = []
        self.step = 0

    def note(
        self,
        request: Request,
        event: str,
        reason: str | None = None,
        *,
        t_ns: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        self._events.append(
            Event(
                t_ns=self._now_ns() if t_ns is None else t_ns,
                event=event,
                request_id=request.request_id,
                step=self.step,
                num_generated=request.num_generated,
                num_blocks=len(request.block_table) if num_blocks is None else num_blocks,
                reason=reason,
            )
        )

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class Gauges(NamedTuple):
    num_running: int
    num_waiting: int
    free_blocks: int
    cached_blocks: int


def read_gauges(scheduler: Scheduler) -> Gauges:
    pool = scheduler.kv_cache.pool
    return Gauges(
        num_running=scheduler.num_slots_used,
        num_waiting=len(scheduler.waiting),
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
    )
