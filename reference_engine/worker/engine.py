"""The step loop, sole owner of the engine's state.

    boundary: drain the inbox, apply aborts and additions ─▶ schedule ─▶ execute ─▶ update ─▶ report

Commands are applied between steps only, so nothing vanishes under a running step: a request that is
cancelled during a step gets that step's token (counted as generated, never read) and is removed at
the next boundary; a prompt that is computed in chunks ends with the chunk. Each request has a
`Context`, which the thread that hears of a cancellation cancels at once; the loop then finds it in
its inbox. Each lifecycle event is stamped when it happens, and goes out in the report of its step,
to the frontend of its request.

A step that is out of memory is the end of its requests, and the next one follows. A device that has
failed is the end of all requests, and of the loop.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from reference_engine.context import Cancellation, Context
from reference_engine.core.early_stop import QualityHook
from reference_engine.core.request import FinishReason, Request, Status
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.model.runners import DeviceFailedError, OutOfMemoryError, Runner
from reference_engine.protocol import (
    LESS_MEMORY,
    OUT_OF_MEMORY,
    AddRequest,
    HandedOver,
    Output,
    RequestEvent,
    SetFaults,
    StepRecord,
    StepReport,
)
from reference_engine.worker.answer import GrowingAnswer, ending_of
from reference_engine.worker.inbox import (
    Added,
    CancelCommand,
    DecodeWorkerLost,
    Heard,
    Inbox,
    Inspection,
    TakenOver,
)


class FrontendShare(NamedTuple):
    """One frontend's part of a report."""

    outputs: list[Output]
    events: list[RequestEvent]


ReportStep = Callable[[StepReport, Mapping[str, FrontendShare]], None]


class Leaving(NamedTuple):
    """A request that continues at the decode worker."""

    request: AddRequest
    blocks: bytes | bytearray
    frontend: str
    context: Context
    parent: Context | None


class EngineIO(NamedTuple):
    """A clock, the way to the frontends, the operator's hook, and the worker's name.

    `report` gets a report without outputs and events, and each frontend's share of these.
    `hang_up` ends a frontend's connection, with a reason, after an impossible request. A prefill
    worker has a way to `hand_over` a request. If not `reads_all`, there are no outputs for plain
    decodes, and no texts: a later output says how many tokens there were. `say`: to the operator.
    """

    now_ns: Callable[[], int]
    report: ReportStep
    hang_up: Callable[[str, str], None]
    quality_hook: QualityHook | None = None
    worker: str = ""
    hand_over: Callable[[Leaving], None] | None = None
    reads_all: bool = True
    say: Callable[[str], object] = lambda _: None


class Live(NamedTuple):
    """Kept of a request until its end. Only this keeps the contexts alive."""

    answer: GrowingAnswer
    context: Context
    parent: Context | None


