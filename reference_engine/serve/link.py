"""The requests that the worker has: submit them, cancel them, and record the results of each step.

Every cancellation goes through `cancel`: the first reason wins, and the worker gets one abort. A
cancelled request stays known until the worker has reported its end; only then are its text, its
tokens and its phase final.
"""

from collections.abc import Callable
from itertools import count

import msgspec

from reference_engine.api.journal import Log
from reference_engine.api.openai import Generation
from reference_engine.api.schemas import LifecycleEntry, StepEntry
from reference_engine.config import FrontendSettings
from reference_engine.context import Cancellation, CancelReason, DetectionMethod
from reference_engine.core.request import FinishReason
from reference_engine.metrics.collector import Collector
from reference_engine.protocol import (
    AbortRequest,
    Event,
    Output,
    StepReport,
    ToWorker,
)
from reference_engine.serve.access import RateLimiter
from reference_engine.serve.client_request import Archive, Choice, ClientRequest
from reference_engine.serve.supervisor import SHUTTING_DOWN, WORKER_LOST, EngineStoppedError


class WorkerLink:
    """All its state changes on the event loop.

    `live` holds the requests that have not ended, `archive` the ended ones. `_choices` holds each
    answer, by the engine's name for it, until its blocks are free, which may be after its end.
    `is_draining`: live requests go on, new ones are refused.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        send: Callable[[ToWorker], None],
        *,
        settings: FrontendSettings,
        collector: Collector,
    ) -> None:
        self.now_ns = now_ns
        self._send = send
        self.settings = settings
        self.collector = collector
        self.limiter = RateLimiter(settings.rate_limits)
        self._numbers = count(1)
        self.live: dict[str, ClientRequest] = {}
        self.archive = Archive(settings.keep_results, settings.keep_results_s)
        self._choices: dict[str, tuple[ClientRequest, Choice]] = {}
        self.is_draining = False
        self.lifecycle = Log()
        self.steps = Log()

    def __repr__(self) -> str:
        return f"<WorkerLink live {len(self.live)} choices {len(self._choices)}>"

    def submit(
        self,
        generation: Generation,
        *,
        client_request_id: str | None,
        owner: str | None,
        created: int,
    ) -> ClientRequest:
        if self.is_draining:
            raise EngineStoppedError(SHUTTING_DOWN)
        request = ClientRequest(
            f"req-{next(self._numbers)}",
            generation,
            client_request_id=client_request_id,
            owner=owner,
            created=created,
            arrived_ns=self.now_ns(),
        )
        for addition in request.additions(generation):
            self._send(addition)
        self._note(request, "arrived", request.arrived_ns)
        self.live[request.request_id] = request
        for choice in request.choices:
            self._choices[choice.request_id] = request, choice
        deadline_s = generation.deadline_s or self.settings.default_deadline_s
        request.set_timer("deadline", deadline_s, self.cancel, request, CancelReason.CLIENT_TIMEOUT)
        self.ping(request)
        return request

    def ping(self, request: ClientRequest) -> None:
        seconds = request.asked.keep_alive_s
        request.set_timer("ping", seconds, self.disconnected, request, DetectionMethod.PING)

    def disconnected(
        self,
        request: ClientRequest,
        method: DetectionMethod,
        reason: CancelReason = CancelReason.USER_DISCONNECT,
    ) -> None:
        request.outbox.drop()
        if request.is_ended and method is DetectionMethod.STALL:  # nothing to cancel, but to count
            self.collector.unread_answers += 1
            self._note(request, "disconnected", self.now_ns(), CancelReason.USER_DISCONNECT)
        if request.is_ended or request.has_left:
            return
        request.leave()
        self._note(request, "disconnected", self.now_ns(), reason)
        self._cancel_unread(request, method, reason)

    def _cancel_unread(
        self, request: ClientRequest, method: DetectionMethod, reason: CancelReason
    ) -> None:
        self.cancel(request, reason, method)

    def cancel(
        self,
        request: ClientRequest,
        reason: CancelReason,
        method: DetectionMethod = DetectionMethod.NONE,
    ) -> bool:
        cancellation = Cancellation(reason, method, self.now_ns())
        if request.is_ended or not request.cancel(cancellation):
            return False
        self._note(request, "abort_sent", self.now_ns(), reason)
        self.collector.signals[reason, method] += 1
        self._send(AbortRequest(request_id=request.request_id, reason=reason))
        return True

    def shut_down(self) -> None:
        self.is_draining = True
        for request in list(self.live.values()):
            self.cancel(request, CancelReason.SERVER_SHUTDOWN)

    def lost(self, why: str = WORKER_LOST) -> None:
        """Fail the live requests: the worker's connection has ended, or no report will come."""
        now_ns = self.now_ns()
        for request in list(self.live.values()):
            request.has_failed = True
            for choice in request.choices:
                if choice.ending is None:
                    self._note(request, "finished", now_ns, FinishReason.ERROR, choice)
            self._end(request, now_ns, EngineStoppedError(why))
        self._choices.clear()

    def take_in(self, report: StepReport) -> None:
        self.collector.reported(report)
        if report.step is not None:
            entry = StepEntry(worker=report.worker, **msgspec.structs.asdict(report.step))
            self.steps.append(entry)
        for event in report.events:
            request, choice = self._choices.get(event.request_id, (None, None))
            client_request_id = None if request is None else request.client_request_id
            self._log(event, client_request_id, report.worker)
            if request is not None and choice is not None:
                choice.note(event)
                self._let_go(request, choice)
        now_ns = self.now_ns()
        for output in report.outputs:
            if output.request_id in self._choices:  # or it is from an earlier connection
                self._take_output(output, now_ns)

    def _take_output(self, output: Output, now_ns: int) -> None:
        request, choice = self._choices[output.request_id]
        num_new = output.num_generated - choice.num_generated
        choice.take(output)
        request.outbox.put(choice.index, output)
        if num_new:
            count_tokens(self.collector, request, choice, now_ns)
            if self.limiter.spend(request.owner, num_new, now_ns):
                for other in self.live.values():
                    if other.owner == request.owner:
                        self.cancel(other, CancelReason.RATE_LIMIT)
        if choice.ending is not None:
            count_ended(self.collector, request, choice, now_ns)
            self._let_go(request, choice)
            if request.is_ended:
                self._end(request, now_ns)
                longest = max(choice.num_generated for choice in request.choices)
                self.collector.num_answers.observe(len(request.choices))
                self.collector.most_generated_tokens.observe(longest)

    def _let_go(self, request: ClientRequest, choice: Choice) -> None:
        """Forget an answer once it has ended and its blocks are free, whichever comes last."""
        if choice.ending is None or "blocks_freed" not in choice.stamps:
            return
        del self._choices[choice.request_id]
        cancellation = request.context.cancellation
        if cancellation is not None and choice.is_aborted:
            self.collector.cancelled(
                cancellation,
                phase=choice.ending.phase,
                latency_s=(choice.stamps["blocks_freed"] - cancellation.t_ns) / 1e9,
                unread_tokens=choice.num_unread,
            )

    def _end(self, request: ClientRequest, now_ns: int, failure: Exception | None = None) -> None:
        request.outbox.close(failure)
        request.stop_timers()
        del self.live[request.request_id]
        self.archive.add(request, now_ns)

    def _note(
        self,
        request: ClientRequest,
        event: str,
        t_ns: int,
        reason: CancelReason | FinishReason | None = None,
        choice: Choice | None = None,
    ) -> None:
        noted = Event(
            t_ns=t_ns,
            event=event,
            request_id=(choice or request).request_id,
            step=self.collector.counters.steps,
            num_generated=0 if choice is None else choice.num_generated,
            reason=reason,
        )
        self._log(noted, request.client_request_id)

    def _log(self, event: Event, client_request_id: str | None, worker: str = "") -> None:
        entry = LifecycleEntry(
            worker=worker,
            seq=self.lifecycle.next_number,
            client_request_id=client_request_id,
            **msgspec.structs.asdict(event),
        )
        self.lifecycle.append(entry)


def count_tokens(collector: Collector, request: ClientRequest, choice: Choice, now_ns: int) -> None:
    """Several tokens that arrive at once count as one interval."""
    if choice.last_output_ns is None:
        collector.first_token_s.observe((now_ns - request.arrived_ns) / 1e9)
    else:
        collector.next_token_s.observe((now_ns - choice.last_output_ns) / 1e9)
    choice.last_output_ns = now_ns


def count_ended(collector: Collector, request: ClientRequest, choice: Choice, now_ns: int) -> None:
    assert choice.ending is not None
    stamps = choice.stamps
    end_ns = stamps.get("finished", now_ns)
    admitted_ns, first_token_ns = stamps.get("admitted"), stamps.get("first_token")
    collector.ended(
        finish_reason=choice.ending.finish_reason,
        prompt_tokens=request.num_prompt_tokens,
        generated_tokens=choice.num_generated,
        max_tokens=request.asked.sampling.max_tokens,
        e2e_s=(end_ns - request.arrived_ns) / 1e9,
        queue_s=_seconds(request.arrived_ns, admitted_ns),
        prefill_s=_seconds(admitted_ns, first_token_ns),
        decode_s=_seconds(first_token_ns, end_ns),
    )


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9
