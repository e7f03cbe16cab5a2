"""An engine with the faults that `Faults` names, nearly all of which concern aborts.

The engine and the scheduler decide nothing by a fault: this module overrides steps of `Engine` that
are methods of their own for it (`_targets`, `_finish_aborted`, `_compute`, `_gauges`,
`_missing_blocks`). The scheduler knows what a fault leaves behind: `num_slots` may change, and its
checks allow lost blocks.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, NamedTuple, NoReturn

from msgspec.structs import replace

from reference_engine.context import Cancellation
from reference_engine.core.request import FinishReason, Phase, Request, Status
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import Sampled
from reference_engine.faults import Faults
from reference_engine.model.runners import Runner
from reference_engine.protocol import SetFaults
from reference_engine.worker.engine import Engine, Launched
from reference_engine.worker.engine_io import EngineIO
from reference_engine.worker.inbox import Added, CancelCommand, Heard, Inspection

_TORN_STEPS: Final = 3  # after an abort whose slot is used again too early


class FaultIO(NamedTuple):
    random: Random
    sleep: Callable[[float], None]
    die: Callable[[], NoReturn]


class FaultyEngine(Engine):
    """Correct while `faults` are the defaults.

    `_lost_blocks` have no block table and never come back; `_held_back` maps ended requests to the
    time at which their blocks are given back; `_latest` is the latest reason for an abort.

    `_running_on` maps requests to the aborts that wait for the end of their prefill. Slots that
    were not given back: `_unswept` at this boundary, `_stranded` at boundaries at which the engine
    fell idle. `_just_ended`: names of requests that ended in the last step. `_torn_by`,
    `_torn_until`: a token of an aborted request that others get instead of theirs, up to a step.
    `_spoiled`: prompts of aborted requests. `_num_left_waiting`: aborted requests that had waited.
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
        self._num_aborts = 0
        self._next_is_short = False
        self._running_on: dict[Request, Cancellation] = {}
        self._unswept = 0
        self._stranded = 0
        self._just_ended: set[str] = set()
        self._aborted_at = -1  # the step
        self._torn_by = 0
        self._torn_until = -1
        self._spoiled: set[tuple[int, ...]] = set()
        self._num_left_waiting = 0

    @property
    def _is_wedged(self) -> bool:
        return 0 < self._faults.wedge_after <= self._num_aborts

    def patience_s(self) -> float | None:
        if self._is_wedged:
            return None
        patience_s = super().patience_s()
        if patience_s is not None or not self._held_back:
            return patience_s
        return max(0.0, (min(self._held_back.values()) - self._io.now_ns()) / 1e9)

    def step(self, boundary_ns: int, heard: list[Heard]) -> None:
        self._step = self._scheduler.next_step
        if self._is_wedged:
            heard = [one for one in heard if isinstance(one.command, SetFaults | Inspection)]
            for one in heard:
                self._apply(one)
            return
        if self._held_back:
            self._free_what_is_due(boundary_ns)
        self._end_run_on()
        super().step(boundary_ns, heard)
        self._sweep()

    def _end_run_on(self) -> None:
        for request, why in list(self._running_on.items()):
            if request.status is Status.FINISHED:
                del self._running_on[request]
            elif request.phase is not Phase.PREFILL:
                del self._running_on[request]
                self._finish(request, FinishReason.ABORT, why.reason)

    def _sweep(self) -> None:
        """Give back the slots of requests that left at this boundary, if others remain to run."""
        if self._scheduler.has_work:
            self._scheduler.num_slots += self._unswept
        else:
            self._stranded += self._unswept
        self._unswept = 0

    def _free_what_is_due(self, now_ns: int) -> None:
        due = [request for request, at_ns in self._held_back.items() if at_ns <= now_ns]
        for request in due:
            del self._held_back[request]
            super()._free(request, "held_back")

    def _apply(self, heard: Heard) -> None:
        match heard.command:
            case SetFaults(faults=faults):
                self._faults = faults
            case CancelCommand(request_id=name) if name in self._just_ended:
                self._scheduler.num_slots += self._faults.end_twice
            case Added(request=message) as added if self._next_is_short:
                self._next_is_short = False
                most = max(1, message.sampling.max_tokens - 1)
                message = replace(message, sampling=replace(message.sampling, max_tokens=most))
                heard = heard._replace(command=added._replace(request=message))
        super()._apply(heard)

    def _targets(self, name: str) -> list[Request]:
        if self._faults.abort_by_prefix:
            live = self._scheduler.requests.values()
            return [request for request in live if request.request_id.startswith(name)]
        return super()._targets(name)

    def _finish_aborted(self, request: Request, why: Cancellation) -> None:
        faults, by = self._faults, self._by
        if faults.prefill_runs_on and request.phase is Phase.PREFILL:
            self._running_on[request] = why
            return
        is_first = why is not self._latest  # of the answers that are cancelled together
        self._latest = why
        if faults.die_on_abort:
            by.die()
        if faults.abort_parent_only and not is_first:
            return
        if faults.lose_abort > 0 and by.random.random() < faults.lose_abort:
            return
        was_running = request.status is Status.RUNNING
        super()._finish_aborted(request, why)
        self._num_aborts += 1
        self._aborted_at = self._step
        self._next_is_short = faults.next_short
        self._num_left_waiting += not was_running
        if faults.spoil_prompt:
            self._spoiled.add(_prompt_of(request))
        if was_running and faults.reuse_before_step_ends:
            self._torn_by, self._torn_until = request.token_ids[-1], self._step + _TORN_STEPS
        hits = (
            faults.running_abort_ends_running if was_running else faults.queued_abort_ends_running
        )
        if hits and self._scheduler.running:
            self._finish(self._scheduler.running[0], FinishReason.ABORT, why.reason)
        if faults.stall_survivors_on_abort and is_first:
            by.sleep(faults.stall_survivors_on_abort)

    def _finish(self, request: Request, reason: FinishReason, why: str) -> None:
        status = request.status
        super()._finish(request, reason, why)
        if status is Status.HANDING_OVER:
            return
        if reason is not FinishReason.ABORT:
            self._ended_by_itself(request)
            return
        faults, scheduler = self._faults, self._scheduler
        if status is Status.RUNNING:
            scheduler.num_slots -= faults.leak_slot
            if faults.clean_up_on_traffic and scheduler.num_slots > 1:  # one to come back by
                scheduler.num_slots -= 1
                self._unswept += 1
        counted = scheduler.counters.finished
        counted[reason] += faults.double_count - faults.never_count
        if faults.label_length:
            counted[FinishReason.LENGTH] = counted.get(FinishReason.LENGTH, 0) + 1
        if faults.forget_aborted_tokens:
            scheduler.counters.generated_tokens -= request.num_generated

    def _ended_by_itself(self, request: Request) -> None:
        self._scheduler.num_slots += self._stranded
        self._stranded = 0
        self._just_ended.add(request.request_id)
        if self._faults.abort_after_done:
            counted = self._scheduler.counters.finished
            counted[FinishReason.ABORT] = counted.get(FinishReason.ABORT, 0) + 1

    def _compute(self, launched: Launched) -> Sampled:
        plan = launched.plan
        self._just_ended.clear()
        if self._faults.second_prefill_dies and self._aborted_at == plan.step and plan.partial:
            self._by.die()
        sampled = super()._compute(launched)
        if plan.step <= self._torn_until:
            return sampled._replace(tokens=dict.fromkeys(sampled.tokens, self._torn_by))
        if self._spoiled:
            for request in plan.sampling:
                if _prompt_of(request) in self._spoiled:
                    sampled.tokens[request.request_id] ^= 1
        return sampled

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
        request.block_table = [block for block in table if block not in lost]
        for block in lost:
            pool.index.drop(block)
        self._lost_blocks += lost

    def _gauges(self) -> dict[str, int]:
        gauges, max_age_s = super()._gauges(), self._faults.stale_gauge
        if self._faults.count_left_as_waiting:
            gauges["num_waiting"] += self._num_left_waiting
        if not max_age_s:
            return gauges
        now_ns = self._io.now_ns()
        if self._latest_gauges is None or now_ns - self._gauges_at_ns >= max_age_s * 1e9:
            self._gauges_at_ns = now_ns
            self._latest_gauges = gauges
        return self._latest_gauges

    def _missing_blocks(self) -> Sequence[int]:
        return self._lost_blocks


def _prompt_of(request: Request) -> tuple[int, ...]:
    return tuple(request.token_ids[: request.num_prompt_tokens])
