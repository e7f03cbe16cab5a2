"""The step loop, sole owner of the engine's state.

    boundary: drain the inbox, apply aborts and additions ─▶ schedule ─▶ execute ─▶ update ─▶ report

Commands are applied between steps only, so nothing can vanish under a running step: a request
whose abort arrives during a step gets that step's token (counted as generated, read by nobody) and
is removed at the next boundary. Everything that happens is stamped into the report of the step.
"""

from collections.abc import Callable
from random import Random

from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from reference_engine.faults import Faults
from reference_engine.model.runner import Runner
from reference_engine.model.tokenizer import Tokenizer
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    Event,
    Output,
    SetFaults,
    StepRecord,
    StepReport,
)
from reference_engine.request import FinishReason, Request
from reference_engine.worker.answer import AnswerText
from reference_engine.worker.inbox import Heard, Inbox


class Engine:
    """Runs steps until the inbox closes.

    All its fields change on the loop's thread only, like the scheduler itself.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        faults: Faults,
        now_ns: Callable[[], int],
        random: Random,
        report: Callable[[StepReport], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = Tokenizer(runner.info.vocab_size)
        self._faults = faults
        self._now_ns = now_ns
        self._random = random
        self._send_report = report
        self._answers: dict[str, AnswerText] = {}
        self._events: list[Event] = []
        self._outputs: list[Output] = []
        self._step = 0
        self._stuck = False

    def run(self, inbox: Inbox) -> None:
        """Step while there is work, sleep in the inbox while there is none."""
        while True:
            idle = self._stuck or not self._scheduler.has_work
            drained = inbox.drain(wait=idle)
            if drained is None:
                return
            self.step(*drained)

    def step(self, boundary_ns: int, heard: list[Heard]) -> None:
        """One boundary and, if there is anything to compute, the step after it."""
        self._step = self._scheduler.counters.steps + 1
        for message in heard:
            self._apply(message)
        plan = self._scheduler.schedule()
        self._note_decisions(plan)
        # Requests may wait without a block left for any of them (the blocks were leaked): then
        # there is no step to run, and spinning would not help them.
        self._stuck = self._scheduler.has_work and not plan.scheduled
        self._report(self._execute(plan, boundary_ns) if plan.scheduled else None)

    def _apply(self, heard: Heard) -> None:
        match heard.message:
            case AddRequest() as add:
                self._add(add)
            case AbortRequest() as abort:
                self._abort(heard.t_ns, abort)
            case SetFaults(faults=faults):
                self._faults = faults

    def _add(self, message: AddRequest) -> None:
        request = Request(message.request_id, message.prompt_token_ids, message.sampling)
        self._scheduler.add(request)
        self._answers[request.request_id] = AnswerText(message.sampling.stop)

    def _abort(self, heard_ns: int, message: AbortRequest) -> None:
        request = self._scheduler.requests.get(message.request_id)
        if request is None:
            return  # it ended by itself while the abort was on its way
        self._note(request, "abort_received", message.reason, t_ns=heard_ns)
        if self._random.random() < self._faults.lose_abort:
            return
        self._finish(request, FinishReason.ABORT, message.reason)

    def _finish(self, request: Request, reason: FinishReason, why: str) -> None:
        """The worker's one way out: scheduler, log and client all learn of it here."""
        num_leaked = self._faults.leak_blocks if reason is FinishReason.ABORT else 0
        answer = self._answers.pop(request.request_id)
        num_freed = self._scheduler.finish(
            request.request_id,
            reason,
            num_leaked=num_leaked,
            on_removed=lambda: self._note(request, "removed", why),
        )
        self._note(request, "blocks_freed", why, num_blocks=num_freed)
        self._note(request, "finished", reason)
        if reason is FinishReason.ABORT:
            self._output(request, "", reason)
        else:
            self._output(request, answer.flush(), reason)

    def _execute(self, plan: StepPlan, boundary_ns: int) -> StepRecord:
        pool, scheduler = self._scheduler.kv_cache.pool, self._scheduler
        num_running, num_waiting = len(scheduler.running), len(scheduler.waiting)
        free_blocks = pool.num_free
        sampled = self._runner.execute(plan)
        ended_ns = self._now_ns()
        for request in scheduler.update(plan, sampled):
            self._deliver(request, ended_ns)
        return StepRecord(
            step=plan.step,
            started_ns=boundary_ns,
            ended_ns=ended_ns,
            num_running=num_running,
            num_waiting=num_waiting,
            free_blocks=free_blocks,
            scheduled={request.request_id: n for request, n in plan.scheduled},
            sampled=dict.fromkeys(sampled, 1),
        )

    def _deliver(self, request: Request, ended_ns: int) -> None:
        """Send a request's new token on, and end the request if that was its last."""
        if request.num_generated == 1:
            self._note(request, "first_token", t_ns=ended_ns)
        answer = self._answers[request.request_id]
        text, stopped = answer.push(self._tokenizer.text_of(request.token_ids[-1]))
        reason = FinishReason.STOP if stopped else request.finish_reason
        self._output(request, text, None)
        if reason is not None:
            self._finish(request, reason, reason)

    def _output(self, request: Request, text: str, reason: FinishReason | None) -> None:
        output = Output(
            request_id=request.request_id,
            text=text,
            num_generated=request.num_generated,
            finish_reason=reason,
        )
        self._outputs.append(output)

    def _note_decisions(self, plan: StepPlan) -> None:
        for request in plan.preempted:
            self._note(request, "preempted")
        for request in plan.admitted:
            self._note(request, "admitted")
        for request in plan.resumed:
            self._note(request, "resumed")

    def _note(
        self,
        request: Request,
        event: str,
        reason: str | None = None,
        *,
        t_ns: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        """Log an event of the step in progress; at a boundary, of the step about to start."""
        self._events.append(
            Event(
                t_ns=self._now_ns() if t_ns is None else t_ns,
                event=event,
                request_id=request.request_id,
                step=self._step,
                num_generated=request.num_generated,
                num_blocks=len(request.block_table) if num_blocks is None else num_blocks,
                reason=reason,
            )
        )

    def _report(self, record: StepRecord | None) -> None:
        events, self._events = self._events, []
        outputs, self._outputs = self._outputs, []
        self._send_report(
            StepReport(
                step=record,
                outputs=outputs,
                events=events,
                num_running=len(self._scheduler.running),
                num_waiting=len(self._scheduler.waiting),
                free_blocks=self._scheduler.kv_cache.pool.num_free,
                counters=self._scheduler.counters,
            )
        )
