"""Requests through a gateway to the bundled upstream, and what becomes of them on both sides."""

import math
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

import gevent
import httpx
import msgspec
import psutil

from harness.client.live_stream import LiveStream
from harness.client.session import LoadSession
from harness.client.wire_log import Tap, WireLog
from harness.conform.gateway.crossing import Crossing, JudgedCrossing, judge
from harness.conform.gateway.ledger import Ledger, UpstreamRequest
from harness.conform.gateway.usage import UsageSource
from harness.conform.routes import Routes
from harness.experiments.outcome import CannotDecideError, HarnessError
from harness.records import Delivery, Disconnect, Outcome, RequestRow, Role, Way
from harness.store.conform_result import Aftermath, WireEvent
from harness.upstream.orders import Order
from harness.workload.abandon import RequestSpec
from harness.workload.plan import LoadPlan
from harness.workload.target import DialectName

ARRIVES_S: Final = 10.0  # the longest until the upstream has seen what a client waits for
_GRACE_S: Final = 3.0  # beyond an answer's length, until it must have ended
_RESTARTS_S: Final = 2.0  # a gateway that is started anew need not be there before
BRIEF: Final = 3  # tokens of an answer that is read
_LEAST_LIMIT: Final = 16  # tokens: of Responses, at OpenAI
_FINISHED: Final = "stopped"  # the upstream makes no further token
_WHOLE: Final = ("stop", "length")  # why a request is over whose answer was made to its end
_STORY: Final = "Tell me a long story."


class LeaveSpec(NamedTuple):
    """How a client leaves: after this event at the upstream, and `steps` later. `tokens`: of the
    answer, None: as long as the bench's."""

    order: Order = Order()
    after: str = "first_token"
    steps: float = 2.5
    way: Way | None = None
    delivery: Delivery = Delivery.STREAM
    tokens: int | None = None


class GatewayAnswer(NamedTuple):
    """The answer to a client that stays. `requests`: its requests in the upstream's log."""

    row: RequestRow
    requests: Sequence[UpstreamRequest]

    @property
    def is_whole(self) -> bool:
        return self.row.outcome is Outcome.COMPLETED

    def has_all(self, tokens: int) -> bool:
        """It is the whole text of `tokens` tokens, or of an answer that the upstream finished for
        this client: a gateway may ask for another length than its client."""
        made = [one.tokens for one in self.requests if one.why in _WHOLE]
        text = (self.row.answer or "").split()
        return any(text == words_of(one) for one in (tokens, *made))

    @property
    def is_late(self) -> bool:
        """It was not over when its client's time was up."""
        return self.row.outcome is Outcome.CUT_OFF

    @property
    def is_refused(self) -> bool:
        return self.row.status_code not in (None, httpx.codes.OK)

    @property
    def is_limited(self) -> bool:
        """Refused as one request too many."""
        return self.row.status_code == httpx.codes.TOO_MANY_REQUESTS


class RequestsLog(WireLog):
    """Each request is a try, with the number at the end of its id."""

    def tap(self, spec: RequestSpec) -> Tap | None:
        self._attempt = number_of(spec.request_id)
        return super().tap(spec)


class GatewayEnd(NamedTuple):
    """The gateway serves nobody any more."""

    aftermath: Aftermath
    reason: str


Gauges = Mapping[str, float]


class Crowd(NamedTuple):
    """`after`: the clients that came next. `connections`: at the upstream at rest, after each time.
    `memory_mb`: of the gateway's process, then; empty if it is not known. `gauges`: before all, and
    after each time that clients stayed and each time that they left; or why they cannot be read."""

    crossings: Sequence[Crossing]
    after: Sequence[GatewayAnswer]
    connections: Sequence[int]
    memory_mb: Sequence[float]
    gauges: Sequence[Gauges] | Exception