class Engine:
    """All its fields change on the loop's thread only, like the scheduler's.

    `_step` is the step in progress; at a boundary, the one about to start.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, io: EngineIO) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = runner.tokenizer
        self._io = io
        self._step = 0
        self._shares: defaultdict[str, FrontendShare] = defaultdict(lambda: FrontendShare([], []))
        self._live: dict[str, Live] = {}
        self._leaving: list[Leaving] = []
        self._is_stuck = False

    def run(self, inbox: Inbox) -> None:
        """Raises DeviceFailedError, after the last report."""
        while self._take_turn(inbox):
            pass

    def _take_turn(self, inbox: Inbox) -> bool:
        drained = inbox.drain(timeout_s=self.patience_s())
        if drained is None:
            return False
        self.step(*drained)
        return True

    def patience_s(self) -> float | None:
        """How long to wait in the inbox: 0 while there is a step to compute, None for any time."""
        return 0.0 if self._scheduler.has_work and not self._is_stuck else None

    def step(self, boundary_ns: int, heard: list[Heard]) -> None:
        self._step = self._scheduler.counters.steps + 1
        for one in heard:
            self._apply(one)
        plan = self._scheduler.schedule()
        self._log_decisions(plan)
        # If the requests wait for blocks that never come back, there is no step to run, and
        # trying again at once would not help.
        self._is_stuck = not plan.scheduled and not plan.preempted and self._scheduler.has_work
        try:
            record = None if plan.is_empty else self._execute(plan, boundary_ns)
        except DeviceFailedError:
            self._fail(self._scheduler.requests.values(), "device_failed")
            self._report(None)
            raise
        self._report(record)
        while self._leaving:  # after the report, so that the second token follows the first
            assert self._io.hand_over is not None
            self._io.hand_over(self._leaving.pop(0))
        if not self._scheduler.has_work:
            self._scheduler.check_idle(self._missing_blocks())

    def _apply(self, heard: Heard) -> None:
        match heard.command:
            case Added() as added:
                self._add(added)
            case CancelCommand(request_id=name, why=why):
                for request in self._targets(name):
                    self._abort(request, heard.t_ns, why)
            case TakenOver(request_id=name):
                self._see_taken_over(name)
            case DecodeWorkerLost():
                self._fail(self._scheduler.requests.values(), "decode_worker_lost")
            case Inspection(result=result):
                self._inspect(result)
            case SetFaults():
                pass  # for an engine with faults

    def _add(self, added: Added) -> None:
        message = added.request
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            message.sampling,
            priority=message.priority,
            answer=message.answer,
            frontend=added.frontend,
        )
        try:
            if message.answer:
                self._take_over(request, added)
            else:
                self._scheduler.add(request)
        except ValueError as error:
            self._io.hang_up(added.frontend, str(error))
            return
        answer = GrowingAnswer(
            request.sampling,
            request.num_prompt_tokens,
            self._io.quality_hook,
            self._tokenizer.text_stream(message.prompt_token_ids),
        )
        given = message.handed_over
        for token_id in message.answer:  # the worker before has shown its text
            answer.push(token_id, None if given is None else given.probability)
        self._live[request.request_id] = Live(answer, added.context, added.parent)

    def _take_over(self, request: Request, added: Added) -> None:
        """A hand-over with incomplete blocks, or of another size, counts as one without blocks."""
        given, runner = added.request.handed_over, self._runner
        num_blocks = self._scheduler.kv_cache.num_missing(request, request.num_tokens - 1)
        has_blocks = given is not None and len(added.blocks) == num_blocks * runner.block_bytes
        if self._scheduler.take_over(request, has_blocks=has_blocks):
            runner.import_blocks(request.host_table, added.blocks)
        if given is not None:
            request.num_cached_tokens = given.num_cached_tokens
        reason = None if request.host_table else "recompute"
        self._note(request, "taken_over", reason, num_blocks=len(request.host_table))

    def _targets(self, name: str) -> list[Request]:
        request = self._scheduler.requests.get(name)
        return [] if request is None else [request]

    def _abort(self, request: Request, heard_ns: int, why: Cancellation) -> None:
        self._note(request, "abort_received", why.reason, t_ns=heard_ns)
        self._finish_aborted(request, why)

    def _finish_aborted(self, request: Request, why: Cancellation) -> None:
        self._finish(request, FinishReason.ABORT, why.reason)

    def _inspect(self, result: Future[None]) -> None:
        try:
            self._scheduler.check_integrity(self._missing_blocks())
            if not self._scheduler.has_work:
                self._scheduler.check_idle(self._missing_blocks())
        except AssertionError as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    def _fail(self, requests: Iterable[Request], why: str) -> None:
        for request in list(requests):
            self._finish(request, FinishReason.ERROR, why)

    def _finish(self, request: Request, reason: FinishReason, why: str) -> None:
        """The only way out: scheduler, log and client all learn of the end here."""
        request_id, phase = request.request_id, request.phase
        is_leaving = request.status is Status.HANDING_OVER
        self._scheduler.finish(request_id, reason)
        self._note(request, "removed", why)
        self._free(request, why)
        self._note(request, "finished", reason)
        live = self._live.pop(request_id)
        if not is_leaving:  # else the client hears of the end from the decode worker
            output = Output(
                request_id=request_id,
                text=live.answer.flush(),
                num_generated=request.num_generated,
                ending=ending_of(request, phase, live.answer.end, why),
            )
            self._shares[request.frontend].outputs.append(output)

    def _see_taken_over(self, name: str) -> None:
        request = self._scheduler.finish(name, None)
        if request is not None:
            self._free(request, "handed_over")
            del self._live[name]

    def _free(self, request: Request, why: str) -> None:
        num_freed = self._scheduler.free(request)
        self._note(request, "blocks_freed", why, num_blocks=num_freed)

    def _execute(self, plan: StepPlan, boundary_ns: int) -> StepRecord:
        scheduler, error = self._scheduler, None
        try:
            sampled = self._compute(plan)
        except OutOfMemoryError as raised:
            sampled, error = Sampled({}, {}), str(raised)
        record = StepRecord(
            step=plan.step,
            started_ns=boundary_ns,
            ended_ns=self._io.now_ns(),
            num_running=scheduler.num_slots_used,
            num_waiting=len(scheduler.waiting),
            free_blocks=scheduler.kv_cache.pool.num_free,
            scheduled={request.request_id: n for request, n in plan.scheduled.items()},
            sampled=dict.fromkeys(sampled.tokens, 1),
            worker=self._io.worker,
        )
        if error is not None:
            self._end_for_memory(scheduler.give_up(plan), error)
            return record
        reads_all = self._io.reads_all
        for request in scheduler.update(plan, sampled.tokens, with_plain=reads_all):
            probability = sampled.probabilities.get(request.request_id)
            self._deliver(request, probability, record.ended_ns)
        return record

    def _end_for_memory(self, requests: Sequence[Request], error: str) -> None:
        self._fail(requests, OUT_OF_MEMORY)
        what = f"step {self._step} was out of memory and has ended {len(requests)} of its requests"
        self._io.say(f"{what}: {error}; {LESS_MEMORY}")

    def _compute(self, plan: StepPlan) -> Sampled:
        return self._runner.execute(plan)

    def _deliver(self, request: Request, probability: float | None, ended_ns: int) -> None:
        """The end of a sequence goes before any other end, and an early stop before a length."""
        name, num_generated, text = request.request_id, request.num_generated, ""
        if num_generated == 1:
            self._note(request, "first_token", t_ns=ended_ns)
        answer = self._live[name].answer
        token_id, reason = request.token_ids[-1], request.finish_reason
        if reason is None or reason is not FinishReason.STOP:  # an enum's member is slow to look up
            text = answer.push(token_id, probability)
        output = Output(request_id=name, text=text, num_generated=num_generated, token_id=token_id)
        self._shares[request.frontend].outputs.append(output)
        if answer.end is None:
            if reason is not None:
                self._finish(request, reason, reason)
            elif self._io.hand_over is not None:
                self._leave(request, probability)
        elif answer.end.condition is None:
            self._finish(request, FinishReason.STOP, FinishReason.STOP)
        else:
            self._scheduler.counters.count_early_stop(request, answer.end.condition)
            self._finish(request, FinishReason.STOP, "early_stop")

    def _leave(self, request: Request, probability: float | None) -> None:
        left_ns = self._io.now_ns()
        try:
            blocks = self._runner.export_blocks(request.block_table)
        except OutOfMemoryError as error:
            self._end_for_memory([request], str(error))
            return
        self._scheduler.hand_over(request)
        self._note(request, "handed_over", t_ns=left_ns)
        added = AddRequest(
            request_id=request.request_id,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            sampling=request.sampling,
            priority=request.priority,
            answer=request.token_ids[request.num_prompt_tokens :],
            handed_over=HandedOver(
                num_bytes=len(blocks),
                num_cached_tokens=request.num_cached_tokens,
                probability=probability,
            ),
        )
        live = self._live[request.request_id]
        self._leaving.append(Leaving(added, blocks, request.frontend, live.context, live.parent))

    def _log_decisions(self, plan: StepPlan) -> None:
        for event, requests in (
            ("preempted", plan.preempted),
            ("admitted", plan.admitted),
            ("resumed", plan.resumed),
        ):
            for request in requests:
                self._note(request, event, "swap" if request in plan.swapped else None)

    def _note(
        self,
        request: Request,
        event: str,
        reason: str | None = None,
        *,
        t_ns: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        self._shares[request.frontend].events.append(
            RequestEvent(
                t_ns=self._io.now_ns() if t_ns is None else t_ns,
                event=event,
                request_id=request.request_id,
                step=self._step,
                num_generated=request.num_generated,
                num_blocks=len(request.block_table) if num_blocks is None else num_blocks,
                reason=reason,
            )
        )

    def _report(self, record: StepRecord | None) -> None:
        report = StepReport(
            step=record,
            outputs=[],
            events=[],
            counters=self._scheduler.counters,
            worker=self._io.worker,
            **self._gauges(),
        )
        shares = dict(self._shares)
        self._shares.clear()
        self._io.report(report, shares)

    def _gauges(self) -> dict[str, int]:
        pool, host = self._scheduler.kv_cache.pool, self._scheduler.kv_cache.host
        return {
            "num_running": self._scheduler.num_slots_used,
            "num_waiting": len(self._scheduler.waiting),
            "free_blocks": pool.num_free,
            "cached_blocks": pool.num_cached,
            "host_blocks": host.num_held,
        }

    def _missing_blocks(self) -> Sequence[int]:
        return ()
