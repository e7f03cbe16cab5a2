"""The lifecycle events of the step in progress, until they go out with its report."""

from collections.abc import Callable
from typing import NamedTuple

from reference_engine.core.request import Request
from reference_engine.core.scheduler import Scheduler
from reference_engine.protocol import Event


class EventLog:
    """Stamps and collects. `step`: the one in progress; at a boundary, the one about to start."""

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
        """Log an event of a request, now unless it is said when."""
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
        """All since the last call."""
        events, self._events = self._events, []
        return events


class Gauges(NamedTuple):
    """Requests and blocks at the end of a step."""

    num_running: int
    num_waiting: int
    free_blocks: int
    cached_blocks: int


class GaugeReader:
    """Reads the scheduler, or repeats itself while its last reading is younger than it may be."""

    def __init__(self, scheduler: Scheduler, now_ns: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._now_ns = now_ns
        self._read_at_ns = 0
        self._latest: Gauges | None = None

    def read(self, max_age_s: float) -> Gauges:
        """`max_age_s` 0: the truth."""
        now_ns = self._now_ns() if max_age_s else 0
        if self._latest is None or now_ns - self._read_at_ns >= max_age_s * 1e9:
            pool = self._scheduler.kv_cache.pool
            self._read_at_ns = now_ns
            self._latest = Gauges(
                num_running=self._scheduler.num_slots_used,
                num_waiting=len(self._scheduler.waiting),
                free_blocks=pool.num_free,
                cached_blocks=pool.num_cached,
            )
        return self._latest
