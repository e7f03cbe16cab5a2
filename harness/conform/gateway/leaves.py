"""How clients leave a gateway: in which phase of their request, and in which way."""

import time
from collections.abc import Sequence
from typing import Final

import gevent
import httpx

from harness.client.http2 import Http2Client, NoHttp2Error
from harness.conform.finding import Finding
from harness.conform.gateway.bench import GatewayBench, LeaveSpec, together, why_ended
from harness.conform.gateway.case import BOUND, BRIEF_TOKENS, crossing
from harness.conform.gateway.crossing import Crossing, JudgedCrossing
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.http_client import read_api_key
from harness.records import Delivery, Outcome, RequestRow, Way
from harness.store.conform_result import Failure, Level
from harness.upstream.orders import Order
from harness.workload.target import DialectName

SILENT_MS: Final = 2500.0  # of a prefill
END_MS: Final = 1500.0  # from the last token to the usage
SIBLINGS: Final = 4  # streams on a connection of HTTP/2
SIBLING_TOKENS: Final = 12
STALLED_S: Final = 2.5
STALLED_TRIES: Final = 2
STALLED_TOKENS: Final = 80  # half of them after the leave
WIDE_WORDS: Final = 400_000  # characters: 10 MB in that time, more than a socket's buffer takes
QUEUED_STEPS: Final = 15  # for which a request that was left may stay in the upstream's queue
BEFORE_HEADERS: Final = LeaveSpec(
    Order(prefill_ms=SILENT_MS, headers="late"), after="slot", steps=3, way=Way.FIN
)


def _leaves(
    name: str,
    leave: LeaveSpec,
    requirement: str,
    *,
    wire: str,
    why: str,
    caught: str = "",
    quick: bool = False,
) -> None:
    def check(bench: GatewayBench, dialect: DialectName) -> JudgedCrossing:
        return _judge_leaves(bench, dialect, leave)

    crossing(
        name,
        Level.MUST,
        requirement,
        wire=f"{wire} All tries run side by side.",
        passes=BOUND,
        why=why,
        quick=quick,
        caught=caught,
    )(check)


def _judge_leaves(bench: GatewayBench, dialect: DialectName, leave: LeaveSpec) -> JudgedCrossing:
    found = bench.leave_each(bench.plans[dialect], leave, bench.tries, dialect)
    return bench.judge(found, leave)


_leaves(
    "hop/fin-decode",
    LeaveSpec(way=Way.FIN),
    "A client that closes in the middle of a stream is let go upstream.",
    wire="A stream is read; 2.5 to 3.5 steps after the upstream's first token its connection is "
    "closed.",
    why="What the provider makes from then on, nobody reads and somebody pays.",
    quick=True,
    caught="BerriAI/litellm#30244",
)
_leaves(
    "hop/rst-decode",
    LeaveSpec(way=Way.RST),
    "A client that resets in the middle of a stream is let go upstream.",
    wire="As hop/fin-decode, with a reset.",
    why="A crashed application and a middle box reset; some servers look for one kind of close.",
)
_leaves(
    "hop/before-headers",
    BEFORE_HEADERS,
    "A client that closes before the answer has headers is let go upstream.",
    wire="The upstream computes a prefill of 2.5 s and sends nothing; 3 to 4 steps into it the "
    "client closes.",
    why="A gateway that awaits the provider's head looks at nothing else meanwhile.",
)
_leaves(
    "hop/silent-prefill",
    LeaveSpec(Order(prefill_ms=SILENT_MS, headers="early"), after="headers", steps=3, way=Way.FIN),
    "A client that closes between the headers and the first token is let go upstream.",
    wire="The upstream sends its headers at once, and is silent for 2.5 s; 3 to 4 steps into that "
    "time the client closes.",
    why="A gateway that finds out by writing finds nothing out while there is nothing to write.",
    quick=True,
)
_leaves(
    "hop/unary",
    LeaveSpec(way=Way.FIN, delivery=Delivery.UNARY),
    "A client that closes while it waits for a whole answer is let go upstream.",
    wire="An answer in one piece is asked for; 2.5 to 3.5 steps after the upstream's first token "
    "the client closes.",
    why="Half of all requests do not stream, and nothing is written to them before their end.",
    quick=True,
)


@crossing(
    "hop/last-token",
    Level.SHOULD,
    "A client that closes after the last token and before the usage is let go upstream.",
    wire="The upstream waits 1.5 s between the last token and its usage; 2 to 3 steps into that "
    "time the client closes.",
    passes=BOUND,
    why="A client that stops reading at the finish reason leaves here, each time.",
)
def last_token(bench: GatewayBench, dialect: DialectName) -> JudgedCrossing:
    order = Order(end_ms=END_MS, tokens=3)
    return _judge_leaves(bench, dialect, LeaveSpec(order, after="stopped", steps=2, way=Way.FIN))


@crossing(
    "hop/half-close",
    Level.INFO,
    "What a gateway does with a client that closes its sending side only is reported.",
    wire="A stream is read; the client shuts down its sending direction and reads on.",
    passes="not judged: on HTTP/1.1 a leave and a half-closed client that still reads look alike",
    why="A gateway that serves such a client also serves clients that have left; one that ends its "
    "request cuts a reader off.",
)
def half_close(bench: GatewayBench, dialect: DialectName) -> JudgedCrossing:
    leave = LeaveSpec(way=Way.HALF_CLOSE, tokens=SIBLING_TOKENS)
    with bench.session(bench.plans[dialect]) as session:
        stream = bench.begin(session, leave)
        bench.await_turn(stream, leave)
        one = bench.see_leave(stream, leave, dialect)
        row = stream.row
    judged = bench.judge([one], leave)
    later = 0 if row is None else row.tokens_after_leaving or 0
    if one.stopped_s is not None:
        said = "it takes a half-closed client for one that has left"
    elif row is not None and row.tokens_read + later >= SIBLING_TOKENS:
        said = "it serves a half-closed client to the answer's end"
    else:
        said = "it cuts a half-closed client off, and lets the upstream run to the answer's end"
    return judged._replace(finding=Finding(None, said, judged.finding.evidence))


