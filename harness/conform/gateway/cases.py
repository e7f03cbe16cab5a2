"""The cases of a gateway before the bundled upstream, one for each dialect."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Final, Literal, NamedTuple

import gevent
import httpx

from harness.conform.case import LIMIT_S, Case, never_checked, reports
from harness.conform.finding import Evidence, Finding, found
from harness.conform.gateway.bench import (
    Answer,
    GatewayBench,
    Leave,
    together,
    why_ended,
    words_of,
)
from harness.conform.gateway.bill import find_bills, judge_bills
from harness.conform.gateway.crossing import Judged, judge
from harness.conform.gateway.crowd import SIZE, TOKENS, crowd_of
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.formatting import quantity
from harness.http_client import read_api_key
from harness.load.http2 import Http2Client, NoHttp2Error
from harness.load.session import LoadSession
from harness.records import Delivery, Outcome, RequestRow, Role, Way
from harness.run.recipes import PATHS
from harness.store.conform_result import Failure, Level
from harness.upstream.orders import Order
from harness.workload.target import DialectName

DIALECTS: Final = tuple(PATHS)
SILENT_MS: Final = 2500.0  # of a prefill
END_MS: Final = 1500.0  # from the last token to the usage
BRIEF_TOKENS: Final = 50  # of an answer that is left where nothing else waits for its end
SIBLINGS: Final = 4  # streams on a connection of HTTP/2
SIBLING_TOKENS: Final = 12
STALLED_S: Final = 2.0
WIDE_WORDS: Final = 4000  # characters, so that the buffers on the way fill
WHOLE_STREAMS: Final = 40
TAXED: Final = 8
BREAK_S: Final = 10.0  # within which a client must see that its answer was broken off
QUEUED_STEPS: Final = 15  # for which a request that was left may stay in the upstream's queue
MOST_TRIES: Final = 8  # of each case: the upstream has slots for as many in all cases at once
FRESH: Final = 6  # requests after the leaves
REMEDY: Final = "close the connection to the provider as soon as the client's closes"
BOUND: Final = (
    "the gateway closes its connection to the upstream at most 4 steps after the leave, of 100 ms, "
    "at the median of the tries, and at most 12 in each"
)
Check = Callable[[GatewayBench, DialectName], Judged | Finding]
Stage = Literal["first", "leaves", "one by one", "after all", "last"]


class GatewayCase(NamedTuple):
    """`stage`: "leaves": together with the others of its dialect; "last": it looks to a gateway as
    if its provider failed, for which it may be shut out."""

    case: Case
    dialect: DialectName
    stage: Stage
    check: Check


GATEWAY_CASES: Final[dict[str, GatewayCase]] = {}


def crossing(  # noqa: PLR0913  a declaration
    name: str,
    level: Level,
    requirement: str,
    *,
    wire: str,
    passes: str,
    why: str,
    remedy: str = REMEDY,
    stage: Stage = "leaves",
    caught: str = "",
    quick: bool = False,
    limit_s: float = LIMIT_S,
) -> Callable[[Check], Check]:
    """Declares the case in each dialect."""

    def declare(check: Check) -> Check:
        for dialect in DIALECTS:
            case = Case(
                id=f"{name}/{dialect}",
                level=level,
                requirement=requirement,
                wire=wire,
                passes=passes,
                methods="U",
                check=never_checked,
                needs=frozenset({"upstream"}),
                quick=quick,
                caught=reports(caught),
                why=why,
                limit_s=limit_s,
                remedy=remedy,
            )
            GATEWAY_CASES[case.id] = GatewayCase(case, dialect, stage, check)
        return check

    return declare


def _leaves(
    name: str,
    leave: Leave,
    requirement: str,
    *,
    wire: str,
    why: str,
    caught: str = "",
    quick: bool = False,
) -> None:
    def check(bench: GatewayBench, dialect: DialectName) -> Judged:
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


def _judge_leaves(bench: GatewayBench, dialect: DialectName, leave: Leave) -> Judged:
    found = bench.leave_each(bench.plans[dialect], leave, bench.tries, dialect)
    return judge(
        found, step_s=bench.step_s, declared=bench.declared, answer_s=bench.longest_s(leave)
    )


_leaves(
    "hop/fin-decode",
    Leave(way=Way.FIN),
    "A client that closes in the middle of a stream is let go upstream.",
    wire="A stream is read; 2.5 to 3.5 steps after the upstream's first token its connection is "
    "closed.",
    why="What the provider makes from then on, nobody reads and somebody pays.",
    quick=True,
    caught="BerriAI/litellm#30244",
)
_leaves(
    "hop/rst-decode",
    Leave(way=Way.RST),
    "A client that resets in the middle of a stream is let go upstream.",
    wire="As hop/fin-decode, with a reset.",
    why="A crashed application and a middle box reset; some servers look for one kind of close.",
)
_leaves(
    "hop/before-headers",
    Leave(Order(prefill_ms=SILENT_MS, headers="late"), after="slot", steps=3, way=Way.FIN),
    "A client that closes before the answer has headers is let go upstream.",
    wire="The upstream computes a prefill of 2.5 s and sends nothing; 3 to 4 steps into it the "
    "client closes.",
    why="A gateway that awaits the provider's head looks at nothing else meanwhile.",
)
_leaves(
    "hop/silent-prefill",
    Leave(Order(prefill_ms=SILENT_MS, headers="early"), after="headers", steps=3, way=Way.FIN),
    "A client that closes between the headers and the first token is let go upstream.",
    wire="The upstream sends its headers at once, and is silent for 2.5 s; 3 to 4 steps into that "
    "time the client closes.",
    why="A gateway that finds out by writing finds nothing out while there is nothing to write.",
    quick=True,
)
_leaves(
    "hop/unary",
    Leave(way=Way.FIN, delivery=Delivery.UNARY),
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
def last_token(bench: GatewayBench, dialect: DialectName) -> Judged:
    order = Order(end_ms=END_MS, tokens=3)
    return _judge_leaves(bench, dialect, Leave(order, after="stopped", steps=2, way=Way.FIN))


@crossing(
    "hop/half-close",
    Level.INFO,
    "What a gateway does with a client that closes its sending side only is said.",
    wire="A stream is read; the client shuts down its sending direction and reads on.",
    passes="not judged: on HTTP/1.1 a leave and a half-closed client that still reads look alike",
    why="Who serves the one serves a client that has left; who ends the other cuts a reader off.",
)
def half_close(bench: GatewayBench, dialect: DialectName) -> Judged:
    leave = Leave(way=Way.HALF_CLOSE, tokens=SIBLING_TOKENS)
    with bench.session(bench.plans[dialect]) as session:
        stream = bench.begin(session, leave)
        bench.await_turn(stream, leave)
        one = bench.see_leave(stream, leave, dialect)
        row = stream.row
    judged = judge(
        [one], step_s=bench.step_s, declared=bench.declared, answer_s=bench.longest_s(leave)
    )
    later = 0 if row is None else row.tokens_after_leaving or 0
    if one.stopped_s is not None:
        said = "it takes a half-closed client for one that has left"
    elif row is not None and row.tokens_read + later >= SIBLING_TOKENS:
        said = "it serves a half-closed client to the answer's end"
    else:
        said = "it cuts a half-closed client off, and lets the upstream go on"
    return judged._replace(finding=Finding(None, said, judged.finding.evidence))


@crossing(
    "hop/stalled",
    Level.SHOULD,
    "A client that reads no more and is then gone is let go upstream.",
    wire="A client with a small buffer reads nothing for 2 s of a stream of words of 4,000 "
    "characters, and then resets.",
    passes=BOUND,
    why="A gateway that waits until it can write does not look at who reads.",
)
def stalled(bench: GatewayBench, dialect: DialectName) -> Judged:
    leave = Leave(Order(pad=WIDE_WORDS), way=Way.STOP_READING)
    with bench.session(bench.plans[dialect]) as session:
        streams = [bench.begin(session, leave) for _ in range(bench.tries)]
        for stream in streams:
            bench.await_turn(stream, leave)
            bench.depart(stream, leave, dialect)
        gevent.sleep(STALLED_S)
        t0_ns = time.perf_counter_ns()
    crossings = [bench.see_crossing(stream, t0_ns, leave) for stream in streams]
    return judge(
        crossings,
        step_s=bench.step_s,
        declared=bench.declared,
        answer_s=bench.longest_s(leave),
    )


@crossing(
    "hop/h2-reset",
    Level.MUST,
    "RST_STREAM on HTTP/2 is a leave of one stream, and of no other.",
    wire="Four streams on one connection (prior knowledge, or ALPN); one of them is cancelled.",
    passes=f"{BOUND}; the other three are whole",
    why="On HTTP/2 a closed tab closes no connection.",
    stage="one by one",
)
def h2_reset(bench: GatewayBench, dialect: DialectName) -> Judged:
    leave = Leave(tokens=BRIEF_TOKENS)
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
        one = bench.see_leave(first, leave, dialect)
        wrong = _unwhole([stream.join(SIBLING_TOKENS * bench.step_s + 5) for stream in others])
    judged = judge(
        [one], step_s=bench.step_s, declared=bench.declared, answer_s=bench.longest_s(leave)
    )
    if wrong is None:
        return judged
    said = f"the other streams of the connection broke: {wrong}"
    return judged._replace(finding=judged.finding._replace(failure=Failure.HARM, reason=said))


def _unwhole(rows: Sequence[RequestRow | None]) -> str | None:
    for row in rows:
        if row is None:
            return "no end"
        if row.outcome is not Outcome.COMPLETED:
            return why_ended(row)
    return None


@crossing(
    "hop/whole",
    Level.MUST,
    "A client that stays gets the whole stream.",
    wire="40 streams of 3 tokens, side by side, from an upstream that sends its headers at once.",
    passes="each stream has all its tokens and its end",
    why="All other cases rest on it: a gateway that cuts streams lets everybody go.",
    remedy="pass on what the provider sends until it ends",
    stage="first",
    quick=True,
)
def whole(bench: GatewayBench, dialect: DialectName) -> Finding:
    orders = [Order(headers="early")] * WHOLE_STREAMS
    answers = bench.ask_each(bench.plans[dialect], orders)
    bad = [one for one in answers if not one.is_whole]
    if refused := [one for one in bad if one.row.status_code not in (None, httpx.codes.OK)]:
        raise CannotDecideError(f"a request was not served: {why_ended(refused[0].row)}")
    said = None
    if bad:
        said = f"{len(bad)} of {len(answers)} streams were cut: {why_ended(bad[0].row)}"
    return found("all streams were whole", said, {"cut": float(len(bad))}, Failure.HARM)


@crossing(
    "hop/reuse",
    Level.MUST,
    "The request after a leave gets its own answer.",
    wire="Clients leave streams in the middle; right after each a new client asks for five tokens.",
    passes="each new client gets these five tokens, from the first",
    why="A connection that is used again too soon brings the rest of an answer that was left.",
    remedy="use a connection again only when its answer has been read to its end",
    stage="one by one",
)
def reuse(bench: GatewayBench, dialect: DialectName) -> Finding:
    leave = Leave(way=Way.FIN, tokens=BRIEF_TOKENS)
    plan, tokens = bench.plans[dialect], 5

    def one(session: LoadSession) -> Answer:
        stream = bench.begin(session, leave)
        bench.await_turn(stream, leave)
        bench.depart(stream, leave, dialect)
        return bench.ask(session, Order(), tokens)

    with bench.session(plan) as session:
        answers = together([partial(one, session)] * bench.tries)
    wrong = next(filter(None, (_wrong_text(answer, tokens) for answer in answers)), None)
    return found("each client got its own answer", wrong, {}, Failure.HARM)


def _check_limit(answers: Sequence[Answer]) -> None:
    """Raises CannotDecideError."""
    if limited := [one for one in answers if one.is_limited]:
        raise CannotDecideError(
            f"the gateway refuses a request: {why_ended(limited[0].row)}: raise its rate limit for "
            "this check, if it has one"
        )


def _wrong_text(answer: Answer, tokens: int) -> str | None:
    _check_limit([answer])
    if not answer.is_whole:
        return f"the request after a leave failed: {why_ended(answer.row)}"
    text = (answer.row.answer or "").split()
    if text == words_of(tokens):
        return None
    return f"the request after a leave got {' '.join(text)[:60]!r} for {words_of(tokens)}"


@crossing(
    "hop/cut-is-no-end",
    Level.MUST,
    "An answer that the provider breaks off does not look whole.",
    wire="The upstream breaks streams after three tokens: by a reset, and by a close without the "
    "answer's end. Answers in one piece it resets in the middle of their body.",
    passes="the client sees an error or a broken connection, or is given a whole answer",
    why="A cut answer that ends cleanly is stored, billed and shown as the answer.",
    remedy="end a stream whose provider broke off with an error, or break the connection",
    stage="last",
)
def cut_is_no_end(bench: GatewayBench, dialect: DialectName) -> Finding:
    plan = bench.plans[dialect]
    ways = [
        (f"a {delivery} answer, by {words}", Order(act=act, after=3), delivery)
        for act, words, delivery in (
            ("break-reset", "a reset", Delivery.STREAM),
            ("break-end", "a close", Delivery.STREAM),
            ("break-reset", "a reset", Delivery.UNARY),
        )
    ]
    with bench.session(plan) as session:
        seen = together([partial(_seen_by_client, bench, session, *one[1:]) for one in ways])
    wrong = [f"{name} {said}" for (name, *_), said in zip(ways, seen, strict=True) if said]
    return found("each break is seen by the client", "; ".join(wrong) or None, {}, Failure.HARM)


def _seen_by_client(
    bench: GatewayBench, session: LoadSession, order: Order, delivery: Delivery
) -> str | None:
    """What is wrong with an answer that the upstream broke off. Raises CannotDecideError if it did
    not."""
    stream = bench.start(session, order, SIBLING_TOKENS, delivery=delivery, role=Role.CANARY)
    row = stream.join(BREAK_S)
    requests = bench.ledger.over(stream.spec.request_id, 1.0)
    if not any(one.why == "told" for one in requests):
        why = "no end" if row is None else why_ended(row)
        raise CannotDecideError(f"a request that was to be broken off was not served: {why}")
    if row is None:
        return "leaves its client waiting"
    answer = Answer(row, requests)
    return "looks whole" if answer.is_whole and not _is_all_there(answer) else None


def _is_all_there(answer: Answer) -> bool:
    return (answer.row.answer or "").split() == words_of(SIBLING_TOKENS)


@crossing(
    "hop/tax",
    Level.INFO,
    "What a gateway adds to each token is said.",
    wire="Eight streams of one token, one after the other.",
    passes="not judged; the reason says the milliseconds on the way in and on the way out",
    why="It is the price of a gateway that everybody pays.",
    stage="one by one",
)
def tax(bench: GatewayBench, dialect: DialectName) -> Finding:
    ways_in, ways_out = [], []
    with bench.session(bench.plans[dialect]) as session:
        for _ in range(TAXED):
            answer = bench.ask(session, Order(), 1)
            if not answer.is_whole or not answer.requests:
                raise CannotDecideError(f"a stream was not whole: {why_ended(answer.row)}")
            row, request = answer.row, answer.requests[0]
            ways_in.append((request.arrived_ns - row.sent_ns) / 1e6)
            if row.first_token_ns is not None and request.first_token_ns is not None:
                ways_out.append((row.first_token_ns - request.first_token_ns) / 1e6)
    figures: Evidence = {"in_ms": round(median(ways_in), 2), "out_ms": round(median(ways_out), 2)}
    said = f"{figures['in_ms']} ms on the way in, {figures['out_ms']} ms on the way out"
    return Finding(None, said, figures)


@crossing(
    "hop/crowd",
    Level.MUST,
    "Twenty clients that leave at once are let go upstream, and the next one is served.",
    wire="20 streams run and are closed at the same moment, twice; a new client asks after each.",
    passes=f"{BOUND}; the new clients are served",
    why="A front end that restarts drops all its streams in one moment.",
    stage="one by one",
    quick=True,
)
def crowd(bench: GatewayBench, dialect: DialectName) -> Judged:
    seen = crowd_of(bench, dialect)
    _check_limit(seen.after)
    judged = judge(
        seen.crossings,
        step_s=bench.step_s,
        declared=bench.declared,
        answer_s=TOKENS * bench.step_s,
    )
    if all(one.is_whole for one in seen.after):
        return judged
    bad = next(one for one in seen.after if not one.is_whole)
    said = f"a client that came after the leaves was not served: {why_ended(bad.row)}"
    return judged._replace(finding=judged.finding._replace(failure=Failure.HARM, reason=said))


@crossing(
    "hop/connections",
    Level.MUST,
    "The connections to the provider come back.",
    wire="Twice, 20 clients leave at once; when all that they asked for is over, the upstream "
    "counts its connections.",
    passes="the second time adds at most 10 open connections to the first time's",
    why="A connection that is neither closed nor used again is lost; a thousand of them are all "
    "file handles there are.",
    remedy="close a connection whose answer is not read to its end, or give it back to the pool",
    stage="one by one",
)
def connections(bench: GatewayBench, dialect: DialectName) -> Finding:
    seen = crowd_of(bench, dialect)
    before, after = seen.connections
    more, half = after - before, SIZE / 2
    figures: Evidence = {"after_first": float(before), "after_second": float(after)}
    if seen.memory_mb:
        figures["memory"] = ", then ".join(f"{one:g} MB" for one in seen.memory_mb)
    said = f"{after} connections are open at rest after 40 leaves, {before} after 20"
    return found(said, said if more > half else None, figures, Failure.NEVER)


@crossing(
    "hop/gauges",
    Level.SHOULD,
    "The gateway's gauges read at rest as before the leaves.",
    wire="The gateway's metrics page is read before, between and after two times 20 leaves.",
    passes="no gauge has grown each time by at least half as much as clients have left",
    why="Gateways choose a provider by the requests that they think are in flight there.",
    remedy="lower the gauges on each path on which a request ends",
    stage="one by one",
)
def gauges(bench: GatewayBench, dialect: DialectName) -> Finding:
    seen = crowd_of(bench, dialect)
    if isinstance(seen.gauges, Exception):
        raise seen.gauges
    first, second, third = seen.gauges
    half = SIZE / 2
    grown = [
        f"{name} read {first[name]:g}, {second[name]:g} after 20 leaves, and {third[name]:g} "
        "after 40"
        for name in first
        if name in second
        and name in third
        and second[name] - first[name] >= half
        and third[name] - second[name] >= half
    ]
    return found(
        f"{quantity(len(first), 'gauges')} read as before",
        "; ".join(grown) or None,
        {"gauges": float(len(first))},
        Failure.NEVER,
    )


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
def queue(bench: GatewayBench, dialect: DialectName) -> Judged:
    leave = Leave(after="arrived", steps=3, way=Way.FIN, tokens=BRIEF_TOKENS)
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
    return judge(
        crossings,
        step_s=bench.step_s,
        declared=bench.declared,
        answer_s=bench.longest_s(leave),
    )


@crossing(
    "bill/left",
    Level.MUST,
    "A bill is between what came to the client and what was made for it.",
    wire="Whole and left requests, one after the other; before and after each the gateway is asked "
    "what was used.",
    passes="for each request: delivered tokens <= billed tokens <= tokens that the upstream made",
    why="Who reads the answer and closes before its usage pays nothing; who leaves early pays for "
    "all that was to come (GHSA-724j-f2pf-phf7).",
    remedy="count the tokens that are passed on, and bill for them when there is no usage",
    stage="one by one",
    limit_s=180.0,
)
def bill(bench: GatewayBench, dialect: DialectName) -> Finding:
    return judge_bills(find_bills(bench, dialect))


@crossing(
    "hop/no-retry",
    Level.MUST,
    "Nothing is asked again for a client that has left.",
    wire="The upstream's log is searched for the clients that left in all cases of this dialect "
    "before; if there were none, some leave now.",
    passes="no request of a client that has left arrives a second time after that",
    why="A gateway that takes the leave for a failure of the provider asks again, for nobody.",
    remedy="end the retries of a request when its client is gone",
    stage="after all",
    caught="BerriAI/litellm#36123",
)
def no_retry(bench: GatewayBench, dialect: DialectName) -> Finding:
    left = _some_left(bench, dialect)
    again = {name: bench.asked_again(name, t0_ns) for name, t0_ns in left.items()}
    asked = [name for name, times in again.items() if times]
    said = None
    if asked:
        more = sum(map(len, again.values()))
        said = (
            f"for {len(asked)} of {len(left)} clients that had left, the upstream was asked again "
            f"({more} requests)"
        )
    figures: Evidence = {"left": float(len(left)), "asked_again": float(len(asked))}
    return found(
        f"{len(left)} clients left, and nothing was asked again", said, figures, Failure.NEVER
    )


def _some_left(bench: GatewayBench, dialect: DialectName) -> dict[str, int]:
    if not bench.left.get(dialect):
        leave = Leave(way=Way.FIN, tokens=BRIEF_TOKENS)
        bench.leave_each(bench.plans[dialect], leave, SIZE, dialect)
    return bench.left[dialect]


@crossing(
    "hop/no-penalty",
    Level.MUST,
    "Nobody is punished for the clients that have left.",
    wire="After all other cases of the dialect in which clients leave (alone: after some leaves), "
    "six new clients ask.",
    passes="each is served, and its request arrives at the upstream",
    why="A breaker that counts leaves as failures of the provider shuts it out for everybody.",
    remedy="count a leave neither as a failure nor as a success of the provider",
    stage="after all",
)
def no_penalty(bench: GatewayBench, dialect: DialectName) -> Finding:
    left = len(_some_left(bench, dialect))
    answers = bench.ask_each(bench.plans[dialect], [Order()] * FRESH)
    bad = [one for one in answers if not one.is_whole or not one.requests]
    _check_limit(bad)
    said = None
    if bad:
        why = why_ended(bad[0].row) if not bad[0].is_whole else "it did not arrive"
        said = f"after {left} leaves {len(bad)} of {FRESH} clients were not served: {why}"
    return found(f"all were served after {left} leaves", said, {"left": float(left)}, Failure.HARM)