@dataclass(kw_only=True)
class GatewayBench:
    """`plan`: of the gateway, `plans`: in each dialect that it speaks; `upstream`: of the upstream,
    asked without the gateway. `left`: by dialect, the ids of the clients that left, and when
    ("": without the gateway). `crowds`: by dialect, for cases that look at the same crowd."""

    plan: LoadPlan
    plans: dict[DialectName, LoadPlan]
    upstream: LoadPlan
    session_of: Callable[[LoadPlan, WireLog], LoadSession]
    wire: WireLog
    ledger: Ledger
    rng: random.Random
    step_s: float
    answer_tokens: int
    tries: int
    page_urls: Sequence[str] = ()
    usage: UsageSource | None = None
    pid: int | None = None
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    crowds: dict[str, Crowd | CannotDecideError] = field(default_factory=dict)
    streams: dict[LoadSession, list[LiveStream]] = field(default_factory=dict)
    names: Iterator[str] = field(default_factory=lambda: _names(secrets.token_hex(3)))

    @property
    def declared(self) -> Disconnect:
        return self.plan.target.disconnect

    @property
    def answer_s(self) -> float:
        return self.answer_tokens * self.step_s

    def longest_s(self, leave: LeaveSpec) -> float:
        """The longest time until an answer that is left has ended by itself."""
        silent_s = ((leave.order.prefill_ms or 0.0) + (leave.order.end_ms or 0.0)) / 1e3
        return silent_s + (leave.tokens or self.answer_tokens) * self.step_s + _GRACE_S

    @contextmanager
    def session(self, plan: LoadPlan) -> Iterator[LoadSession]:
        """A session of connections that nobody else uses. No stream is open any more at its end."""
        session = self.session_of(plan, self.wire)
        self.streams[session] = []
        try:
            yield session
        finally:
            for stream in self.streams.pop(session):
                if not stream.has_ended:
                    stream.cut()
            session.close()

    def start(self, session: LoadSession, order: Order, tokens: int, **more: Any) -> LiveStream:
        """A request whose name in the upstream's log is its id. The order says how long its answer
        is: a gateway may drop a request's limit, raise it, or refuse one that is low."""
        name = next(self.names)
        own = replace(order, id=name, tokens=order.tokens or tokens)
        text = f"{_STORY} {own.line()}"
        most = max(_LEAST_LIMIT, tokens)
        spec = RequestSpec(user=0, max_tokens=most, prompt_tokens=1, request_id=name, **more)
        stream = LiveStream(session, spec, text)
        self.streams[session].append(stream)
        return stream

    def leave_each(
        self, plan: LoadPlan, leave: LeaveSpec, clients: int, dialect: str = ""
    ) -> list[Crossing]:
        """`clients` clients leave, side by side. Raises CannotDecideError."""
        with self.session(plan) as session:
            return together([partial(self._cross, session, leave, dialect)] * clients)

    def _cross(self, session: LoadSession, leave: LeaveSpec, dialect: str) -> Crossing:
        stream = self.begin(session, leave)
        self.await_turn(stream, leave)
        return self.see_leave(stream, leave, dialect)

    def begin(self, session: LoadSession, leave: LeaveSpec, **more: Any) -> LiveStream:
        tokens = leave.tokens or self.answer_tokens
        spec = {"delivery": leave.delivery, "way": leave.way, **more}
        return self.start(session, leave.order, tokens, **spec)

    def await_turn(self, stream: LiveStream, leave: LeaveSpec) -> None:
        """Waits until it is time to leave. Raises CannotDecideError."""
        name = stream.spec.request_id
        if not self.ledger.wait(name, leave.after, ARRIVES_S, lambda: stream.has_ended):
            if stream.row is not None:
                raise CannotDecideError(f"a request was not served: {why_ended(stream.row)}")
            raise CannotDecideError(
                f"the upstream saw no `{leave.after}` of a request within {ARRIVES_S:g} s"
            )
        gevent.sleep((leave.steps + self.rng.random()) * self.step_s)

    def depart(self, stream: LiveStream, leave: LeaveSpec, dialect: str) -> int:
        """The client leaves now. Returns t0. Raises CannotDecideError if its stream has ended by
        itself."""
        if leave.after == _FINISHED:
            return self._cut(stream, dialect)
        stream.leave(leave.way)
        row = stream.join(ARRIVES_S)
        if row is None or row.abandoned_ns is None:
            shown = "it does not end" if row is None else why_ended(row)
            raise CannotDecideError(f"a client that was to leave had ended before: {shown}")
        self.left.setdefault(dialect, {})[stream.spec.request_id] = row.abandoned_ns
        return row.abandoned_ns

    def _cut(self, stream: LiveStream, dialect: str) -> int:
        """An answer that has a finish reason cannot be left, only its connection be closed."""
        name, t0_ns = stream.spec.request_id, time.perf_counter_ns()
        if stream.has_ended or self.ledger.time_of(name, "ended") is not None:
            raise CannotDecideError("a client that was to leave had ended before")
        stream.cut()
        self.left.setdefault(dialect, {})[name] = t0_ns
        return t0_ns

    def see_leave(self, stream: LiveStream, leave: LeaveSpec, dialect: str) -> Crossing:
        return self.see_crossing(stream, self.depart(stream, leave, dialect), leave)

    def see_crossing(self, stream: LiveStream, t0_ns: int, leave: LeaveSpec) -> Crossing:
        """What became of a client that left at t0."""
        name = stream.spec.request_id
        over = self.ledger.over(name, self.longest_s(leave)) or self._not_over(name)
        if len(over) < len(self.ledger.arrivals(name)):
            over = self._not_over(name)
        for request in over:
            self._note(request)
        return Crossing(t0_ns, longest_lived(over, t0_ns))

    def _note(self, request: UpstreamRequest) -> None:
        """A lane of the upstream's in the log of the wire."""
        closed = {"fin": "FIN from the gateway", "rst": "RST from the gateway"}
        moments = {
            "arrived": request.arrived_ns,
            "first token": request.first_token_ns,
            closed.get(request.closed or "", ""): request.closed_ns,
            f"{request.tokens} tokens made": request.stopped_ns,
        }
        for text, t_ns in moments.items():
            if t_ns is not None:
                number = number_of(str(request.id))
                self.wire.write(
                    WireEvent(t_ns=t_ns, attempt=number, stream="upstream", what="mark", text=text)
                )

    def _not_over(self, name: str) -> list[UpstreamRequest]:
        """The requests with this id whose answer the gateway neither takes nor ends."""
        return msgspec.convert(self._truth(f"id={name}")["requests"], list[UpstreamRequest])

    def judge(self, crossings: Sequence[Crossing], leave: LeaveSpec) -> JudgedCrossing:
        """Raises CannotDecideError."""
        return judge(
            crossings,
            step_s=self.step_s,
            declared=self.declared,
            answer_s=self.longest_s(leave),
        )

    def left_in_all(self) -> int:
        """Clients, through the gateway."""
        return sum(len(names) for dialect, names in self.left.items() if dialect)

    def asked_again(self, name: str, t0_ns: int) -> list[int]:
        return [at_ns for at_ns in self.ledger.arrivals(name) if at_ns > t0_ns]

    def ask(
        self, session: LoadSession, order: Order, tokens: int = BRIEF, **more: Any
    ) -> GatewayAnswer:
        """Read to its end, or for as long as it may take."""
        stream = self.start(session, order, tokens, role=Role.CANARY, **more)
        longest_s = tokens * self.step_s + ARRIVES_S
        if stream.join(longest_s) is None:
            stream.cut()
        row = stream.row
        assert row is not None
        if row.outcome is Outcome.CUT_OFF:
            row.error = f"it had no whole answer after {longest_s:.3g} s"
        return GatewayAnswer(row, self.ledger.over(stream.spec.request_id, 1.0))

    def ask_each(
        self, plan: LoadPlan, orders: Sequence[Order], tokens: int = BRIEF, **more: Any
    ) -> list[GatewayAnswer]:
        """Side by side."""
        with self.session(plan) as session:
            return together([partial(self.ask, session, one, tokens, **more) for one in orders])

    def find_end(self, dialect: DialectName) -> GatewayEnd | None:
        """The gateway has ended if new clients get no connection for a while, or no answer for as
        long as an answer that was left may run."""
        began_s = time.monotonic()
        while True:
            (answer,) = self.ask_each(self.plans[dialect], [Order()])
            if answer.row.status_code is not None:
                return None
            reason = f"the gateway serves nobody any more: {why_ended(answer.row)}"
            tried_s = time.monotonic() - began_s
            if tried_s > (self.answer_s if answer.is_late else _RESTARTS_S):
                return GatewayEnd(Aftermath.WEDGED if answer.is_late else Aftermath.DEAD, reason)
            gevent.sleep(self.step_s)

    def connections(self) -> int:
        """Open connections at the upstream, but for the one of this question."""
        open_ones: int = self._truth("limit=1")["connections"]["open"]
        return open_ones - 1

    def check_upstream(self) -> None:
        """Raises HarnessError if it does not answer: no red is then the gateway's."""
        try:
            self._truth("limit=1")
        except CannotDecideError as error:
            raise HarnessError(f"our own upstream does not answer any more: {error}") from error

    def memory_mb(self) -> list[float]:
        """The memory of the gateway's process; empty if the process is not known."""
        if self.pid is None:
            return []
        try:
            return [round(psutil.Process(self.pid).memory_info().rss / 1e6, 1)]
        except psutil.Error as error:
            raise CannotDecideError(f"process {self.pid} cannot be looked at: {error}") from error

    @contextmanager
    def full_slots(self) -> Iterator[None]:
        """Requests that make no token take all slots of the upstream. Raises CannotDecideError."""
        now = self._truth("limit=1")
        free = now["settings"]["slots"] - now["running"]
        with self.session(self.upstream) as session:
            fillers = [self.start(session, Order(act="silent"), 1) for _ in range(free)]
            for filler in fillers:
                if not self.ledger.wait(filler.spec.request_id, "slot", ARRIVES_S):
                    raise CannotDecideError("the upstream's slots could not be filled")
            yield

    def _truth(self, query: str) -> dict[str, Any]:
        routes = Routes(self.upstream)
        try:
            return routes.get(f"/walkaway/truth?{query}").body
        finally:
            routes.close()


def longest_lived(requests: Sequence[UpstreamRequest], t0_ns: int) -> UpstreamRequest | None:
    """The request of one client that left at t0 whose connection was closed last, or not at all: a
    gateway may have asked twice before. Requests after t0 are for `hop/no-retry`."""
    before = [one for one in requests if one.arrived_ns <= t0_ns]
    return max(before, key=lambda one: one.closed_ns or math.inf, default=None)


Made = TypeVar("Made")


def together(acts: Sequence[Callable[[], Made]]) -> list[Made]:
    """Runs the acts side by side, and returns what each returns. If some fail, raises the error of
    the first of them when all are done."""
    jobs = [gevent.spawn(act) for act in acts]
    try:
        gevent.joinall(jobs)
    finally:
        gevent.killall(jobs)
    return [job.get() for job in jobs]


def _names(tag: str) -> Iterator[str]:
    """Names that no other run has."""
    return (f"w{tag}-{number}" for number in count(1))


def number_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def why_ended(row: RequestRow) -> str:
    return row.error or row.finish_reason or str(row.outcome)


def words_of(tokens: int) -> list[str]:
    """The text of an answer of this length."""
    return [f"w{n}" for n in range(1, tokens + 1)]
