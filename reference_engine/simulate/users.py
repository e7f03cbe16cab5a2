"""The users in virtual time: they send, read, leave, lose patience, and ask again.

In a closed loop each user has one request at a time; in an open loop requests come by a schedule,
whatever became of earlier ones. A user acts on what it has read, which is later than what was made.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from random import Random
from typing import Final, Protocol

from reference_engine.context import CancelReason
from reference_engine.core.request import FinishReason
from reference_engine.protocol import Output
from reference_engine.simulate.agenda import Agenda, Kind
from reference_engine.simulate.client import (
    READS_ON,
    Exchange,
    FirstTokens,
    Sending,
    StepEstimate,
    leaving_of,
)
from reference_engine.simulate.frontend import Common, Frontend
from reference_engine.simulate.lags import NS, Lag, TokenLags
from reference_engine.simulate.plan import PlanError, PlannedRequest, Retry

RETRY_PAUSE_S: Final = 0.5  # after a refusal or a failure, as live
_PLACES: Final = 1 << 30


class Loop(Protocol):
    """When requests are sent. `planned`: how many were due before the load's end; `ran_out`: users
    without another."""

    planned: int
    ran_out: int

    def begin(self, t_ns: int) -> None: ...

    def over(self, exchange: Exchange, t_ns: int) -> None: ...

    def end(self, t_ns: int) -> None: ...


Send = Callable[..., None]


class ClosedLoop:
    """Each user sends its next request when its last is over. `ran_out`: users without another."""

    def __init__(
        self,
        rows: Iterator[PlannedRequest],
        agenda: Agenda,
        send: Send,
        *,
        rest: Lag,
        retry: Retry | None,
        random: Random,
    ) -> None:
        self.planned = 0
        self.ran_out = 0
        self._left: defaultdict[int, deque[PlannedRequest]] = defaultdict(deque)
        for row in rows:
            self._left[row.user].append(row)
        self._agenda = agenda
        self._send = send
        self._rest = rest
        self._retry = retry
        self._random = random

    def begin(self, t_ns: int) -> None:
        for user in self._left:
            self._next(user, t_ns, None)

    def over(self, exchange: Exchange, t_ns: int) -> None:
        retry, outcome = self._retry, exchange.outcome
        again = exchange if retry is not None and outcome in retry.after else None
        pause_s = 0.0
        if outcome in ("rejected", "failed"):
            pause_s = RETRY_PAUSE_S
        elif outcome == "timed_out":
            pause_s = RETRY_PAUSE_S if retry is None else retry.pause_s
        self._next(exchange.planned.user, t_ns + round(pause_s * NS), again)

    def end(self, t_ns: int) -> None:
        pass  # a request is due only when it is sent

    def _next(self, user: int, t_ns: int, repeats: Exchange | None) -> None:
        left = self._left[user]
        if not left:
            self.ran_out += 1
            return
        self.planned += 1
        at_ns = t_ns + self._rest.draw(self._random)
        act = partial(self._send, left.popleft(), repeats=repeats)
        self._agenda.put(at_ns, Kind.ARRIVAL, act)


class OpenLoop:
    """Requests are sent by their offsets. While `max_streams` are open, the next one waits, and all
    behind it. `_due` is that one."""

    def __init__(
        self,
        rows: Iterator[PlannedRequest],
        agenda: Agenda,
        send: Send,
        *,
        max_streams: int | None,
        retry: Retry | None,
    ) -> None:
        self.planned = 0
        self.ran_out = 0
        self._rows = rows
        self._agenda = agenda
        self._send = send
        self._max_streams = max_streams
        self._retry = retry
        self._num_open = 0
        self._due: PlannedRequest | None = None
        self._is_full = self._has_ended = False
        self._begins_ns = 0

    def begin(self, t_ns: int) -> None:
        self._begins_ns = t_ns
        self._next(t_ns)

    def over(self, exchange: Exchange, t_ns: int) -> None:
        self._num_open -= 1
        retry = self._retry
        if retry and exchange.outcome in retry.after and exchange.sending.attempt < retry.most:
            act = partial(self._send_again, exchange)
            self._agenda.put(t_ns + round(retry.pause_s * NS), Kind.ARRIVAL, act)
        if self._is_full:
            self._is_full = False
            self._agenda.put(t_ns, Kind.ARRIVAL, self._come)

    def end(self, t_ns: int) -> None:
        self._has_ended = True
        while self._due is not None and self._intended_ns(self._due) < t_ns:
            self.planned += 1
            self._due = next(self._rows, None)

    def _next(self, now_ns: int) -> None:
        self._due = row = next(self._rows, None)
        if row is None:
            return
        if row.offset_s is None:
            raise PlanError(f"request {row.number}: no offset, among requests that have one")
        self._agenda.put(max(now_ns, self._intended_ns(row)), Kind.ARRIVAL, self._come)

    def _come(self, t_ns: int) -> None:
        row = self._due
        if row is None or self._has_ended:
            return
        if self._max_streams is not None and self._num_open >= self._max_streams:
            self._is_full = True
            return
        self.planned += 1
        self._num_open += 1
        self._send(row, t_ns, intended_ns=self._intended_ns(row))
        self._next(t_ns)

    def _send_again(self, exchange: Exchange, t_ns: int) -> None:
        self._num_open += 1
        self._send(exchange.planned, t_ns, repeats=exchange, attempt=exchange.sending.attempt + 1)

    def _intended_ns(self, row: PlannedRequest) -> int:
        return self._begins_ns + int((row.offset_s or 0.0) * NS)


class Users:
    """`open` holds the exchanges that are not over. `outcomes` counts the rows."""

    def __init__(
        self,
        common: Common,
        rows: Iterator[PlannedRequest],
        *,
        frontend: Frontend,
        step: StepEstimate,
        stop: Callable[[int], object],
    ) -> None:
        self.open: dict[str, Exchange] = {}
        self.outcomes: Counter[str] = Counter()
        self.sent = self.retries = 0
        self._plan = plan = common.plan
        self._cell = common.cell
        self._agenda = common.agenda
        self._frontend = frontend
        self._random = common.random("users")
        self._sink = common.sink
        self._step = step
        self._max_model_len = common.settings.config.max_model_len
        self._stop = stop
        self._seen = FirstTokens()
        self._send_lag = Lag(plan.lags.send_s)
        self._read_lags = TokenLags(Lag(plan.lags.deliver_s), self._random, growth=plan.lags.growth)
        self._has_stopped = False
        self.loop = self._make_loop(rows)

    def _make_loop(self, rows: Iterator[PlannedRequest]) -> Loop:
        plan, first = self._plan, next(rows, None)
        rows = rows if first is None else chain([first], rows)
        if first is None or first.offset_s is not None:
            return OpenLoop(
                rows, self._agenda, self.send, max_streams=plan.max_streams, retry=plan.retry
            )
        return ClosedLoop(
            rows,
            self._agenda,
            self.send,
            rest=Lag(plan.lags.rest_s),
            retry=plan.retry,
            random=self._random,
        )

    # Sending and leaving

    def send(
        self,
        planned: PlannedRequest,
        t_ns: int,
        *,
        intended_ns: int | None = None,
        repeats: Exchange | None = None,
        attempt: int = 0,
    ) -> None:
        if self._has_stopped:
            return
        self._check(planned)
        self.sent += 1
        self.retries += repeats is not None
        sending = Sending(
            request_id=f"walkaway-{self._cell}-{planned.user}-{self.sent}",
            sent_ns=t_ns,
            intended_ns=t_ns if intended_ns is None else intended_ns,
            place=self._random.randrange(_PLACES),
            attempt=attempt,
        )
        exchange = Exchange(planned, sending, leaving_of(planned, self._seen), repeats)
        self.open[exchange.request_id] = exchange
        exchange.arrives_ns = t_ns + self._send_lag.draw(self._random)
        self._agenda.put(
            exchange.arrives_ns, Kind.ARRIVAL, partial(self._frontend.arrive, exchange)
        )
        if exchange.leaving is not None and not exchange.leaving.tokens:
            self._leave_after_pause(exchange, t_ns)
        self._set_timers(exchange)

    def _check(self, planned: PlannedRequest) -> None:
        """Raises PlanError."""
        if planned.n != 1:
            raise PlanError(f"request {planned.number}: a simulated request has one answer, n = 1")
        if planned.way and not self._frontend.knows(planned.way):
            name = self._plan.lags.name
            raise PlanError(f"lags {name}: `detect_s` has no way {planned.way!r}, a planned one")
        if planned.text is not None and not 0 <= planned.text < len(self._plan.texts):
            raise PlanError(f"request {planned.number}: the plan has no text {planned.text}")
        tokens = planned.prompt_tokens + planned.max_tokens
        if tokens > self._max_model_len:
            raise PlanError(
                f"request {planned.number}: prompt and answer have {tokens} tokens, more than "
                f"max_model_len ({self._max_model_len})"
            )

    def _set_timers(self, exchange: Exchange) -> None:
        first_s, total_s = self._plan.first_token_timeout_s, self._plan.request_timeout_s
        if first_s is not None and exchange.planned.stream:
            why = f"no token came {first_s:g} s after the sending"
            act = partial(self._lose_patience, exchange, why)
            self._agenda.put(exchange.sending.sent_ns + round(first_s * NS), Kind.LEAVE, act)
        if total_s is not None:
            why = f"the answer was not complete {total_s:g} s after the sending"
            act = partial(self._time_out, exchange, why)
            self._agenda.put(exchange.sending.sent_ns + round(total_s * NS), Kind.LEAVE, act)

    def _lose_patience(self, exchange: Exchange, why: str, t_ns: int) -> None:
        if exchange.first_read_ns(self._read_lags, before=t_ns) is None:
            self._time_out(exchange, why, t_ns)

    def _time_out(self, exchange: Exchange, why: str, t_ns: int) -> None:
        if exchange.outcome is None:
            self._catch_up(exchange)
            exchange.close("timed_out", t_ns, error=why)
            self._frontend.leave(exchange, t_ns)
            self._over(exchange, t_ns)

    def _leave_after_pause(self, exchange: Exchange, since_ns: int) -> None:
        assert exchange.leaving is not None
        pause_ns = exchange.leaving.length_ns(self._step, self._plan.think)
        act = partial(self._leave, exchange, pause_ns)
        self._agenda.put(since_ns + pause_ns, Kind.LEAVE, act)

    def _leave(self, exchange: Exchange, pause_ns: int, t_ns: int) -> None:
        if exchange.outcome is not None:
            return  # the answer ended while the user was thinking
        leaving = exchange.leaving
        assert leaving is not None
        self._catch_up(exchange)
        exchange.close("abandoned", t_ns, think_ns=pause_ns)
        self._frontend.leave(exchange, t_ns, leaving.way)
        if leaving.way not in READS_ON or exchange.has_ended:
            self._over(exchange, t_ns)

    def _catch_up(self, exchange: Exchange) -> None:
        """Know all its tokens that have been made by now."""
        replica = exchange.replica
        request = None if replica is None else replica.request(exchange.engine_id)
        if replica is not None and request is not None:
            exchange.catch_up(request.num_generated, replica.log)

    # News from the frontend

    def grown(self, exchange: Exchange) -> None:
        """It has the tokens after which its user leaves."""
        leaving = exchange.leaving
        if exchange.outcome is None and leaving is not None and exchange.planned.stream:
            read_ns = exchange.read_ns(self._read_lags)
            self._leave_after_pause(exchange, int(read_ns[leaving.tokens - 1]))

    def ended(self, exchange: Exchange, output: Output, t_ns: int) -> None:
        """Read when its last token is, or as much later as a token would be."""
        tokens = exchange.read_ns(self._read_lags)
        at_ns = max(t_ns, int(tokens[-1])) if len(tokens) else t_ns
        act = partial(self._read_end, exchange, output)
        self._agenda.put(at_ns, Kind.COMPLETION, act)

    def _read_end(self, exchange: Exchange, output: Output, t_ns: int) -> None:
        reason = output.finish_reason
        assert reason is not None
        if exchange.outcome is None:
            if reason is not FinishReason.ABORT:
                exchange.close("completed", t_ns, finish_reason=reason.value)
            elif exchange.cancel_reason is CancelReason.CLIENT_TIMEOUT:
                exchange.close("timed_out", t_ns, error=_ABORTED.format("client_timeout"))
            else:
                why = exchange.cancel_reason or "no reason given"
                exchange.close("failed", t_ns, error=_ABORTED.format(why))
            self._over(exchange, t_ns)
        elif exchange.request_id in self.open:  # left, and reads on
            exchange.server_ended(t_ns, reason.value)
            self._over(exchange, t_ns)

    def refused(self, exchange: Exchange, t_ns: int) -> None:
        if exchange.outcome is None:
            exchange.close("rejected", t_ns, error="HTTP 503: no worker of the engine is connected")
        if exchange.request_id in self.open:
            self._over(exchange, t_ns)

    def lost(self, exchange: Exchange, why: str, t_ns: int) -> None:
        if exchange.outcome is None:
            self._catch_up(exchange)
            exchange.close("failed", t_ns, error=why)
        if exchange.request_id in self.open:
            self._over(exchange, t_ns)

    # The end

    def _over(self, exchange: Exchange, t_ns: int) -> None:
        del self.open[exchange.request_id]
        row = exchange.row(self._read_lags)
        self._sink.request(row)
        self.outcomes[row.outcome] += 1
        if row.stream and row.first_token_ns is not None:
            self._seen.observe(row.first_token_ns - row.sent_ns)
        if self._has_stopped:
            return
        self.loop.over(exchange, t_ns)
        if self.outcomes["abandoned"] == self._plan.stop_after_abandons:
            self._stop(t_ns)

    def cut_off(self, t_ns: int) -> None:
        """The load ends: nothing more is sent, and open streams are closed."""
        if self._has_stopped:
            return
        self._has_stopped = True
        self.loop.end(t_ns)
        for exchange in list(self.open.values()):
            self._catch_up(exchange)
            if exchange.outcome is None:
                exchange.close("cut_off", t_ns)
                self._frontend.leave(exchange, t_ns)
            else:
                exchange.cut_reading(t_ns)
            self._over(exchange, t_ns)


_ABORTED: Final = "the server aborted the request: {}"
