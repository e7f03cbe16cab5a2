"""The frontend in virtual time: sends requests to replicas, sees clients leave, cancels.

    client ──send──▶ arrive ──▶ replica                          each arrow takes its lag
    client ──leave─▶ (detect) ─▶ disconnected ─▶ (delay) ─▶ abort sent ─(signal)─▶ replica hears

It has the faults of `serve.faults` that show without a real connection.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Final, NamedTuple, Protocol

import msgspec

from harness.records import Way
from harness.simulate.agenda import Agenda, Kind
from harness.simulate.exchange import SimulatedExchange
from harness.simulate.lags import NS, Lag
from harness.simulate.plan import Plan
from harness.simulate.replica import FRONTEND, Replica, Stepped
from harness.simulate.router import ReplicaRouter
from harness.simulate.rows import Sink
from harness.workload.tasks import TaskText
from reference_engine.context import Cancellation, CancelReason, Context, DetectionMethod
from reference_engine.core.early_stop import EarlyStopping
from reference_engine.core.request import FinishReason, Sampling
from reference_engine.model.tokenizer import encode_bytes
from reference_engine.protocol import AddRequest, Output, RequestEvent
from reference_engine.serve.supervisor import WORKER_LOST
from reference_engine.worker.inbox import Added, CancelCommand

MOST_RESUBMISSIONS: Final = 5  # as live
_SEES: Final = Way.FIN  # how it sees a client go that has no way of its own


class Clients(Protocol):
    """The other end of the exchanges."""

    def grown(self, exchange: SimulatedExchange) -> None: ...

    def ended(self, exchange: SimulatedExchange, output: Output, t_ns: int) -> None: ...

    def refused(self, exchange: SimulatedExchange, t_ns: int) -> None: ...

    def lost(self, exchange: SimulatedExchange, why: str, t_ns: int) -> None: ...


class Common(NamedTuple):
    """All parts of a cell share these."""

    plan: Plan
    cell: int
    agenda: Agenda
    sink: Sink

    def random(self, what: str) -> Random:
        return self.plan.random(self.cell, what)


class KnownAnswer(NamedTuple):
    """A text that the engine answers to its prompt, word by word, unless one of the conditions of
    the request ends the answer before."""

    prompt: list[int]
    stop: tuple[str, ...]
    early_stop: EarlyStopping | None


def known_answer(plan: Plan, text: TaskText) -> KnownAnswer:
    conditions = text.conditions(has_tasks=True)
    early = conditions.get("early_stop")
    return KnownAnswer(
        encode_bytes(plan.prompt_of(text)),
        tuple(conditions.get("stop", ())),
        None
        if early is None
        else msgspec.json.decode(msgspec.json.encode(early), type=EarlyStopping),
    )


def _sampling(max_tokens: int, known: KnownAnswer | None) -> Sampling:
    if known is None:
        return Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Sampling(max_tokens=max_tokens, stop=known.stop, early_stopping=known.early_stop)


class SimulatedFrontend:
    """`_replicas`: the replicas that are there, by name; the router knows which of them take
    requests. `_watched`: by replica, the exchanges to look at after a step."""

    def __init__(
        self, common: Common, router: ReplicaRouter, wake: Callable[[Replica], None]
    ) -> None:
        """`wake` is called when a replica has heard something."""
        lags = common.plan.lags
        self.clients: Clients
        self.drained: Callable[[Replica, int], object]
        self._draining: set[Replica] = set()
        self._agenda = common.agenda
        self._faults = common.plan.faults
        self._detect = {way: Lag(lag) for way, lag in lags.detect_s.items()}
        self._growth = lags.growth
        self._signal = Lag(lags.signal_s)
        self._known = cache(partial(known_answer, common.plan))
        self._cell = common.cell
        self._random = common.random("frontend")
        self._router = router
        self._sink = common.sink
        self._wake = wake
        self._live: dict[str, SimulatedExchange] = {}
        self._client_ids: dict[str, str] = {}
        self._count = 0
        self._replicas: dict[str, Replica] = {}
        self._watched: dict[Replica, defaultdict[int, list[SimulatedExchange]]] = {}

    def add(self, replica: Replica) -> None:
        self._replicas[replica.name] = replica
        self._router.up(replica.name)
        self._watched[replica] = defaultdict(list)

    # Requests

    def arrive(self, exchange: SimulatedExchange, t_ns: int) -> None:
        if not self._router.names:
            self.clients.refused(exchange, t_ns)
            return
        self._count += 1
        exchange.engine_id = f"req-{self._cell}-{self._count}"
        exchange.has_arrived = True
        self._live[exchange.engine_id] = exchange
        self._client_ids[exchange.engine_id] = exchange.request_id
        self._dispatch(exchange, "arrived", t_ns)

    def _dispatch(
        self, exchange: SimulatedExchange, event: str, t_ns: int, why: str | None = None
    ) -> None:
        exchange.instance = self._router.route(exchange.prompted)
        exchange.replica = replica = self._replicas[exchange.instance.name]
        self._note(exchange, event, t_ns, why)
        text = exchange.spec.text
        known = None if text is None else self._known(text)
        request = AddRequest(
            request_id=exchange.engine_id,
            prompt_token_ids=exchange.prompted.prompt() if known is None else known.prompt,
            sampling=_sampling(exchange.spec.max_tokens, known),
            priority=exchange.spec.priority or 0,
        )
        replica.hear(t_ns, Added(request, FRONTEND, Context(exchange.engine_id)))
        self._wake(replica)

    # Leaving

    def leave(self, exchange: SimulatedExchange, t_ns: int, way: Way = _SEES) -> None:
        """The client has done its part; this is when the frontend sees it."""
        running = exchange.replica.scheduler.num_slots_used if exchange.replica else 0
        times = self._growth.times(self._growth.detect_request, running)
        detected_ns = t_ns + round(self._detect[way].draw(self._random) * times)
        act = self._asked_to_cancel if way is Way.CANCEL else self._disconnected
        # A request that is left on its way in is seen first, then its end.
        at_ns = max(detected_ns, exchange.arrives_ns + 1)
        self._agenda.put(at_ns, Kind.LEAVE, partial(act, exchange))

    def _asked_to_cancel(self, exchange: SimulatedExchange, t_ns: int) -> None:
        if exchange.has_arrived:  # else it was refused
            self._cancel(exchange, CancelReason.API, t_ns)

    def _disconnected(self, exchange: SimulatedExchange, t_ns: int) -> None:
        if not exchange.has_arrived or exchange.has_ended or exchange.has_left:
            return
        exchange.has_left = True
        self._note(exchange, "disconnected", t_ns, CancelReason.USER_DISCONNECT)
        if self._is_ignored(exchange, t_ns):
            return
        act = partial(self._cancel, exchange, CancelReason.USER_DISCONNECT)
        if self._faults.delay_abort:
            at_ns = t_ns + round(self._faults.delay_abort * NS)
            self._agenda.put(at_ns, Kind.LEAVE, act)
        else:
            act(t_ns)

    def _is_ignored(self, exchange: SimulatedExchange, t_ns: int) -> bool:
        faults = self._faults
        return (
            faults.ignore_disconnect
            or (faults.ignore_disconnect_unary and not exchange.is_stream)
            or (faults.ignore_disconnect_while_waiting and exchange.made_by(t_ns) == 0)
        )

    def _cancel(self, exchange: SimulatedExchange, reason: CancelReason, t_ns: int) -> None:
        if exchange.has_ended or exchange.cancel_reason is not None:
            return
        exchange.cancel_reason = reason
        self._note(exchange, "abort_sent", t_ns, reason)
        why = Cancellation(reason, DetectionMethod.CONNECTION, t_ns)
        replica = exchange.replica
        assert replica is not None
        heard_ns = t_ns + self._signal.draw(self._random)
        replica.hear(heard_ns, CancelCommand(exchange.engine_id, why))
        self._wake(replica)

    # Reports of replicas

    def foresee(self, replica: Replica, outputs: list[Output]) -> None:
        """The times at which tokens will be made are known when their step begins."""
        for output in outputs:
            exchange = self._live[output.request_id]
            if output.token_id is not None:
                exchange.grow(output.num_generated, replica.num_steps, replica.log)
            else:
                exchange.catch_up(output.num_generated, replica.log)

    def take(self, replica: Replica, stepped: Stepped, t_ns: int) -> None:
        """The report at the end of a step; one that dies in the step sends none."""
        record = stepped.record
        for output in stepped.outputs:
            if output.token_id is not None and output.num_generated == 1:
                self._look(self._live[output.request_id])
        if stepped.events:
            self._tell(stepped.events, replica)
        if record is not None:
            self._sink.step(record)
            for exchange in self._watched[replica].pop(record.step, ()):
                request = replica.request(exchange.engine_id)
                if request is not None:
                    exchange.catch_up(request.num_generated, replica.log)
                self._look(exchange)
        for output in stepped.outputs:
            if output.ending is not None:
                self._ended(self._live[output.request_id], output, t_ns)

    def _look(self, exchange: SimulatedExchange) -> None:
        """Checks it at the step with the last token before its user leaves, at the earliest."""
        wanted, replica = exchange.leaves_after, exchange.replica
        assert replica is not None
        if not wanted:
            return
        missing = wanted - len(exchange.made_ns)
        if missing <= 0:
            self.clients.grown(exchange)
        elif not exchange.has_ended and replica.request(exchange.engine_id) is not None:
            self._watched[replica][replica.num_steps + missing].append(exchange)

    def _tell(self, events: list[RequestEvent], replica: Replica) -> None:
        ids = self._client_ids
        self._sink.events(events, replica.name, ids)
        for event in events:
            if event.event == "blocks_freed":
                ids.pop(event.request_id, None)

    def _ended(self, exchange: SimulatedExchange, output: Output, t_ns: int) -> None:
        exchange.has_ended = True
        self._close(exchange, t_ns)
        self.clients.ended(exchange, output, t_ns)

    def _close(self, exchange: SimulatedExchange, t_ns: int) -> None:
        del self._live[exchange.engine_id]
        if exchange.instance is not None:
            exchange.instance.ended()
        if exchange.replica in self._draining:
            self._see_drained(exchange.replica, t_ns)

    def _note(
        self, exchange: SimulatedExchange, event: str, t_ns: int, reason: str | None = None
    ) -> None:
        replica = exchange.replica
        assert replica is not None
        noted = RequestEvent(
            t_ns=t_ns,
            event=event,
            request_id=exchange.engine_id,
            step=replica.num_steps,
            num_generated=0,
            reason=reason,
        )
        self._sink.events([noted], replica.name, {exchange.engine_id: exchange.request_id})

    # Replicas that go

    def drain(self, replica: Replica, t_ns: int) -> None:
        """It gets no more requests; `drained` is called when it has none."""
        self._router.down(replica.name)
        self._draining.add(replica)
        self._see_drained(replica, t_ns)

    def _see_drained(self, replica: Replica, t_ns: int) -> None:
        if not any(one.replica is replica for one in self._live.values()):
            self._draining.discard(replica)
            self._agenda.put(t_ns, Kind.OUTAGE, partial(self.drained, replica))

    def lose(self, replica: Replica, t_ns: int) -> None:
        """It is gone, with all that it had. A request without a token goes to another replica."""
        self._router.down(replica.name)
        self._draining.discard(replica)
        del self._replicas[replica.name], self._watched[replica]
        for exchange in [one for one in self._live.values() if one.replica is replica]:
            if exchange.cancel_reason is not None:
                self._end_aborted(exchange, t_ns)
            elif (
                exchange.made_by(t_ns)
                or not self._router.names
                or not exchange.move(MOST_RESUBMISSIONS)
            ):
                self._fail(exchange, t_ns)
            else:
                self._dispatch(exchange, "resubmitted", t_ns, "worker_lost")

    def _end_aborted(self, exchange: SimulatedExchange, t_ns: int) -> None:
        for event in ("removed", "blocks_freed"):
            self._note(exchange, event, t_ns, "worker_lost")
        self._note(exchange, "finished", t_ns, FinishReason.ABORT)
        self._forget(exchange, t_ns)
        self.clients.lost(exchange, WORKER_LOST, t_ns)

    def _fail(self, exchange: SimulatedExchange, t_ns: int) -> None:
        self._note(exchange, "finished", t_ns, FinishReason.ERROR)
        self._forget(exchange, t_ns)
        self.clients.lost(exchange, WORKER_LOST, t_ns)

    def _forget(self, exchange: SimulatedExchange, t_ns: int) -> None:
        exchange.has_ended = True
        self._close(exchange, t_ns)
        self._client_ids.pop(exchange.engine_id, None)
