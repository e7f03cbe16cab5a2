"""An engine with the faults that `Faults` names, all of which concern aborts.

The engine and the scheduler decide nothing by a fault: this module overrides steps of `Engine` that
are methods of their own for it (`_targets`, `_finish_aborted`, `_gauges`, `_missing_blocks`). The
scheduler knows what a fault leaves behind: `num_slots` may fall, and its checks allow lost blocks.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, NoReturn

from reference_engine.context import Cancellation
from reference_engine.core.request import FinishReason, Request, Status
from reference_engine.core.scheduler import Scheduler
from reference_engine.faults import Faults
from reference_engine.model.runners import Runner
from reference_engine.protocol import (
    SetFaults,
)
from reference_engine.worker.engine import Engine, EngineIO
from reference_engine.worker.inbox import Heard


class FaultIO(NamedTuple):
    random: Random
    sleep: Callable[[float], None]
    die: Callable[[], NoReturn]


class FaultyEngine(Engine):
    """Correct while `faults` are the defaults.

    `_lost_blocks` have no block table and never come back; `_held_back` maps ended requests to the
    time at which their blocks are given back; `_latest` is the latest reason for an abort.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, io: EngineIO, *, faults: Faults, by: FaultIO
    ) -> None:
        super().__init__(scheduler, runner, io)
        self._faults = faults
        self._by = by
        self._held_back: dict[Request, int] = {}
        self._lost_blocks: list[int] = []
        self._latest_gauges: dict[str, int] | None = None
        self._gauges_at_ns = 0
        self._latest: Cancellation | None = None

    def patience_s(self) -> float | None:
        patience_s = super().patience_s()
        if patience_s is not None or not self._held_back:
            return patience_s
        return max(0.0, (min(self._held_back.values()) - self._io.now_ns()) / 1e9)

    def step(self, boundary_ns: int, heard: list[Heard]) -> None:
        self._step = self._scheduler.counters.steps + 1
        if self._held_back:
            self._free_what_is_due(boundary_ns)
        super().step(boundary_ns, heard)

    def _free_what_is_due(self, now_ns: int) -> None:
        due = [request for request, at_ns in self._held_back.items() if at_ns <= now_ns]
        for request in due:
            del self._held_back[request]
            super()._free(request, "held_back")

    def _apply(self, heard: Heard) -> None:
        if isinstance(heard.command, SetFaults):
            self._faults = heard.command.faults
        super()._apply(heard)

    def _targets(self, name: str) -> list[Request]:
        if self._faults.abort_by_prefix:
            live = self._scheduler.requests.values()
            return [request for request in live if request.request_id.startswith(name)]
        return super()._targets(name)

    def _finish_aborted(self, request: Request, why: Cancellation) -> None:
        faults, by = self._faults, self._by
        is_first = why is not self._latest  # of the answers that are cancelled together
        self._latest = why
        if faults.die_on_abort:
            by.die()
        if faults.abort_parent_only and not is_first:
            return
        if faults.lose_abort > 0 and by.random.random() < faults.lose_abort:
            return
        super()._finish_aborted(request, why)
        if faults.stall_survivors_on_abort and is_first:
            by.sleep(faults.stall_survivors_on_abort)

    def _finish(self, request: Request, reason: FinishReason, why: str) -> None:
        status = request.status
        super()._finish(request, reason, why)
        if reason is not FinishReason.ABORT or status is Status.HANDING_OVER:
            return
        if self._faults.leak_slot and status is Status.RUNNING:
            self._scheduler.num_slots -= 1
        if self._faults.double_count:
            self._scheduler.counters.finished[reason] += 1
        if self._faults.never_count:
            self._scheduler.counters.finished[reason] -= 1

    def _free(self, request: Request, why: str) -> None:
        if request.finish_reason is FinishReason.ABORT:
            if self._faults.drop_prefix_on_cancel:
                self._drop_prefix(request)
            self._lose_blocks(request, self._faults.leak_blocks)
            if self._faults.hold_blocks:
                delay_ns = int(self._faults.hold_blocks * 1e9)
                self._held_back[request] = self._io.now_ns() + delay_ns
                return
        super()._free(request, why)

    def _drop_prefix(self, request: Request) -> None:
        cache = self._scheduler.kv_cache
        for block in cache.left_behind(request):
            cache.pool.blank(block)
        for block in request.block_table:
            cache.pool.index.drop(block)

    def _lose_blocks(self, request: Request, count: int) -> None:
        pool, table = self._scheduler.kv_cache.pool, request.block_table
        last = table[max(0, len(table) - count) :]
        lost = [block for block in last if not pool.is_shared(block)]
        for block in lost:
            table.remove(block)
            pool.index.drop(block)
        self._lost_blocks += lost

    def _gauges(self) -> dict[str, int]:
        max_age_s = self._faults.stale_gauge
        if not max_age_s:
            return super()._gauges()
        now_ns = self._io.now_ns()
        if self._latest_gauges is None or now_ns - self._gauges_at_ns >= max_age_s * 1e9:
            self._gauges_at_ns = now_ns
            self._latest_gauges = super()._gauges()
        return self._latest_gauges

    def _missing_blocks(self) -> Sequence[int]:
        return self._lost_blocks
