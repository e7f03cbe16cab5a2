"""The requests that the workers have: send them, cancel them, and record the results of each step.

    submit ─▶ the router's choice ─▶ reports ─▶ end
       ▲           │ loss of the worker
       └───────────┘ no token was shown, or a migration is left: prompt and tokens are sent again

Every cancellation is one of the request's context: the first reason wins, and its worker gets one
abort. A cancelled request stays known until the worker has reported its end; only then are its
text, its tokens and its phase final. With its worker lost, it ends here.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import Final, NamedTuple

import msgspec

from reference_engine.api.journal import Log
from reference_engine.api.openai import Generation
from reference_engine.api.schemas import LifecycleEntry
from reference_engine.config import FrontendSettings
from reference_engine.context import Cancellation, CancelReason, DetectionMethod, Signal
from reference_engine.core.request import FinishReason
from reference_engine.dynamo.router import NoInstanceError, Router
from reference_engine.metrics.collector import MetricsCollector
from reference_engine.protocol import (
    LESS_MEMORY,
    OUT_OF_MEMORY,
    AbortRequest,
    Ending,
    Output,
    Ready,
    RequestEvent,
    StepReport,
    ToWorker,
)
from reference_engine.serve.access import RateLimiter
from reference_engine.serve.client_request import Archive, ClientRequest, RequestChoice
from reference_engine.serve.supervisor import SHUTTING_DOWN, WORKER_LOST, EngineStoppedError

NO_WORKER: Final = "no worker of the engine is connected; try again in a moment"
NO_MEMORY: Final = f"the device was out of memory in a step of this request: {LESS_MEMORY}"
_MAX_RESUBMISSIONS: Final = 5  # of a request; it may be what kills the workers


class Company(NamedTuple):
    """`id_prefix` keeps the requests of several frontends apart. While no worker is connected, a
    request waits `patience_s` for one; with 0 it is refused at once, for the reason `why_none`.
    """

    id_prefix: str = ""
    patience_s: float = 0.0
    why_none: str = WORKER_LOST


class WorkerLink:
    """All its state changes on the event loop, where contexts of requests must be cancelled, too.

    `live` holds the requests that have not ended, `archive` the ended ones. `_choices` holds each
    answer, by the engine's name for it, until its blocks are free, which may be after its end.
    `workers`: what each worker said when it last connected; the router knows which are connected.
    `is_draining`: live requests continue, new ones are refused.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        send: Callable[[str, ToWorker], None],
        *,
        settings: FrontendSettings,
        collector: MetricsCollector,
        random: Random,
        company: Company | None = None,
    ) -> None:
        self.now_ns = now_ns
        self._send_to = send
        self.settings = settings
        self.collector = collector
        self.router = Router[str](random)
        self.workers: dict[str, Ready] = {}
        self.limiter = RateLimiter(settings.rate_limits)
        self._numbers = count(1)
        self._company = company or Company()
        self.live: dict[str, ClientRequest] = {}
        self.archive = Archive(settings.keep_results, settings.keep_results_s)
        self._choices: dict[str, tuple[ClientRequest, RequestChoice]] = {}
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
        if not (self.router.names or self._company.patience_s):
            raise EngineStoppedError(self._company.why_none)
        request = ClientRequest(
            f"{self._company.id_prefix}req-{next(self._numbers)}",
            generation,
            client_request_id=client_request_id,
            owner=owner,
            created=created,
            arrived_ns=self.now_ns(),
        )
        self.live[request.request_id] = request
        for choice in request.choices:
            self._choices[choice.request_id] = request, choice
        self._dispatch(request)
        self._note(request, "arrived", request.arrived_ns)
        if len(request.choices) > 1:
            for choice in request.choices:
                choice.context.watch(partial(self._cancelled, request, choice))
        request.context.watch(partial(self._cancelled, request, None))
        deadline_s = generation.deadline_s or self.settings.default_deadline_s
        request.set_timer("deadline", deadline_s, self.cancel, request, CancelReason.CLIENT_TIMEOUT)
        self.ping(request)
        return request

    def _dispatch(self, request: ClientRequest) -> None:
        """Send it to the worker that the router chooses; if none is up, `worker_up` calls this
        again."""
        try:
            worker = self.router.choose(self.settings.router)
        except NoInstanceError:
            failure = EngineStoppedError(NO_WORKER)
            request.set_timer("worker", self._company.patience_s, self._fail, request, failure)
            return
        request.worker = worker
        request.stop_timer("worker")
        if request.moved is not None:
            self._note(request, request.moved, self.now_ns(), "worker_lost")
            request.moved = None
        for addition in request.additions():
            if request.worker is worker:  # a failed send has had it moved
                self._send(worker.name, addition)

    def _send(self, worker: str, message: ToWorker) -> None:
        """A message that does not arrive is lost with the worker, as `worker_lost` hears."""
        with contextlib.suppress(ConnectionError):
            self._send_to(worker, message)

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
        self.collector.count_leaving(
            request.asked.model,
            request.endpoint,
            stream=request.asked.stream,
            num_sent=request.num_sent,
        )
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
        if request.is_ended:
            return False
        why = Cancellation(reason, method, self.now_ns())
        return request.context.kill(why) if request.has_left else request.context.stop(why)

    def _cancelled(
        self,
        request: ClientRequest,
        choice: RequestChoice | None,
        signal: Signal,
        why: Cancellation | None,
    ) -> None:
        """The watcher of a request's context, and of the contexts of its n answers."""
        if choice is not None and (choice.ending is not None or request.context.is_stopped()):
            return
        if choice is None and signal is Signal.KILL:
            request.outbox.drop()
        if request.is_ended or request.num_at_cancel is not None:
            return
        why = why or Cancellation(CancelReason.API, DetectionMethod.NONE, self.now_ns())
        if choice is None:
            request.num_at_cancel = request.num_generated
        self._note(request, "abort_sent", self.now_ns(), why.reason, choice)
        self.collector.signals[why.reason, why.method] += 1
        if request.worker is None:
            self._end_aborted(request, [choice] if choice else request.choices)
        else:
            name = (choice or request).request_id
            abort = AbortRequest(request_id=name, reason=why.reason, signal=signal)
            self._send(request.worker.name, abort)

    def shut_down(self) -> None:
        self.is_draining = True
        for request in list(self.live.values()):
            self.cancel(request, CancelReason.SERVER_SHUTDOWN)

    def give_up(self) -> None:
        """The last reports of the live requests have not come in time at a shutdown."""
        for request in list(self.live.values()):
            self._fail(request, EngineStoppedError(SHUTTING_DOWN))
        self._choices.clear()

    def worker_up(self, ready: Ready) -> None:
        name = ready.worker
        before = self.workers.get(name)
        self.workers[name] = ready
        self.collector.began(name, anew=before is not None and before.pid != ready.pid)
        self.router.up(name)
        for request in list(self.live.values()):
            if request.worker is None:
                self._dispatch(request)

    def worker_lost(self, name: str) -> None:
        """Its connection has ended, and with it what it had of our requests."""
        self.router.down(name)
        self.collector.lost(name)
        for request, choice in list(self._choices.values()):
            if choice.ending is not None and request.is_at(name):
                del self._choices[choice.request_id]  # its blocks went with the worker
        for request in list(self.live.values()):
            if request.is_at(name):
                self._move(request)

    def _move(self, request: ClientRequest) -> None:
        """Move it to another worker, unless it has been cancelled, or may not move any more."""
        request.worker = None
        if request.context.is_stopped():
            self._end_aborted(request, request.choices)
        elif not (self.router.names or self._company.patience_s) or not request.move(
            self.settings.migrate, _MAX_RESUBMISSIONS
        ):
            self._fail(request, EngineStoppedError(WORKER_LOST))
        else:
            self._dispatch(request)

    def _end_aborted(self, request: ClientRequest, choices: list[RequestChoice]) -> None:
        """Its worker is lost, or there was none: the end is ours to record."""
        now_ns = self.now_ns()
        for choice in [choice for choice in choices if choice.ending is None]:
            choice.stamps["blocks_freed"] = now_ns
            choice.holders.clear()
            for event in ("removed", "blocks_freed"):
                self._note(request, event, now_ns, "worker_lost", choice)
            self._note(request, "finished", now_ns, FinishReason.ABORT, choice)
            output = Output(
                request_id=choice.request_id,
                text="",
                num_generated=choice.num_generated,
                ending=Ending(finish_reason=FinishReason.ABORT, phase=choice.phase),
            )
            self._take_output(request, choice, output, now_ns)

    def _fail(self, request: ClientRequest, failure: EngineStoppedError) -> None:
        now_ns = self.now_ns()
        request.has_failed = True
        for choice in request.choices:
            if choice.ending is None:
                self._note(request, "finished", now_ns, FinishReason.ERROR, choice)
            self._choices.pop(choice.request_id, None)
        self._end(request, now_ns, failure)

    def failed(self, request_id: str, why: EngineStoppedError) -> None:
        """Its worker is there, but has no answer for it: the request's other answers are killed."""
        request, _ = self._choices.get(request_id, (None, None))
        if request is None or request.is_ended:
            return
        if request.worker is not None and len(request.choices) > 1:
            name, reason = request.request_id, CancelReason.ERROR
            abort = AbortRequest(request_id=name, reason=reason, signal=Signal.KILL)
            self._send(request.worker.name, abort)
        self._fail(request, why)

    def take_in(self, via: str, report: StepReport) -> None:
        """A report that came from the worker `via`, of itself or of the worker behind it."""
        worker = report.worker
        self.collector.reported(report, via)
        if report.step is not None:
            self.steps.append(report.step)
        touched: dict[str, tuple[ClientRequest, RequestChoice]] = {}
        for event in report.events:
            request, choice = self._choices.get(event.request_id, (None, None))
            if request is not None and event.reason == FinishReason.ERROR:
                continue  # whether and when that is its end is decided here
            self._log(event, worker, None if request is None else request.client_request_id)
            if request is not None and choice is not None and request.is_at(via):
                choice.note(event, worker)
                touched[event.request_id] = request, choice
        for request, choice in touched.values():
            self._let_go(request, choice)
        now_ns = self.now_ns()
        for output in report.outputs:
            request, choice = self._choices.get(output.request_id, (None, None))
            at = None if request is None else request.worker
            if request is None or choice is None or at is None or at.name != via:
                continue  # it is of an earlier connection
            if output.ending is None or output.finish_reason is not FinishReason.ERROR:
                self._take_output(request, choice, output, now_ns)
            elif output.ending.stop_reason == OUT_OF_MEMORY:
                self.failed(output.request_id, EngineStoppedError(NO_MEMORY))
            # else `via` is lost in a moment

    def _take_output(
        self, request: ClientRequest, choice: RequestChoice, output: Output, now_ns: int
    ) -> None:
        num_new = output.num_generated - choice.num_generated
        choice.take(output)
        request.outbox.put(choice.index, output)
        if num_new:
            request.count_tokens(choice, self.collector, now_ns)
            if self.limiter.spend(request.owner, num_new, now_ns):
                for other in list(self.live.values()):
                    if other.owner == request.owner:
                        self.cancel(other, CancelReason.RATE_LIMIT)
        if choice.ending is not None:
            request.count_ended(choice, self.collector, now_ns)
            self._let_go(request, choice)
            if request.is_ended:
                self._end(request, now_ns)
                longest = max(choice.num_generated for choice in request.choices)
                self.collector.num_answers.observe(len(request.choices))
                self.collector.most_generated_tokens.observe(longest)

    def _let_go(self, request: ClientRequest, choice: RequestChoice) -> None:
        """Forget an answer once it has ended and its blocks are free, whichever comes last."""
        if choice.ending is None or not choice.is_freed:
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
        if request.worker is not None:
            request.worker.ended()
        del self.live[request.request_id]
        self.archive.add(request, now_ns)

    def _note(
        self,
        request: ClientRequest,
        event: str,
        t_ns: int,
        reason: str | None = None,
        choice: RequestChoice | None = None,
    ) -> None:
        worker = "" if request.worker is None else request.worker.name
        noted = RequestEvent(
            t_ns=t_ns,
            event=event,
            request_id=(choice or request).request_id,
            step=self.collector.step_of(worker),
            num_generated=0 if choice is None else choice.num_generated,
            reason=reason,
        )
        self._log(noted, worker, request.client_request_id)

    def _log(self, event: RequestEvent, worker: str, client_request_id: str | None) -> None:
        entry = LifecycleEntry(
            seq=self.lifecycle.next_number,
            client_request_id=client_request_id,
            worker=worker,
            **msgspec.structs.asdict(event),
        )
        self.lifecycle.append(entry)
