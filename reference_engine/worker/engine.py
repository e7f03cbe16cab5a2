"""The step loop, sole owner of the engine's state.

    boundary: drain the inbox, apply aborts and additions ─▶ schedule ─▶ execute ─▶ update ─▶ report

Commands are applied between steps only, so nothing vanishes under a running step: a request whose
abort arrives during a step gets that step's token (counted as generated, never read) and is removed
at the next boundary; a prompt that is computed in chunks ends with the chunk. Each lifecycle event
is stamped when it happens, and goes out in the report of its step.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from reference_engine.core.early_stop import QualityHook
from reference_engine.core.request import FinishReason, Phase, Request
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from reference_engine.model.runners import Runner
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    EarlyStopped,
    Ending,
    Event,
    Output,
    SetFaults,
    StepRecord,
    StepReport,
    ToWorker,
)
from reference_engine.wire import (
    Beat,
    Hello,
)
from reference_engine.worker.answer import Answer, TextEnd


class ConnectionLost(NamedTuple):
    """The frontend's connection has ended, and its requests with it.

    `applied` is set once they are gone; only then is another connection accepted.
    """

    applied: threading.Event


class Heard(NamedTuple):
    t_ns: int
    message: ToWorker | ConnectionLost


class Inbox:
    """A queue from one reading thread to one working thread.

    `put` and `drain` each read the clock under one lock: a message stamped before a step started is
    always applied before that step.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._messages: list[Heard] = []
        self._closed = False

    def put(self, message: ToWorker | ConnectionLost) -> None:
        with self._changed:
            self._messages.append(Heard(self._now_ns(), message))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def drain(self, *, timeout_s: float | None) -> tuple[int, list[Heard]] | None:
        """The step boundary: its time, and all messages heard before it. None once it is closed.

        Waits for a message, at most `timeout_s` (None: as long as it takes).
        """
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed, timeout_s)
            if self._closed:
                return None
            messages, self._messages = self._messages, []
            return self._now_ns(), messages


