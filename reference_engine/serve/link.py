"""The requests that the worker has: submit them, cancel them, and record the results of each step.

Every cancellation goes through `cancel`: the first reason wins, and the worker gets one abort. A
cancelled request stays known until the worker has reported its end; only then are its text, its
tokens and its phase final.
"""

from collections.abc import Callable
from itertools import count

import msgspec

from reference_engine.api.openai import Generation
from reference_engine.api.schemas import LifecycleEntry
from reference_engine.cancellation import Cancellation, CancelReason, DetectionMethod
from reference_engine.config import FrontendSettings
from reference_engine.core.request import FinishReason
from reference_engine.metrics.collector import Collector
from reference_engine.protocol import AbortRequest, Event, Output, StepReport, ToWorker
from reference_engine.serve.access import RateLimiter
from reference_engine.serve.client_request import Archive, Choice, ClientRequest
from reference_engine.serve.journal import Log
from reference_engine.serve.supervisor import SHUTTING_DOWN, WORKER_LOST, EngineStoppedError
from reference_engine.serve.timeouts import RequestTimers


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
        self._timers: dict[str, RequestTimers] = {}
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
        """Raises EngineStoppedError."""
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
        self._note_here(request, "arrived", request.arrived_ns)
        self.live[request.request_id] = request
        for choice in request.choices:
            self._choices[choice.request_id] = request, choice
        deadline_s = generation.deadline_s or self.settings.default_deadline_s
        self._timers[request.request_id] = RequestTimers(
            deadline_s=deadline_s,
            on_deadline=lambda: self.cancel(request, CancelReason.CLIENT_TIMEOUT),
            ping_s=generation.keep_alive_s,
            on_no_ping=lambda: self.disconnected(request, DetectionMethod.PING),
        )
        return request

    def ping(self, request: ClientRequest) -> None:
        self._timers[request.request_id].ping()

    def disconnected(self, request: ClientRequest, method: DetectionMethod) -> None:
        request.outbox.drop()
        if request.is_ended and method is DetectionMethod.STALL:  # nothing to cancel, but to count
            self.collector.unread_answers += 1
            self._note_here(request, "disconnected", self.now_ns(), CancelReason.USER_DISCONNECT)
        if request.is_ended or request.has_left:
            return
        request.leave()
        self._note_here(request, "disconnected", self.now_ns(), CancelReason.USER_DISCONNECT)
        self._cancel_unread(request, method)

    def _cancel_unread(self, request: ClientRequest, method: DetectionMethod) -> None:
        self.cancel(request, CancelReason.USER_DISCONNECT, method)

    def cancel(
        self,
        request: ClientRequest,
        reason: CancelReason,
        method: DetectionMethod = DetectionMethod.NONE,
    ) -> bool:
        """End a request. False, and nothing happens, if it has ended or was cancelled before."""
        cancellation = Cancellation(reason, method, self.now_ns())
        if request.is_ended or not request.cancel(cancellation):
            return False
        self._note_here(request, "abort_sent", cancellation.t_ns, reason)
        self.collector.signals[reason, method] += 1
        self._send(AbortRequest(request_id=request.request_id, reason=reason))
        return True

    def shut_down(self) -> None:
        self.is_draining = True
        for request in list(self.live.values()):
            self.cancel(request, CancelReason.SERVER_SHUTDOWN)

    def lost(self, why: str = WORKER_LOST) -> None:
        """Fail the live requests: the worker's connection has ended, or no report will come."""
        error, now_ns = EngineStoppedError(why), self.now_ns()
        for request in list(self.live.values()):
            request.has_failed = True
            self._note_failed(request, now_ns)
            request.outbox.close(error)
            self._forget(request)
            self.archive.add(request, now_ns)
        self._choices.clear()

    def take_in(self, report: StepReport) -> None:
        self.collector.reported(report)
        if report.step is not None:
            self.steps.append(report.step)
        for event in report.events:
            self._take_event(event)
        now_ns = self.now_ns()
        for output in report.outputs:
            self._take_output(output, now_ns)

    def _take_event(self, event: Event) -> None:
        request, choice = self._choices.get(event.request_id, (None, None))
        self._note(event, None if request is None else request.client_request_id)
        if request is not None and choice is not None:
            choice.note(event)
            self._let_go(request, choice)

    def _take_output(self, output: Output, now_ns: int) -> None:
        if output.request_id not in self._choices:
            return  # from an earlier connection
        request, choice = self._choices[output.request_id]
        num_new = output.num_generated - choice.num_generated
        choice.take(output)
        request.outbox.put(choice.index, output)
        if num_new:
            count_tokens(self.collector, request, choice, now_ns)
            if self.limiter.spend(request.owner, num_new, now_ns):
                self._cancel_all_of(request.owner)
        if choice.ending is not None:
            count_ended(self.collector, request, choice, now_ns)
            self._let_go(request, choice)
            if request.is_ended:
                self._end(request, now_ns)

    def _let_go(self, request: ClientRequest, choice: Choice) -> None:
        """Forget an answer once it has ended and its blocks are free, whichever comes last."""
        if choice.ending is None or "blocks_freed" not in choice.stamps:
            return
        del self._choices[choice.request_id]
        cancellation = request.token.cancellation
        if cancellation is not None and choice.is_aborted:
            count_cancelled(self.collector, cancellation, choice)

    def _end(self, request: ClientRequest, now_ns: int) -> None:
        request.outbox.close()
        self._forget(request)
        self.archive.add(request, now_ns)
        longest = max(choice.num_generated for choice in request.choices)
        self.collector.num_answers.observe(len(request.choices))
        self.collector.most_generated_tokens.observe(longest)

    def _forget(self, request: ClientRequest) -> None:
        del self.live[request.request_id]
        self._timers.pop(request.request_id).stop()

    def _cancel_all_of(self, owner: str | None) -> None:
        for request in self.live.values():
            if request.owner == owner:
                self.cancel(request, CancelReason.RATE_LIMIT)

    def _note_here(
        self, request: ClientRequest, event: str, t_ns: int, reason: CancelReason | None = None
    ) -> None:
        self._note(
            Event(
                t_ns=t_ns,
                event=event,
                request_id=request.request_id,
                step=self.collector.counters.steps,
                reason=reason,
            ),
            request.client_request_id,
        )

    def _note_failed(self, request: ClientRequest, t_ns: int) -> None:
        for choice in request.choices:
            if choice.ending is None:
                event = Event(
                    t_ns=t_ns,
                    event="finished",
                    request_id=choice.request_id,
                    step=self.collector.counters.steps,
                    num_generated=choice.num_generated,
                    reason=FinishReason.ERROR,
                )
                self._note(event, request.client_request_id)

    def _note(self, event: Event, client_request_id: str | None) -> None:
        entry = LifecycleEntry(
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
    """A stage lasts until the next one begins, or until the end."""
    assert choice.ending is not None
    stamps = choice.stamps
    end_ns = stamps.get("finished", now_ns)
    admitted_ns, first_token_ns = stamps.get("admitted"), stamps.get("first_token")
    collector.ended(
        finish_reason=choice.ending.finish_reason,
        prompt_tokens=request.num_prompt_tokens,
        generated_tokens=choice.num_generated,
        max_tokens=request.max_tokens,
        e2e_s=(end_ns - request.arrived_ns) / 1e9,
        queue_s=_seconds(request.arrived_ns, admitted_ns),
        prefill_s=_seconds(admitted_ns, first_token_ns),
        decode_s=_seconds(first_token_ns, end_ns),
    )


def count_cancelled(collector: Collector, cancellation: Cancellation, choice: Choice) -> None:
    assert choice.ending is not None
    collector.cancelled(
        cancellation,
        phase=choice.ending.phase,
        latency_s=(choice.stamps["blocks_freed"] - cancellation.t_ns) / 1e9,
        unread_tokens=choice.num_unread,
    )


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9
