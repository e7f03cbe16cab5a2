"""What leaves do to the clients that come after them, and to the gateway itself."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import gevent

from harness.client.session import LoadSession
from harness.conform.finding import Evidence, Finding, found
from harness.conform.gateway.bench import (
    GatewayAnswer,
    GatewayBench,
    Gauges,
    LeaveSpec,
    together,
    why_ended,
    words_of,
)
from harness.conform.gateway.case import BOUND, BRIEF_TOKENS, crossing
from harness.conform.gateway.crossing import JudgedCrossing
from harness.conform.gateway.crowd import LEAVE, SIZE, TIMES, crowd_of
from harness.conform.gateway.leaves import BEFORE_HEADERS
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.formatting import quantity
from harness.records import Way
from harness.store.conform_result import Failure, Level
from harness.upstream.orders import Order
from harness.workload.target import DialectName

FRESH: Final = 6  # requests after the leaves
RETRY_S: Final = 3.0  # after a leave: the longest until a gateway that backs off asks again


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
    leave = LeaveSpec(way=Way.FIN, tokens=BRIEF_TOKENS)
    plan, tokens = bench.plans[dialect], 5

    def one(session: LoadSession) -> GatewayAnswer:
        stream = bench.begin(session, leave)
        bench.await_turn(stream, leave)
        bench.depart(stream, leave, dialect)
        return bench.ask(session, Order(), tokens)

    with bench.session(plan) as session:
        answers = together([partial(one, session)] * bench.tries)
    wrong = next(filter(None, (_wrong_text(answer, tokens) for answer in answers)), None)
    return found("each client got its own answer", wrong, {}, Failure.HARM)


def _check_limit(answers: Sequence[GatewayAnswer]) -> None:
    """Raises CannotDecideError."""
    if limited := [one for one in answers if one.is_limited]:
        raise CannotDecideError(
            f"the gateway refuses a request: {why_ended(limited[0].row)}: either it limits how "
            "much is asked (raise that limit for this check), or it shuts the provider out for "
            "the clients that have left"
        )


def _wrong_text(answer: GatewayAnswer, tokens: int) -> str | None:
    _check_limit([answer])
    if not answer.is_whole:
        return f"the request after a leave failed: {why_ended(answer.row)}"
    if answer.has_all(tokens):
        return None
    got = " ".join((answer.row.answer or "").split())[:60]
    return f"the request after a leave got {got!r} for {' '.join(words_of(tokens))!r}"


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
def crowd(bench: GatewayBench, dialect: DialectName) -> JudgedCrossing:
    seen = crowd_of(bench, dialect)
    _check_limit(seen.after)
    judged = bench.judge(seen.crossings, LEAVE)
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
    why="A connection that is neither closed nor used again is lost; a thousand lost connections "
    "use up the file handles.",
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
    open_ones = quantity(after, "connections")
    said = f"{open_ones} stayed open at rest after 40 leaves, {before} after 20"
    return found(said, said if more > half else None, figures, Failure.NEVER)


@crossing(
    "hop/gauges",
    Level.SHOULD,
    "The gateway's gauges read at rest as before the leaves.",
    wire="The gateway's metrics page is read at rest before, between and after two times 20 "
    "clients that stay; then so with two times 20 that leave.",
    passes="no gauge has grown each time by at least half as much as clients have left; a gauge "
    "that clients who stay raise as well is a sum, and left out",
    why="Gateways choose a provider by the requests that they think are in flight there.",
    remedy="lower the gauges on each path on which a request ends",
    stage="one by one",
    needs="gauges",
)
def gauges(bench: GatewayBench, dialect: DialectName) -> Finding:
    seen = crowd_of(bench, dialect)
    if isinstance(seen.gauges, Exception):
        raise seen.gauges
    return judge_gauges(staying=seen.gauges[: TIMES + 1], leaving=seen.gauges[TIMES:])


def judge_gauges(staying: Sequence[Gauges], leaving: Sequence[Gauges]) -> Finding:
    """Each: before, between and after the two times 20 clients. Raises RefusedError if nothing but
    sums is shown."""
    sums = _grown(staying)
    judged = [name for name in leaving[0] if name not in sums]
    if not judged:
        raise RefusedError("the gateway's metrics page shows no gauge of requests, but only sums")
    grown = [
        f"{name} read {first:g}, {second:g} after 20 leaves, and {third:g} after 40"
        for name, (first, second, third) in _grown(leaving).items()
        if name in judged
    ]
    return found(
        f"none of {quantity(len(judged), 'gauges')} grew each time by {SIZE // 2} or more",
        "; ".join(grown) or None,
        {"gauges": float(len(judged)), "sums": float(len(leaving[0]) - len(judged))},
        Failure.NEVER,
    )


def _grown(read: Sequence[Gauges]) -> dict[str, list[float]]:
    """Those that have grown each time by half as much as clients came, with what they read: 0
    before they were shown."""
    values = {name: [one.get(name, 0.0) for one in read] for name in read[-1]}
    return {
        name: each
        for name, each in values.items()
        if all(after - before >= SIZE / 2 for before, after in pairwise(each))
    }


@crossing(
    "hop/no-retry",
    Level.MUST,
    "Nothing is asked again for a client that has left.",
    wire="The upstream's log is searched for the clients that left in all cases of this dialect "
    "before, at the earliest 3 s after the last leave. If there were none, some leave now: in the "
    "middle of streams, and before the answers have headers.",
    passes="no request of a client that has left arrives a second time after that",
    why="A gateway that takes the leave for a failure of the provider asks again, for nobody.",
    remedy="end the retries of a request when its client is gone",
    stage="after all",
    caught="BerriAI/litellm#36123",
)
def no_retry(bench: GatewayBench, dialect: DialectName) -> Finding:
    left = _some_left(bench, dialect)
    since_s = (time.perf_counter_ns() - max(left.values())) / 1e9
    gevent.sleep(max(0.0, RETRY_S - since_s))
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
    """Many gateways ask again only as long as they have sent nothing to their client."""
    if not bench.left.get(dialect):
        for leave in (LeaveSpec(way=Way.FIN), BEFORE_HEADERS):
            brief = leave._replace(tokens=BRIEF_TOKENS)
            bench.leave_each(bench.plans[dialect], brief, SIZE // 2, dialect)
    return bench.left[dialect]


@crossing(
    "hop/no-penalty",
    Level.MUST,
    "Nobody is punished for the clients that have left.",
    wire="After all other cases in which clients leave (alone: after some leaves), six new clients "
    "ask.",
    passes="each is served, and its request arrives at the upstream",
    why="A breaker that counts leaves as failures of the provider shuts it out for everybody.",
    remedy="count a leave neither as a failure nor as a success of the provider",
    stage="after all",
)
def no_penalty(bench: GatewayBench, dialect: DialectName) -> Finding:
    left = bench.left_in_all() or len(_some_left(bench, dialect))
    answers = bench.ask_each(bench.plans[dialect], [Order()] * FRESH)
    bad = [one for one in answers if not one.is_whole or not one.requests]
    _check_limit(bad)
    said = None
    if bad:
        why = why_ended(bad[0].row) if not bad[0].is_whole else "it did not arrive"
        said = f"after {left} leaves {len(bad)} of {FRESH} clients were not served: {why}"
    return found(f"all were served after {left} leaves", said, {"left": float(left)}, Failure.HARM)