@crossing(
    "hop/stalled",
    Level.SHOULD,
    "A client that reads no more and is then gone is let go upstream.",
    wire="A client with a small buffer stops reading a stream of words of 400,000 characters, 4 MB "
    "a second, and resets 2.5 s later.",
    passes=BOUND,
    why="A gateway that waits until it can write does not look at who reads.",
    stage="one by one",
)
def stalled(bench: GatewayBench, dialect: DialectName) -> JudgedCrossing:
    leave = LeaveSpec(Order(pad=WIDE_WORDS), way=Way.STOP_READING, tokens=STALLED_TOKENS)

    def one() -> Crossing:
        with bench.session(bench.plans[dialect]) as session:
            stream = bench.begin(session, leave)
            bench.await_turn(stream, leave)
            bench.depart(stream, leave, dialect)
            gevent.sleep(STALLED_S)
            t0_ns = time.perf_counter_ns()
        return bench.see_crossing(stream, t0_ns, leave)

    crossings = together([one] * min(STALLED_TRIES, bench.tries))
    judged = bench.judge(crossings, leave)
    unsent = [one.request.unsent_bytes or 0 for one in crossings if one.request is not None]
    evidence = judged.finding.evidence | {"unsent_mb": round(max(unsent) / 1e6, 1)}
    return judged._replace(finding=judged.finding._replace(evidence=evidence))


@crossing(
    "hop/h2-reset",
    Level.MUST,
    "RST_STREAM on HTTP/2 is a leave of one stream, and of no other.",
    wire="Four streams on one connection (prior knowledge, or ALPN); one of them is cancelled.",
    passes=f"{BOUND}; the other three are whole",
    why="On HTTP/2 a closed tab closes no connection.",
    stage="one by one",
)
def h2_reset(bench: GatewayBench, dialect: DialectName) -> JudgedCrossing:
    leave = LeaveSpec(tokens=BRIEF_TOKENS)
    with bench.session(bench.plans[dialect]) as session:
        plan = session.plan
        client = Http2Client(plan, api_key=read_api_key(plan.api_key_env), wire=bench.wire)
        session.client = client
        try:
            client.connection(client.frontend_of(0))
        except NoHttp2Error as error:
            raise RefusedError(f"the gateway speaks no HTTP/2: {error}") from error
        except httpx.TransportError as error:
            raise CannotDecideError(f"no connection for HTTP/2: {error}") from error
        first = bench.begin(session, leave)
        orders = [Order()] * (SIBLINGS - 1)
        others = [bench.start(session, order, SIBLING_TOKENS) for order in orders]
        bench.await_turn(first, leave)
        t0_ns = bench.depart(first, leave, dialect)
        one = bench.see_crossing(first, t0_ns, leave)
        rows = [stream.join(SIBLING_TOKENS * bench.step_s + 5) for stream in others]
    wrong = broken_after(t0_ns, rows)
    judged = bench.judge([one], leave)
    if wrong is None:
        return judged
    said = f"the other streams of the connection broke: {wrong}"
    return judged._replace(finding=judged.finding._replace(failure=Failure.HARM, reason=said))


def broken_after(t0_ns: int, rows: Sequence[RequestRow | None]) -> str | None:
    """Why a stream is not whole, if one is not. None in `rows`: it has not ended. Raises
    CannotDecideError if one had broken before t0: then the leave is not the cause."""
    broken = [row for row in rows if row is None or row.outcome is not Outcome.COMPLETED]
    for row in broken:
        if row is not None and row.ended_ns <= t0_ns:
            raise CannotDecideError(
                f"another stream of the connection broke before the leave: {why_ended(row)}"
            )
    if not broken:
        return None
    return "no end" if broken[0] is None else why_ended(broken[0])


@crossing(
    "hop/queue",
    Level.MUST,
    "A client that closes while its request waits upstream is let go there.",
    wire="All slots of the upstream are taken; 3 to 4 steps after requests have arrived there, "
    "their clients close.",
    passes=BOUND,
    why="A request that waits for nobody takes a slot later, from somebody who is still there.",
    stage="one by one",
)
def queue(bench: GatewayBench, dialect: DialectName) -> JudgedCrossing:
    leave = LeaveSpec(after="arrived", steps=3, way=Way.FIN, tokens=BRIEF_TOKENS)
    with bench.full_slots(), bench.session(bench.plans[dialect]) as session:
        streams = [bench.begin(session, leave) for _ in range(bench.tries)]
        for stream in streams:
            bench.await_turn(stream, leave)
        times_ns = [bench.depart(stream, leave, dialect) for stream in streams]
        for stream in streams:
            bench.ledger.over(stream.spec.request_id, QUEUED_STEPS * bench.step_s / len(streams))
    crossings = [
        bench.see_crossing(stream, t0_ns, leave)
        for stream, t0_ns in zip(streams, times_ns, strict=True)
    ]
    return bench.judge(crossings, leave)