class EngineIO(NamedTuple):
    """A clock, the way to the frontend, and the operator's hook.

    `hang_up` ends the connection, with a reason, after an impossible request.
    """

    now_ns: Callable[[], int]
    report: Callable[[StepReport], None]
    hang_up: Callable[[str], None]
    quality_hook: QualityHook | None = None
    worker: str = ""


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
        self._events: list[Event] = []
        self._families = Families()
        self._answers: dict[str, Answer] = {}
        self._outputs: list[Output] = []
        self._is_stuck = False

    def run(self, inbox: Inbox) -> None:
        while (drained := inbox.drain(timeout_s=self.patience_s())) is not None:
            self.step(*drained)

    def patience_s(self) -> float | None:
        """How long to wait in the inbox: 0 while there is a step to compute, None for any time."""
        return 0.0 if self._scheduler.has_work and not self._is_stuck else None

    def step(self, boundary_ns: int, heard: list[Heard]) -> None:
        self._step = self._scheduler.counters.steps + 1
        for message in heard:
            self._apply(message)
        plan = self._scheduler.schedule()
        self._log_decisions(plan)
        # If the requests wait for blocks that never come back, there is no step to run, and
        # trying again at once would not help.
        self._is_stuck = self._scheduler.has_work and not plan.scheduled and not plan.preempted
        self._report(None if plan.is_empty else self._execute(plan, boundary_ns))
        if not self._scheduler.has_work:
            self._check_idle()

    def _apply(self, heard: Heard) -> None:
        match heard.message:
            case AddRequest() as add:
                self._add(add)
            case AbortRequest() as abort:
                self._abort(heard.t_ns, abort)
            case ConnectionLost(applied=applied):
                for request in list(self._scheduler.requests.values()):
                    self._finish(request, FinishReason.ERROR, "connection_lost")
                applied.set()
            case Hello() | Beat() | SetFaults():
                pass  # the connection handles one, an engine with faults the other

    def _add(self, message: AddRequest) -> None:
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            message.sampling,
            priority=message.priority,
        )
        try:
            self._scheduler.add(request)
        except ValueError as error:
            self._io.hang_up(str(error))
            return
        self._answers[request.request_id] = Answer(
            request.sampling,
            request.num_prompt_tokens,
            self._io.quality_hook,
            self._tokenizer.text_stream(message.prompt_token_ids),
        )
        if message.parent_id is not None:
            self._families.add(message.parent_id, message.request_id)

    def _abort(self, heard_ns: int, message: AbortRequest) -> None:
        requests = self._scheduler.requests
        names = self._targets(message.request_id)
        live = [requests[name] for name in names if name in requests]
        for request in live:
            self._note(request, "abort_received", message.reason, t_ns=heard_ns)
        if live:
            self._finish_aborted(live, message.reason)

    def _targets(self, name: str) -> list[str]:
        return self._families.members(name)

    def _finish_aborted(self, requests: list[Request], why: str) -> None:
        for request in requests:
            self._finish(request, FinishReason.ABORT, why)

    def _finish(self, request: Request, reason: FinishReason, why: str) -> None:
        """The only way out: scheduler, log and client all learn of the end here."""
        request_id, phase = request.request_id, request.phase
        self._scheduler.finish(request_id, reason)
        self._note(request, "removed", why)
        self._free(request, why)
        self._note(request, "finished", reason)
        self._families.ended(request_id)
        answer = self._answers.pop(request_id)
        self._output(request, answer.flush(), _ending(request, phase, answer.end))

    def _free(self, request: Request, why: str) -> None:
        num_freed = self._scheduler.free(request)
        self._note(request, "blocks_freed", why, num_blocks=num_freed)

    def _execute(self, plan: StepPlan, boundary_ns: int) -> StepRecord:
        scheduler = self._scheduler
        sampled = self._runner.execute(plan)
        record = StepRecord(
            step=plan.step,
            started_ns=boundary_ns,
            ended_ns=self._io.now_ns(),
            num_running=scheduler.num_slots_used,
            num_waiting=len(scheduler.waiting),
            free_blocks=scheduler.kv_cache.pool.num_free,
            scheduled={request.request_id: n for request, n in plan.scheduled.items()},
            sampled=dict.fromkeys(sampled.tokens, 1),
        )
        for request in scheduler.update(plan, sampled.tokens):
            if request.num_generated == 1:
                self._note(request, "first_token", t_ns=record.ended_ns)
            self._deliver(request, sampled.probabilities.get(request.request_id))
        return record

    def _deliver(self, request: Request, probability: float | None) -> None:
        """The end of a sequence goes before any other end, and an early stop before a length."""
        answer, token_id, text = self._answers[request.request_id], request.token_ids[-1], ""
        if request.finish_reason is not FinishReason.STOP:
            text = answer.push(token_id, probability)
        self._output(request, text, None, token_id)
        if answer.end is None:
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason, request.finish_reason)
        elif answer.end.condition is None:
            self._finish(request, FinishReason.STOP, FinishReason.STOP)
        else:
            self._scheduler.counters.count_early_stop(request, answer.end.condition)
            self._finish(request, FinishReason.STOP, "early_stop")

    def _output(
        self, request: Request, text: str, ending: Ending | None, token_id: int | None = None
    ) -> None:
        output = Output(
            request_id=request.request_id,
            text=text,
            num_generated=request.num_generated,
            ending=ending,
            token_id=token_id,
        )
        self._outputs.append(output)

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
        self._events.append(
            Event(
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
            outputs=self._outputs,
            events=self._events,
            counters=self._scheduler.counters,
            worker=self._io.worker,
            **self._gauges(),
        )
        self._outputs, self._events = [], []
        self._io.report(report)

    def _gauges(self) -> dict[str, int]:
        pool, host = self._scheduler.kv_cache.pool, self._scheduler.kv_cache.host
        return {
            "num_running": self._scheduler.num_slots_used,
            "num_waiting": len(self._scheduler.waiting),
            "free_blocks": pool.num_free,
            "cached_blocks": pool.num_cached,
            "host_blocks": host.num_held,
        }

    def _check_idle(self) -> None:
        self._scheduler.check_idle()


class Families:
    """The n answers to one prompt are n requests, the children of a parent.

    The parent is only a name, forgotten with the last of its children.
    """

    def __init__(self) -> None:
        self._children: dict[str, list[str]] = {}
        self._parent_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._children)

    def add(self, parent_id: str, request_id: str) -> None:
        self._children.setdefault(parent_id, []).append(request_id)
        self._parent_of[request_id] = parent_id

    def members(self, name: str) -> list[str]:
        return list(self._children.get(name, [name]))

    def ended(self, request_id: str) -> None:
        parent_id = self._parent_of.pop(request_id, None)
        if parent_id is None:
            return
        children = self._children[parent_id]
        children.remove(request_id)
        if not children:
            del self._children[parent_id]


def _ending(request: Request, phase: Phase, end: TextEnd | None) -> Ending:
    assert request.finish_reason is not None
    early = None
    if end is not None and end.condition is not None:
        early = EarlyStopped(condition=end.condition, tokens_saved=request.num_tokens_left)
    return Ending(
        finish_reason=request.finish_reason,
        phase=phase,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.num_recomputed_tokens,
        stop_reason=None if end is None else end.stop_reason,
        early_stop=early,
    )
