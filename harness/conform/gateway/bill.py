"""The bill: what a gateway says was used, held against what came to the client and what was made.

Requests run one after the other: what the gateway's sum grows by is the bill of the request.

    delivered <= billed <= generated
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import gevent

from harness.client.session import asking_client
from harness.conform.finding import Evidence, Finding, found
from harness.conform.gateway.bench import GatewayBench, LeaveSpec
from harness.conform.gateway.usage import usage_reader
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.formatting import quantity
from harness.records import Delivery, RequestRow, Role, Way
from harness.store.conform_result import Failure
from harness.upstream.orders import Order
from harness.workload.target import DialectName

_WHOLE_TOKENS: Final = 6
_LEFT_TOKENS: Final = 30
_SILENT_MS: Final = 1500.0
_END_MS: Final = 1500.0
_PAGE_S: Final = 10.0
_LOOK_S: Final = 0.2
_PLAIN: Final = Order(words="plain")  # a gateway may count the tokens by itself

# What is billed for, and how its client leaves; None: it stays.
_BILLED: Final[Mapping[str, tuple[Delivery, LeaveSpec | None]]] = {
    "a whole stream": (Delivery.STREAM, None),
    "a whole answer in one piece": (Delivery.UNARY, None),
    "a stream that was left": (
        Delivery.STREAM,
        LeaveSpec(_PLAIN, way=Way.FIN, tokens=_LEFT_TOKENS),
    ),
    "a stream that was left in a silent prefill": (
        Delivery.STREAM,
        LeaveSpec(
            Order(prefill_ms=_SILENT_MS, words="plain"),
            after="slot",
            way=Way.FIN,
            tokens=_WHOLE_TOKENS,
        ),
    ),
    "a stream that was left before its usage": (
        Delivery.STREAM,
        LeaveSpec(
            Order(end_ms=_END_MS, words="plain"),
            after="stopped",
            way=Way.FIN,
            tokens=_WHOLE_TOKENS,
        ),
    ),
    "an answer in one piece that was left": (
        Delivery.UNARY,
        LeaveSpec(_PLAIN, way=Way.FIN, delivery=Delivery.UNARY, tokens=_LEFT_TOKENS),
    ),
}


class Bill(NamedTuple):
    """Tokens of an answer."""

    what: str
    delivered: int
    billed: int
    generated: int

    @property
    def wrong(self) -> str | None:
        if self.billed > self.generated:
            more = quantity(self.billed - self.generated, "tokens")
            return f"{self.what} is billed for {more} more than were made ({self._said})"
        if self.billed < self.delivered:
            fewer = quantity(self.delivered - self.billed, "tokens")
            return f"{self.what} is billed for {fewer} less than the client got ({self._said})"
        return None

    @property
    def _said(self) -> str:
        return f"{self.delivered} delivered, {self.billed} billed, {self.generated} made"


def judge_bills(bills: list[Bill]) -> Finding:
    figures: Evidence = {}
    for one in bills:
        figures[one.what] = f"{one.delivered} delivered, {one.billed} billed, {one.generated} made"
    wrong = [one.wrong for one in bills if one.wrong is not None]
    over = sum(max(0, one.billed - one.generated) for one in bills)
    under = sum(max(0, one.delivered - one.billed) for one in bills)
    figures |= {"overbilled_tokens": float(over), "unbilled_tokens": float(under)}
    return found("each bill is between both", "; ".join(wrong) or None, figures, Failure.HARM)


def find_bills(bench: GatewayBench, dialect: DialectName) -> list[Bill]:
    """Raises RefusedError, and CannotDecideError if the gateway's sum shows nothing, or a red may
    hide behind what could not be tried."""
    source = bench.usage
    if source is None:
        raise RefusedError("nothing says what was billed (--usage ADAPTER)")
    bills, untried = [], []
    keyless = bench.plan.model_copy(update={"headers": {}, "api_key_env": None})
    asked = bench.plan if source.needs_key(bench.plan.url) else keyless
    with asking_client(asked, _PAGE_S) as client:
        read = usage_reader(source, bench.plan.url, client)
        before = _settled(read, source.settle_s)
        for what, (delivery, leave) in _BILLED.items():
            try:
                delivered, generated = _served(bench, dialect, delivery, leave)
            except CannotDecideError as error:
                untried.append(f"{what}: {error}")
                continue
            after = _settled(read, source.settle_s)
            if after < before:
                raise CannotDecideError(
                    f"{source.where} shows fewer tokens than before {what}: only the newest "
                    "requests stand there"
                )
            bills.append(Bill(what, delivered, after - before, generated))
            before = after
        if not before:
            raise CannotDecideError(
                f"{source.where} shows no tokens at all after {len(bills)} requests: is it the "
                "right place, and are its keys right?"
            )
    if untried and not any(one.wrong for one in bills):
        raise CannotDecideError("; ".join(untried))
    return bills


def _settled(read: Callable[[], int], settle_s: float) -> int:
    """The sum, when it has not changed for this time."""
    seen, since_s = read(), time.monotonic()
    while time.monotonic() - since_s < settle_s:
        gevent.sleep(_LOOK_S)
        if (now := read()) != seen:
            seen, since_s = now, time.monotonic()
    return seen


def _served(
    bench: GatewayBench, dialect: DialectName, delivery: Delivery, leave: LeaveSpec | None
) -> tuple[int, int]:
    """Tokens that came to the client, and that were made for it."""
    with bench.session(bench.plans[dialect]) as session:
        if leave is None:
            answer = bench.ask(session, _PLAIN, _WHOLE_TOKENS, delivery=delivery)
            if not answer.is_whole or not answer.requests:
                raise CannotDecideError("a request whose bill is to be read was not served")
            return _words(answer.row), sum(one.tokens for one in answer.requests)
        stream = bench.begin(session, leave, role=Role.CANARY)
        bench.await_turn(stream, leave)
        t0_ns = bench.depart(stream, leave, dialect)
        crossing = bench.see_crossing(stream, t0_ns, leave)
    if crossing.request is None:
        raise CannotDecideError("a request whose bill is to be read did not arrive")
    return 0 if stream.row is None else _words(stream.row), crossing.request.tokens


def _words(row: RequestRow) -> int:
    """The words that came to the client: each is a token, however a gateway cuts the stream."""
    return len((row.answer or "").split())
