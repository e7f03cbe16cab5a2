"""The users in virtual time: they send, read, leave, lose patience, and ask again.

In a closed loop each user has one request at a time; in an open loop requests come by a schedule,
whatever became of earlier ones. A user acts on what it has read, which is later than what was made.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Final, Protocol

from harness.errors import ConfigError
from harness.records import Outcome, RequestRow
from harness.simulate.agenda import Kind
from harness.simulate.asking import Asking, SimulatedRequest
from harness.simulate.exchange import Sending, SimulatedExchange
from harness.simulate.frontend import Common, SimulatedFrontend
from harness.simulate.lags import NS, Lag, TokenLags
from harness.workload.arrivals import OpenArrivals
from harness.workload.observed_latency import ObservedLatency, StepEstimate
from harness.workload.schedule import Arrival
from reference_engine.core.request import FinishReason
from reference_engine.protocol import Output

MOST_RESENT: Final = 3  # of an open loop's request; in a closed loop its user sends the next
_PLACES: Final = 1 << 30


class Send(Protocol):
    def __call__(
        self,
        asked: SimulatedRequest,
        t_ns: int,
        *,
        intended_ns: int | None = None,
        repeats: SimulatedExchange | None = None,
        attempt: int = 0,
    ) -> None: ...


class Loop(Protocol):
    """When requests are sent. `planned`: how many were due before the load's end. `missed`: how
    long each request that was not sent had waited, and whether its user would have left."""

    planned: int
    missed: list[tuple[float, bool]]

    def begin(self, t_ns: int) -> None: ...

    def over(self, exchange: SimulatedExchange, row: RequestRow, t_ns: int) -> None: ...

    def end(self, t_ns: int) -> None: ...


class ClosedLoop:
    """Each user sends its next request when its last is over."""

    def __init__(
        self, common: Common, asking: Asking, send: Send, seen: ObservedLatency, random: Random
    ) -> None:
        self.planned = 0
        self.missed: list[tuple[float, bool]] = []  # a request is due only when it is sent
        self._asking, self._load = asking, common.plan.load
        self._agenda = common.agenda
        self._send = send
        self._seen = seen
        self._rest = Lag(common.plan.lags.rest_s)
        self._random = random
        self._numbers = count()
        self._asked: Counter[int] = Counter()

    def begin(self, t_ns: int) -> None:
        for user in self._asking.users():
            self._next(user, t_ns, None)

    def over(self, exchange: SimulatedExchange, row: RequestRow, t_ns: int) -> None:
        again = exchange if row.outcome in self._load.ask_again_after else None
        has_sessions = self._load.session is not None
        own = self._asking.session_of(row.user).over if has_sessions else None
        pause_s = self._load.pause_after(row.outcome) if own is None else own(row)
        at_ns = t_ns + round(pause_s * NS)
        self._next(exchange.spec.user, at_ns, again)

    def end(self, t_ns: int) -> None:
        pass

    def _next(self, user: int, t_ns: int, repeats: SimulatedExchange | None) -> None:
        self.planned += 1
        at_ns = t_ns + self._rest.draw(self._random)
        self._agenda.put(at_ns, Kind.ARRIVAL, partial(self._ask, user, repeats))

    def _ask(self, user: int, repeats: SimulatedExchange | None, t_ns: int) -> None:
        n = self._asked[user]
        self._asked[user] += 1
        asked = self._asking.of_user(user, n, number=next(self._numbers), seen=self._seen)
        self._send(asked, t_ns, repeats=repeats)


class OpenLoop:
    """Requests are sent by their offsets. While the most streams are open, the next one waits, and
    all behind it. `_due` is that one. A request is sent again after an end at which users ask
    again."""

    def __init__(
        self,
        common: Common,
        asking: Asking,
        arrivals: OpenArrivals,
        send: Send,
        seen: ObservedLatency,
    ) -> None:
        self.planned = 0
        self.missed: list[tuple[float, bool]] = []
        self._asking, self._load = asking, common.plan.load
        self._arrivals = asking.arrivals(arrivals)
        self._agenda = common.agenda
        self._send = send
        self._seen = seen
        self._max_streams = common.plan.max_streams
        self._num_open = 0
        self._due: Arrival | None = None
        self._is_full = self._has_ended = False
        self._begins_ns = 0

    def begin(self, t_ns: int) -> None:
        self._begins_ns = t_ns
        self._next(t_ns)

    def over(self, exchange: SimulatedExchange, row: RequestRow, t_ns: int) -> None:
        self._num_open -= 1
        is_asked_again = row.outcome in self._load.ask_again_after
        if is_asked_again and exchange.sending.attempt < MOST_RESENT:
            act = partial(self._send_again, exchange)
            self._agenda.put(t_ns + round(self._load.retry_pause_s * NS), Kind.ARRIVAL, act)
        if self._is_full:
            self._is_full = False
            self._agenda.put(t_ns, Kind.ARRIVAL, self._come)

    def end(self, t_ns: int) -> None:
        self._has_ended = True
        while self._due is not None and self._intended_ns(self._due) < t_ns:
            self.planned += 1
            waited_s = (t_ns - self._begins_ns) / NS - self._due.offset_s
            self.missed.append((waited_s, self._asked(self._due).spec.way is not None))
            self._due = next(self._arrivals, None)

    def _next(self, now_ns: int) -> None:
        self._due = arrival = next(self._arrivals, None)
        if arrival is not None:
            at_ns = max(now_ns, self._intended_ns(arrival))
            self._agenda.put(at_ns, Kind.ARRIVAL, self._come)

    def _come(self, t_ns: int) -> None:
        arrival = self._due
        if arrival is None or self._has_ended:
            return
        if self._max_streams is not None and self._num_open >= self._max_streams:
            self._is_full = True
            return
        self.planned += 1
        self._num_open += 1
        self._send(self._asked(arrival), t_ns, intended_ns=self._intended_ns(arrival))
        self._next(t_ns)

    def _send_again(self, exchange: SimulatedExchange, t_ns: int) -> None:
        self._num_open += 1
        self._send(exchange.asked, t_ns, repeats=exchange, attempt=exchange.sending.attempt + 1)

    def _asked(self, arrival: Arrival) -> SimulatedRequest:
        return self._asking.on_arrival(arrival, seen=self._seen)

    def _intended_ns(self, arrival: Arrival) -> int:
        return self._begins_ns + int(arrival.offset_s * NS)


class Users:
    """`open` holds the exchanges that are not over. `outcomes` counts the rows."""

    def __init__(
        self,
        common: Common,
        asking: Asking,
        *,
        frontend: SimulatedFrontend,
        step: StepEstimate,
        stop: Callable[[int], object],
    ) -> None:
        self.open: dict[str, SimulatedExchange] = {}
        self.outcomes: Counter[Outcome] = Counter()
        self.sent = self.retries = 0
        self._plan = plan = common.plan
        self._cell = common.cell
        self._agenda = common.agenda
        self._frontend = frontend
        self._random = common.random("users")
        self._sink = common.sink
        self._step = step
        self._run, self._load = plan.workload.run, plan.load
        self._stop = stop
        self._seen = ObservedLatency()
        self._send_lag = Lag(plan.lags.send_s)
        self._read_lags = TokenLags(Lag(plan.lags.deliver_s), self._random, growth=plan.lags.growth)
        self._has_stopped = False
        self.loop = self._make_loop(common, asking)

    def _make_loop(self, common: Common, asking: Asking) -> Loop:
        arrivals = common.plan.arrivals
        if arrivals is None:
            return ClosedLoop(common, asking, self.send, self._seen, self._random)
        return OpenLoop(common, asking, arrivals, self.send, self._seen)

    # Sending and leaving

    def send(
        self,
        asked: SimulatedRequest,
        t_ns: int,
        *,
        intended_ns: int | None = None,
        repeats: SimulatedExchange | None = None,
        attempt: int = 0,
    ) -> None:
        if self._has_stopped:
            return
        self._check_length(asked)
        self.sent += 1
        self.retries += repeats is not None
        spec = replace(
            asked.spec,
            request_id=f"walkaway-{self._cell}-{asked.spec.user}-{self.sent}",
            arm=self._plan.arm,
            intended_start_ns=t_ns if intended_ns is None else intended_ns,
            repeats=None if repeats is None else repeats.request_id,
        )
        place = self._random.randrange(_PLACES)
        exchange = SimulatedExchange(asked, spec, Sending(t_ns, place, attempt), repeats)
        self.open[exchange.request_id] = exchange
        exchange.arrives_ns = t_ns + self._send_lag.draw(self._random)
        self._agenda.put(
            exchange.arrives_ns, Kind.ARRIVAL, partial(self._frontend.arrive, exchange)
        )
        if exchange.leaves_after == 0:
            self._leave_after_pause(exchange, t_ns)
        self._set_timers(exchange)

    def _check_length(self, request: SimulatedRequest) -> None:
        """Raises ConfigError."""
        tokens = request.spec.prompt_tokens + request.spec.max_tokens
        most = self._plan.engine.max_model_len
        if tokens > most:
            raise ConfigError(
                f"request {request.number}: prompt and answer have {tokens} tokens, more than "
                f"`engine.max_model_len` ({most})"
            )

    def _set_timers(self, exchange: SimulatedExchange) -> None:
        first_s, total_s = self._run.first_token_timeout_s, self._run.total_timeout_s
        if first_s is not None and exchange.is_stream:
            why = f"no token came {first_s:g} s after the sending"
            act = partial(self._lose_patience, exchange, why)
            self._agenda.put(exchange.sending.sent_ns + round(first_s * NS), Kind.LEAVE, act)
        if total_s is not None:
            why = f"the answer was not complete {total_s:g} s after the sending"
            act = partial(self._time_out, exchange, why)
            self._agenda.put(exchange.sending.sent_ns + round(total_s * NS), Kind.LEAVE, act)

    def _lose_patience(self, exchange: SimulatedExchange, why: str, t_ns: int) -> None:
        if exchange.first_read_ns(self._read_lags, before=t_ns) is None:
            self._time_out(exchange, why, t_ns)

    def _time_out(self, exchange: SimulatedExchange, why: str, t_ns: int) -> None:
        if exchange.outcome is None:
            self._catch_up(exchange)
            exchange.close(Outcome.TIMED_OUT, t_ns, error=why)
            self._frontend.leave(exchange, t_ns)
            self._over(exchange, t_ns)

    def _leave_after_pause(self, exchange: SimulatedExchange, since_ns: int) -> None:
        rule = exchange.spec.leave_rule(self._load.think, self._step)
        pause_ns = rule(exchange.leaves_after or 0)
        assert pause_ns is not None
        act = partial(self._leave, exchange, pause_ns)
        self._agenda.put(since_ns + pause_ns, Kind.LEAVE, act)

    def _leave(self, exchange: SimulatedExchange, pause_ns: int, t_ns: int) -> None:
        if exchange.outcome is not None:
            return  # the answer ended while the user was thinking
        way = exchange.spec.way
        assert way is not None
        self._catch_up(exchange)
        exchange.close(Outcome.ABANDONED, t_ns, think_ns=pause_ns)
        self._frontend.leave(exchange, t_ns, way)
        if not way.reads_on or exchange.has_ended:
            self._over(exchange, t_ns)

    def _catch_up(self, exchange: SimulatedExchange) -> None:
        """Know all its tokens that have been made by now."""
        replica = exchange.replica
        request = None if replica is None else replica.request(exchange.engine_id)
        if replica is not None and request is not None:
            exchange.catch_up(request.num_generated, replica.log)

    # News from the frontend

    def grown(self, exchange: SimulatedExchange) -> None:
        """It has the tokens after which its user leaves."""
        tokens = exchange.leaves_after
        if exchange.outcome is None and tokens is not None and exchange.is_stream:
            read_ns = exchange.read_ns(self._read_lags)
            self._leave_after_pause(exchange, int(read_ns[tokens - 1]))

    def ended(self, exchange: SimulatedExchange, output: Output, t_ns: int) -> None:
        """Read when its last token is, or as much later as a token would be."""
        tokens = exchange.read_ns(self._read_lags)
        at_ns = max(t_ns, int(tokens[-1])) if len(tokens) else t_ns
        act = partial(self._read_end, exchange, output)
        self._agenda.put(at_ns, Kind.COMPLETION, act)

    def _read_end(self, exchange: SimulatedExchange, output: Output, t_ns: int) -> None:
        reason = output.finish_reason
        assert reason is not None
        if exchange.outcome is None:
            if reason is not FinishReason.ABORT:
                exchange.close(Outcome.COMPLETED, t_ns, finish_reason=reason.value)
            else:
                why = exchange.cancel_reason or "no reason given"
                said = f"the server aborted the request: {why}"
                exchange.close(Outcome.FAILED, t_ns, error=said)
            self._over(exchange, t_ns)
        elif exchange.request_id in self.open:  # left, and reads on
            exchange.server_ended(t_ns, reason.value)
            self._over(exchange, t_ns)

    def refused(self, exchange: SimulatedExchange, t_ns: int) -> None:
        if exchange.outcome is None:
            said = "HTTP 503: no worker of the engine is connected"
            exchange.close(Outcome.REJECTED, t_ns, error=said)
        if exchange.request_id in self.open:
            self._over(exchange, t_ns)

    def lost(self, exchange: SimulatedExchange, why: str, t_ns: int) -> None:
        if exchange.outcome is None:
            self._catch_up(exchange)
            exchange.close(Outcome.FAILED, t_ns, error=why)
        if exchange.request_id in self.open:
            self._over(exchange, t_ns)

    # The end

    def _over(self, exchange: SimulatedExchange, t_ns: int) -> None:
        del self.open[exchange.request_id]
        row = exchange.row(self._read_lags)
        self._sink.request(row)
        self.outcomes[row.outcome] += 1
        self._seen.observe(row)
        if self._has_stopped:
            return
        self.loop.over(exchange, row, t_ns)
        if self.outcomes[Outcome.ABANDONED] == self._plan.stop_after_abandons:
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
                exchange.close(Outcome.CUT_OFF, t_ns)
                self._frontend.leave(exchange, t_ns)
            else:
                exchange.cut_reading(t_ns)
            self._over(exchange, t_ns)
