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

With `--async-scheduling` the loop plans the next step while one is computed:

    boundary: drain, apply ─▶ schedule n + 1 ─▶ step n is over: update ─▶ launch n + 1 ─▶ report n

A request that is cancelled during step n is in step n + 1, which has been planned: the token of
that step is dropped, and its blocks, to which that step writes, are given back when it is over. So
it is for a request that ends in step n by an end of sequence or a stop string, which no plan
foresees.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from reference_engine.context import Cancellation, Context
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
from reference_engine.worker.engine_io import Compute, EngineIO, FrontendShare, Leaving
from reference_engine.worker.inbox import (
    Added,
    CancelCommand,
    DecodeWorkerLost,
    Heard,
    Inbox,
    Inspection,
    TakenOver,
)


class Live(NamedTuple):
    """Kept of a request until its end. Only this keeps the contexts alive."""

    answer: GrowingAnswer
    context: Context
    parent: Context | None


class Launched(NamedTuple):
    """A step in flight: how to get its result, when it began, and how full the engine was then.
    `ended`: requests whose blocks it uses and that have ended since, and why.
    """

    plan: StepPlan
    compute: Compute
    started_ns: int
    num_running: int
    num_waiting: int
    free_blocks: int
    ended: list[tuple[Request, str]]


class StepOver(NamedTuple):
    """`grown`: the requests with a new token. If the step was out of memory, which is the `error`,
    `grown` are the requests that it ends.
    """

    record: StepRecord
    probabilities: Mapping[str, float]
    grown: list[Request]
    error: str | None = None


class Engine:
    """All its fields change on the loop's thread only, like the scheduler's.

    `_step` is the step in progress; at a boundary, the one about to be planned. `_launched` is the
    step in flight.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, io: EngineIO) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = runner.tokenizer
        self._io = io
        self._step = 0
        self._launched: Launched | None = None
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
        is_busy = self._launched or (self._scheduler.has_work and not self._is_stuck)
        return 0.0 if is_busy else None

    def step(self, boundary_ns: int, heard: list[Heard]) -> None:
        scheduler = self._scheduler
        self._step = scheduler.next_step
        for one in heard:
            self._apply(one)
        plan = scheduler.schedule()
        # If the requests wait for blocks that never come back, there is no step to run, and
        # trying again at once would not help.
        is_idle = not (self._launched or plan.scheduled or plan.preempted)
        self._is_stuck = is_idle and scheduler.has_work
        try:
            over = self._take_step(plan, boundary_ns)
        except DeviceFailedError:
            self._fail(scheduler.requests.values(), "device_failed")
            self._report(None)
            raise
        if over is not None:
            self._tell(over)
        self._report(None if over is None else over.record)
        while self._leaving:  # after the report, so that the second token follows the first
            assert self._io.hand_over is not None
            self._io.hand_over(self._leaving.pop(0))
        if not scheduler.has_work:
            scheduler.check_idle(self._missing_blocks())

    def _take_step(self, plan: StepPlan, boundary_ns: int) -> StepOver | None:
        """Launch the planned step. The step that is over then is this one, or with `ahead` the one
        before it.
        """
        if self._io.ahead is None:
            self._launch(plan, boundary_ns)
            return self._see_over()
        over = self._see_over()
        if over is None or over.error is None:  # else the plan was dropped with that step
            self._launch(plan, boundary_ns if over is None else over.record.ended_ns)
        return over

    def _launch(self, plan: StepPlan, started_ns: int) -> None:
        self._step = plan.step
        self._log_decisions(plan)
        if plan.is_empty:
            return
        compute, ahead = self._runner.launch(plan), self._io.ahead
        self._launched = Launched(
            plan,
            compute if ahead is None else ahead(compute),
            started_ns,
            num_running=self._scheduler.num_slots_used,
            num_waiting=len(self._scheduler.waiting),
            free_blocks=self._scheduler.kv_cache.pool.num_free,
            ended=[],
        )

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
        """Free its blocks at once, or when the step in flight is over, if that uses its blocks."""
        launched = self._launched
        if launched is not None and launched.plan.uses(request):
            launched.ended.append((request, why))
        else:
            self._give_back(request, why)

    def _give_back(self, request: Request, why: str) -> None:
        num_freed = self._scheduler.free(request)
        self._note(request, "blocks_freed", why, num_blocks=num_freed)

    def _see_over(self) -> StepOver | None:
        """Wait for the step in flight, and record its result."""
        scheduler, launched, error = self._scheduler, self._launched, None
        if launched is None:
            return None
        sampled = Sampled({}, {})
        try:
            sampled = self._compute(launched)
        except OutOfMemoryError as raised:
            error = str(raised)
        except DeviceFailedError:
            self._let_go(launched)
            raise
        ended_ns, plan = self._io.now_ns(), launched.plan
        record = StepRecord(
            step=plan.step,
            started_ns=launched.started_ns,
            ended_ns=ended_ns,
            num_running=launched.num_running,
            num_waiting=launched.num_waiting,
            free_blocks=launched.free_blocks,
            scheduled={request.request_id: n for request, n in plan.scheduled.items()},
            sampled=dict.fromkeys(sampled.tokens, 1),
            worker=self._io.worker,
        )
        if error is not None:
            grown = scheduler.give_up(plan)
        else:
            grown = scheduler.update(plan, sampled.tokens, with_plain=self._io.reads_all)
        self._let_go(launched)
        return StepOver(record, sampled.probabilities, grown, error)

    def _let_go(self, launched: Launched) -> None:
        """Nothing writes any more to the blocks of requests that ended during the step."""
        self._launched = None
        for request, why in launched.ended:
            self._give_back(request, why)

    def _tell(self, over: StepOver) -> None:
        self._step = over.record.step
        if over.error is not None:
            self._end_for_memory(over.grown, over.error)
            return
        for request in over.grown:
            probability = over.probabilities.get(request.request_id)
            self._deliver(request, probability, over.record.ended_ns)

    def _end_for_memory(self, requests: Sequence[Request], error: str) -> None:
        self._fail(requests, OUT_OF_MEMORY)
        what = f"step {self._step} was out of memory and has ended {len(requests)} of its requests"
        self._io.say(f"{what}: {error}; {LESS_MEMORY}")

    def _compute(self, launched: Launched) -> Sampled:
        return launched.compute()

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
                num_generated=request.num_generated + request.num_dropped,
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
