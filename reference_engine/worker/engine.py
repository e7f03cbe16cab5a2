"""The step loop, sole owner of the engine's state.

    boundary: drain the inbox, apply aborts and additions ─▶ schedule ─▶ execute ─▶ update ─▶ report

Commands are applied between steps only, so nothing can vanish under a running step: a request
whose abort arrives during a step gets that step's token (counted as generated, read by nobody) and
is removed at the next boundary; a prompt that is computed in chunks ends with the chunk.
Everything that happens is stamped into the report of the step.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple, NoReturn

from reference_engine.core.accounting import Families
from reference_engine.core.request import FinishReason, Phase, Request
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from reference_engine.faults import Faults
from reference_engine.model.runners import Runner
from reference_engine.model.tokenizer import Tokenizer
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    Ending,
    Hello,
    Output,
    SetFaults,
    StepRecord,
    StepReport,
)
from reference_engine.worker.faults import abort_targets, is_lost, release_for
from reference_engine.worker.inbox import ConnectionLost, Heard, Inbox
from reference_engine.worker.journal import EventLog, GaugeReader


class World(NamedTuple):
    """What the engine needs of the world: time, chance, and for faults a way to stall or to die.

    `hang_up` ends the connection to a frontend that asks for what cannot be done, and says why.
    """

    now_ns: Callable[[], int]
    random: Random
    sleep: Callable[[float], None]
    die: Callable[[], NoReturn]
    hang_up: Callable[[str], None]


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
        world: World,
        report: Callable[[StepReport], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = Tokenizer(runner.info.vocab_size)
        self._faults = faults
        self._world = world
        self._send_report = report
        self._log = EventLog(world.now_ns)
        self._gauges = GaugeReader(scheduler, world.now_ns)
        self._families = Families()
        self._answers: dict[str, AnswerText] = {}
        self._outputs: list[Output] = []
        self._held_until_ns: dict[str, int] = {}
        self._is_stuck = False

    def run(self, inbox: Inbox) -> None:
        """Step while there is work, sleep in the inbox while there is none."""
        while (drained := inbox.drain(timeout_s=self.patience_s())) is not None:
            self.step(*drained)

    def patience_s(self) -> float | None:
        """How long the inbox may be waited in: not at all while there is something to compute."""
        if self._scheduler.has_work and not self._is_stuck:
            return 0.0
        if not self._held_until_ns:
            return None
        return max(0.0, (min(self._held_until_ns.values()) - self._world.now_ns()) / 1e9)

    def step(self, boundary_ns: int, heard: list[Heard]) -> None:
        """One boundary and, if there is anything to compute, the step after it."""
        self._log.step = self._scheduler.counters.steps + 1
        self._free_held_back(boundary_ns)
        for message in heard:
            self._apply(message)
        plan = self._scheduler.schedule()
        self._note_decisions(plan)
        # Requests may wait without a block left for any of them (the blocks were leaked): then
        # there is no step to run, and spinning would not help them.
        self._is_stuck = self._scheduler.has_work and not plan.scheduled and not plan.preempted
        self._report(self._execute(plan, boundary_ns) if plan.scheduled else None)
        if not self._scheduler.has_work:
            self._scheduler.check_idle()

    def _apply(self, heard: Heard) -> None:
        match heard.message:
            case AddRequest() as add:
                self._add(add)
            case AbortRequest() as abort:
                self._abort(heard.t_ns, abort)
            case SetFaults(faults=faults):
                self._faults = faults
            case ConnectionLost(applied=applied):
                for request in list(self._scheduler.requests.values()):
                    self._finish(request, FinishReason.ERROR, "connection_lost")
                applied.set()
            case Hello():
                pass  # the connection's, not the engine's

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
            self._world.hang_up(str(error))
            return
        self._answers[request.request_id] = AnswerText(message.sampling.stop)
        if message.parent_id is not None:
            self._families.add(message.parent_id, message.request_id)

    def _abort(self, heard_ns: int, message: AbortRequest) -> None:
        requests, faults = self._scheduler.requests, self._faults
        targets = abort_targets(message.request_id, requests, self._families, faults)
        live = [requests[request_id] for request_id in targets if request_id in requests]
        if not live:
            return  # it ended by itself while the abort was on its way
        for request in live:
            self._log.note(request, "abort_received", message.reason, t_ns=heard_ns)
        if faults.die_on_abort:
            self._world.die()
        if is_lost(faults, self._world.random):
            return
        for request in live:
            self._finish(request, FinishReason.ABORT, message.reason)
        if faults.stall_survivors_on_abort:
            self._world.sleep(faults.stall_survivors_on_abort)

    def _finish(self, request: Request, reason: FinishReason, why: str) -> None:
        """The worker's one way out: scheduler, log and client all learn of it here."""
        request_id, phase, log = request.request_id, request.phase, self._log
        release = release_for(reason, self._faults)
        num_freed = self._scheduler.finish(
            request_id,
            reason,
            release=release,
            on_removed=lambda: log.note(request, "removed", why),
        )
        if release.is_held_back:
            hold_ns = int(self._faults.hold_blocks * 1e9)
            self._held_until_ns[request_id] = self._world.now_ns() + hold_ns
        else:
            log.note(request, "blocks_freed", why, num_blocks=num_freed)
        log.note(request, "finished", reason)
        self._families.ended(request_id)
        self._output(request, self._answers.pop(request_id).flush(), _ending(request, phase))

    def _free_held_back(self, now_ns: int) -> None:
        """Give back, at last, what a fault has held back for its time."""
        for request_id, until_ns in list(self._held_until_ns.items()):
            if until_ns <= now_ns:
                del self._held_until_ns[request_id]
                request = self._scheduler.held_back[request_id]
                num_freed = self._scheduler.free_held_back(request_id)
                self._log.note(request, "blocks_freed", "held_back", num_blocks=num_freed)

    def _execute(self, plan: StepPlan, boundary_ns: int) -> StepRecord:
        pool, scheduler = self._scheduler.kv_cache.pool, self._scheduler
        num_running, num_waiting = scheduler.num_slots_used, len(scheduler.waiting)
        free_blocks = pool.num_free
        sampled = self._runner.execute(plan)
        ended_ns = self._world.now_ns()
        for request in scheduler.update(plan, sampled):
            self._deliver(request, ended_ns)
        return StepRecord(
            step=plan.step,
            started_ns=boundary_ns,
            ended_ns=ended_ns,
            num_running=num_running,
            num_waiting=num_waiting,
            free_blocks=free_blocks,
            scheduled={request.request_id: n for request, n in plan.scheduled.items()},
            sampled=dict.fromkeys(sampled, 1),
        )

    def _deliver(self, request: Request, ended_ns: int) -> None:
        """Send a request's new token on, and end the request if that was its last."""
        if request.num_generated == 1:
            self._log.note(request, "first_token", t_ns=ended_ns)
        answer = self._answers[request.request_id]
        text, stopped = answer.push(self._tokenizer.text_of(request.token_ids[-1]))
        reason = FinishReason.STOP if stopped else request.finish_reason
        self._output(request, text, None)
        if reason is not None:
            self._finish(request, reason, reason)

    def _output(self, request: Request, text: str, ending: Ending | None) -> None:
        output = Output(
            request_id=request.request_id,
            text=text,
            num_generated=request.num_generated,
            ending=ending,
        )
        self._outputs.append(output)

    def _note_decisions(self, plan: StepPlan) -> None:
        for event, requests in (
            ("preempted", plan.preempted),
            ("admitted", plan.admitted),
            ("resumed", plan.resumed),
        ):
            for request in requests:
                self._log.note(request, event)

    def _report(self, record: StepRecord | None) -> None:
        outputs, self._outputs = self._outputs, []
        gauges = self._gauges.read(self._faults.stale_gauge)
        self._send_report(
            StepReport(
                step=record,
                outputs=outputs,
                events=self._log.take(),
                counters=self._scheduler.counters,
                **gauges._asdict(),
            )
        )


def _ending(request: Request, phase: Phase) -> Ending:
    assert request.finish_reason is not None
    return Ending(
        finish_reason=request.finish_reason,
        phase=phase,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.num_recomputed_tokens,
    )


class AnswerText:
    """Give it each token's text; it gives back what may be sent."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be sent now, and whether a stop string has appeared."""
        if not self._stop:
            return text, False
        pending = self._held + text
        found = [at for stop in self._stop if (at := pending.find(stop)) >= 0]
        if found:
            self._held = ""
            return pending[: min(found)], True
        keep = max(_overlap(pending, stop) for stop in self._stop)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def flush(self) -> str:
        """What was held back, once the answer has ended otherwise."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` with which `text` ends."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
