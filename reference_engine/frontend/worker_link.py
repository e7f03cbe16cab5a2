"""The requests that the worker has: submit, cancel, and hear what each step brought.

Cancelling has one way, `cancel`, whoever wants it: the first reason wins, the worker is told once.
A cancelled request stays known until the worker has said how it ended; only then are its text, its
tokens and its phase what they will stay.

`/metrics` shows the last report, copied here as it comes.
"""

import asyncio
from collections.abc import Callable
from itertools import count

import msgspec

from reference_engine.cancellation import Cancellation, CancelReason, DetectionMethod
from reference_engine.core.counters import Counters
from reference_engine.faults import Faults
from reference_engine.frontend.archive import Archive
from reference_engine.frontend.bookkeeping import count_cancelled, count_ended, count_tokens
from reference_engine.frontend.client_request import Choice, ClientRequest
from reference_engine.frontend.connection import SHUTTING_DOWN, WORKER_LOST, EngineStoppedError
from reference_engine.frontend.detection import is_overlooked
from reference_engine.frontend.journal import LifecycleEntry, Log
from reference_engine.frontend.openai_api import Generation
from reference_engine.frontend.rate_limit import RateLimiter
from reference_engine.frontend.settings import FrontendSettings
from reference_engine.frontend.statistics import Statistics
from reference_engine.frontend.timers import RequestTimers
from reference_engine.protocol import (
    AbortRequest,
    Event,
    Output,
    SetFaults,
    StepReport,
    ToWorker,
)
from reference_engine.request import FinishReason


class WorkerLink:
    """The requests that the worker has. All its state changes on the event loop.

    `live` holds those that have not ended, `archive` those that have, `_choices` each answer by the
    engine's name for it until its blocks are free, which a fault can put off beyond its end.
    `is_draining`: what is here goes on, nothing more is taken.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        send: Callable[[ToWorker], None],
        *,
        settings: FrontendSettings,
        statistics: Statistics,
        limiter: RateLimiter,
    ) -> None:
        self.now_ns = now_ns
        self._send = send
        self.settings = settings
        self.statistics = statistics
        self.limiter = limiter
        self._numbers = count(1)
        self.live: dict[str, ClientRequest] = {}
        self.archive = Archive(settings.keep_results, settings.keep_results_s)
        self._choices: dict[str, tuple[ClientRequest, Choice]] = {}
        self._timers: dict[str, RequestTimers] = {}
        self.is_draining = False
        self.lifecycle = Log()
        self.steps = Log()
        self.counters = Counters()
        self.num_running = 0
        self.num_waiting = 0
        self.free_blocks = 0
        self.cached_blocks = 0
        self.faults = Faults()

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
        """Hand a request to the worker. Raises EngineStoppedError."""
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
        """The client of a live request is still there."""
        self._timers[request.request_id].ping()

    def disconnected(self, request: ClientRequest, method: DetectionMethod) -> None:
        """The client left: log it, and cancel its request (unless a fault says otherwise)."""
        request.outbox.drop()
        if request.is_ended and method is DetectionMethod.STALL:  # nothing to cancel, but to tell
            self.statistics.unread_answers += 1
            self._note_here(request, "disconnected", self.now_ns(), CancelReason.USER_DISCONNECT)
        if request.is_ended or request.has_left:
            return
        request.leave()
        self._note_here(request, "disconnected", self.now_ns(), CancelReason.USER_DISCONNECT)
        if is_overlooked(request, self.faults):
            return
        if self.faults.delay_abort:
            loop, reason = asyncio.get_running_loop(), CancelReason.USER_DISCONNECT
            loop.call_later(self.faults.delay_abort, self.cancel, request, reason, method)
        else:
            self.cancel(request, CancelReason.USER_DISCONNECT, method)

    def cancel(
        self,
        request: ClientRequest,
        reason: CancelReason,
        method: DetectionMethod = DetectionMethod.NONE,
    ) -> bool:
        """Have the worker end a request; whether this call did it. Harmless for an ended one."""
        cancellation = Cancellation(reason, method, self.now_ns())
        if request.is_ended or not request.cancel(cancellation):
            return False
        self._note_here(request, "abort_sent", cancellation.t_ns, reason)
        self.statistics.signalled(reason, method)
        self._send(AbortRequest(request_id=request.request_id, reason=reason))
        return True

    def shut_down(self) -> None:
        """Take no more requests, and cancel whatever is being generated."""
        self.is_draining = True
        for request in list(self.live.values()):
            self.cancel(request, CancelReason.SERVER_SHUTDOWN)

    def set_faults(self, faults: Faults) -> None:
        """From now on be wrong in these ways."""
        self.faults = faults
        self._send(SetFaults(faults=faults))

    def lost(self, why: str = WORKER_LOST) -> None:
        """The worker's connection has ended, or no more is expected: whoever waits is told."""
        error, now_ns = EngineStoppedError(why), self.now_ns()
        for request in list(self.live.values()):
            request.has_failed = True
            self._note_failed(request, now_ns)
            request.outbox.close(error)
            self._forget(request)
            self.archive.add(request, now_ns)
        self._choices.clear()

    def take_in(self, report: StepReport) -> None:
        self.counters = report.counters
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.free_blocks, self.cached_blocks = report.free_blocks, report.cached_blocks
        if report.step is not None:
            self.steps.append(report.step)
            self.statistics.stepped(sum(report.step.scheduled.values()))
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
            return  # the worker has ended what an earlier connection had asked for
        request, choice = self._choices[output.request_id]
        num_new = output.num_generated - choice.num_generated
        choice.take(output)
        request.outbox.put(choice.index, output)
        if num_new:
            count_tokens(self.statistics, request, choice, now_ns)
            if self.limiter.spend(request.owner, num_new, now_ns):
                self._cancel_all_of(request.owner)
        if choice.ending is not None:
            count_ended(self.statistics, request, choice, now_ns)
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
            count_cancelled(self.statistics, cancellation, choice)

    def _end(self, request: ClientRequest, now_ns: int) -> None:
        request.outbox.close()
        self._forget(request)
        self.archive.add(request, now_ns)
        longest = max(choice.num_generated for choice in request.choices)
        self.statistics.answered(n=len(request.choices), most_generated_tokens=longest)

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
        """Log what the frontend itself did or saw, during the worker's latest known step."""
        self._note(
            Event(
                t_ns=t_ns,
                event=event,
                request_id=request.request_id,
                step=self.counters.steps,
                reason=reason,
            ),
            request.client_request_id,
        )

    def _note_failed(self, request: ClientRequest, t_ns: int) -> None:
        """Log the end of each answer that the worker, as far as is known here, has not ended."""
        for choice in request.choices:
            if choice.ending is None:
                event = Event(
                    t_ns=t_ns,
                    event="finished",
                    request_id=choice.request_id,
                    step=self.counters.steps,
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
