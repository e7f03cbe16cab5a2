"""The answers of clients that stay, what they cost, and the bill of all."""

from functools import partial
from statistics import median
from typing import Final

from harness.client.session import LoadSession
from harness.conform.finding import Evidence, Finding, found
from harness.conform.gateway.bench import BRIEF, GatewayAnswer, GatewayBench, together, why_ended
from harness.conform.gateway.bill import find_bills, judge_bills
from harness.conform.gateway.case import crossing
from harness.conform.gateway.routes import plan_of
from harness.experiments.outcome import CannotDecideError
from harness.records import Delivery, Role
from harness.store.conform_result import Failure, Level
from harness.upstream.orders import Order
from harness.workload.plan import LoadPlan
from harness.workload.target import DialectName

WHOLE_STREAMS: Final = 40
WHOLE_UNARY: Final = 8
SHOWN: Final = 60  # characters of an answer
TAXED: Final = 8
CUT_TOKENS: Final = 12
BREAK_S: Final = 10.0  # within which a client must see that its answer was broken off


@crossing(
    "hop/whole",
    Level.MUST,
    "A client that stays gets the whole answer.",
    wire="40 streams of 3 tokens, side by side, from an upstream that sends its headers at once; "
    "then 8 such answers in one piece.",
    passes="each has all its tokens and its end",
    why="All other cases rest on it: a gateway that cuts streams lets everybody go.",
    remedy="pass on what the provider sends until it ends",
    stage="first",
    quick=True,
)
def whole(bench: GatewayBench, dialect: DialectName) -> Finding:
    plan = bench.plans[dialect]
    answers = bench.ask_each(plan, [Order(headers="early")] * WHOLE_STREAMS)
    answers += bench.ask_each(plan, [Order()] * WHOLE_UNARY, delivery=Delivery.UNARY)
    bad = [one for one in answers if not one.is_whole]
    if unserved := [one for one in bad if one.is_late or one.is_refused]:
        raise CannotDecideError(f"a request was not served: {why_ended(unserved[0].row)}")
    other = [one for one in answers if one.is_whole and not one.has_all(BRIEF)]
    said = None
    if bad:
        said = f"{len(bad)} of {len(answers)} answers were cut: {why_ended(bad[0].row)}"
    elif other:
        text = (other[0].row.answer or "")[:SHOWN]
        said = f"{len(other)} of {len(answers)} answers are not those of the upstream: {text!r}"
    figures: Evidence = {"cut": float(len(bad)), "other": float(len(other))}
    return found("all answers were whole", said, figures, Failure.HARM)


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
    stream = bench.start(session, order, CUT_TOKENS, delivery=delivery, role=Role.CANARY)
    row = stream.join(BREAK_S)
    requests = bench.ledger.over(stream.spec.request_id, 1.0)
    if not any(one.why == "told" for one in requests):
        why = "no end" if row is None else why_ended(row)
        raise CannotDecideError(f"a request that was to be broken off was not served: {why}")
    if row is None and len(requests) > 1:
        raise CannotDecideError("after a break the gateway still asks again: end its retries")
    if row is None:
        return "leaves its client waiting"
    answer = GatewayAnswer(row, requests)
    return "looks whole" if answer.is_whole and not answer.has_all(CUT_TOKENS) else None


@crossing(
    "hop/tax",
    Level.INFO,
    "What a gateway adds to a first token is said.",
    wire="Eight streams of one token, one after the other, through the gateway, and eight without.",
    passes="not judged; the reason says how many milliseconds more it takes on the way to the "
    "upstream and back",
    why="It is the price of a gateway that everybody pays.",
    stage="one by one",
)
def tax(bench: GatewayBench, dialect: DialectName) -> Finding:
    direct = plan_of(bench.upstream, dialect)
    assert direct is not None
    own = _ways_ms(bench, direct)
    through = _ways_ms(bench, bench.plans[dialect])
    there_ms, back_ms = through[0] - own[0], through[1] - own[1]
    figures: Evidence = {"there_ms": round(there_ms, 2), "back_ms": round(back_ms, 2)}
    said = f"{there_ms:.1f} ms on the way to the upstream, {back_ms:.1f} ms on the way back"
    return Finding(None, said, figures)


def _ways_ms(bench: GatewayBench, plan: LoadPlan) -> tuple[float, float]:
    """The median times from a request's sending to its arrival, and from its first token to the
    client."""
    there_ms, back_ms = [], []
    with bench.session(plan) as session:
        for _ in range(TAXED):
            answer = bench.ask(session, Order(), 1)
            if not answer.is_whole or not answer.requests:
                raise CannotDecideError(f"a stream was not whole: {why_ended(answer.row)}")
            row, request = answer.row, answer.requests[0]
            there_ms.append((request.arrived_ns - row.sent_ns) / 1e6)
            if row.first_token_ns is not None and request.token_times_ns:
                back_ms.append((row.first_token_ns - request.token_times_ns[0]) / 1e6)
    if not back_ms:
        raise CannotDecideError("no stream showed its first token")
    return median(there_ms), median(back_ms)


@crossing(
    "bill/left",
    Level.MUST,
    "A bill is between what came to the client and what was made for it.",
    wire="Whole and left requests, one after the other; before and after each the gateway is asked "
    "what was used.",
    passes="for each request: delivered tokens <= billed tokens <= tokens that the upstream made",
    why="Otherwise a client that reads the answer and closes before its usage pays nothing, or one "
    "that leaves early pays for all that was to come (GHSA-724j-f2pf-phf7).",
    remedy="count the tokens that are passed on, and bill for them when there is no usage",
    stage="one by one",
    limit_s=180.0,
    needs="usage",
)
def bill(bench: GatewayBench, dialect: DialectName) -> Finding:
    return judge_bills(find_bills(bench, dialect))
