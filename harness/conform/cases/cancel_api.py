"""A route to cancel by: it does what it answers, and to one request."""

import json
from collections.abc import Mapping
from secrets import token_hex
from typing import Final

from harness.conform.bench import Bench
from harness.conform.bystanders import wait_each
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding, found
from harness.conform.routes import Reply, Routes
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.records import Delivery, Outcome, Way
from harness.store.conform_result import Failure, Level

LABEL_TOKENS: Final = 4
STILL_RUNS: Final = "a cancelled request still ran after the settle time"
WHOLE: Final = ("stop", "length")  # finish reasons


@case(
    "api/cancel",
    Level.MUST,
    "The cancel endpoint does what it answers.",
    wire="A live request is cancelled twice, then a finished request and an unknown id; then "
    "requests are cancelled behind full slots.",
    passes="live: 2xx, and the slot works for a probe within 4 steps at the median, 12 at worst; "
    "the answers for a finished and an unknown request differ from it",
    methods="W P",
    remedy="let the cancel endpoint say what it did, and do it",
    why="An endpoint that says 200 and does nothing is worse than none.",
    needs=("cancel_path", "http"),
    caught=reports("sgl-project/sglang#36333 sgl-project/sglang#34113 xorbitsai/inference#5548"),
)
def cancel(bench: Bench) -> Finding:
    routes = Routes(bench.session.plan, bench.known)
    live = bench.start(bench.long())
    wait_each([live], 2)
    name = live.spec.request_id
    done = bench.whole(bench.short(4)).request_id
    names = {"live": name, "twice": name, "finished": done, "unknown": f"unknown-{token_hex(4)}"}
    judged = judge_answers({kind: (name, routes.cancel(name)) for kind, name in names.items()})
    if judged.failure is not None:
        return judged
    if live.join(bench.settle_s) is None:
        return Finding(Failure.NEVER, STILL_RUNS, judged.evidence)
    timed = bench.recoveries.find(leave=lambda stream: stream.leave(Way.CANCEL))
    return timed._replace(evidence=judged.evidence | timed.evidence)


def judge_answers(answers: Mapping[str, tuple[str, Reply]]) -> Finding:
    """`answers`: the request's id and the reply, by the kind of request."""
    wrong = None
    for kind, (name, reply) in answers.items():
        if reply.status >= 500 or (kind == "live" and not reply.is_good):
            wrong = wrong or f"cancelling a request ({kind}) has status {reply.status}"
        if kind in ("finished", "unknown") and gist(name, reply) == gist(*answers["live"]):
            wrong = wrong or f"cancelling a request ({kind}) is answered like that of a live one"
    evidence: Evidence = {f"{kind}_status": reply.status for kind, (_, reply) in answers.items()}
    good = "live, finished and unknown requests are answered differently"
    return found(good, wrong, evidence, Failure.HARM)


def gist(name: str, reply: Reply) -> tuple[int, str]:
    """Its status and its body, without the request's id."""
    return reply.status, json.dumps(reply.body, sort_keys=True).replace(name, "")


@case(
    "api/ids",
    Level.MUST,
    "A cancel hits one request.",
    wire="Requests with the ids `w` and `w1` run; `w` is cancelled, and its id used again.",
    passes="`w` ends, `w1` and the new `w` are whole",
    methods="B",
    remedy="compare whole request ids when cancelling",
    why="Ids compared by their beginning, or kept after a cancel, end another user's answer.",
    needs=("cancel_path", "http"),
    caught=reports("sgl-project/sglang#39461 sgl-project/sglang#32237"),
)
def ids(bench: Bench) -> Finding:
    name = f"w{token_hex(4)}"
    cancelled = bench.start(bench.long(request_id=name))
    namesake = bench.start(bench.short(64, request_id=f"{name}1"))
    wait_each([cancelled, namesake], 4)
    reply = Routes(bench.session.plan, bench.known).cancel(name)
    if not reply.is_good:
        raise CannotDecideError(f"the server keeps no ids of clients (status {reply.status})")
    if cancelled.join(bench.settle_s) is None:
        return Finding(Failure.NEVER, STILL_RUNS, {})
    again = bench.ask(bench.short(16, request_id=name))
    for row, what in ((namesake.join(READY_S), f"{name}1"), (again, f"the next {name}")):
        if row is None or row.outcome is not Outcome.COMPLETED:
            how = "it had no end" if row is None else row.error or str(row.outcome)
            said = f"{name} was cancelled, and {what} was not answered whole: {how}"
            return Finding(Failure.HARM, said, {})
    return Finding(None, "only the request with that id ended; the id could be used again", {})


@case(
    "api/label",
    Level.MUST,
    "What was cancelled does not say that it has stopped by itself.",
    wire="A streamed and a unary request are cancelled by their ids after 4 tokens, and read to "
    "their end.",
    passes="the last event, or the body, has no finish reason of a whole answer (`stop`, `length`)",
    methods="W",
    remedy="give a cancelled answer a finish reason of its own, such as `abort`",
    why="A client that keeps answers, for training or a bill, takes half a sentence for a whole.",
    needs=("cancel_path", "http"),
    caught=reports("ai-dynamo/dynamo#14418"),
)
def label(bench: Bench) -> Finding:
    routes = Routes(bench.session.plan, bench.known)
    evidence: Evidence = {}
    for delivery in (Delivery.STREAM, Delivery.UNARY):
        live = bench.start(bench.long(delivery=delivery))
        if delivery is Delivery.UNARY:
            bench.pause(bench.ttft_s + LABEL_TOKENS * bench.step_s)
        else:
            wait_each([live], LABEL_TOKENS)
        reply = routes.cancel(live.spec.request_id)
        if not reply.is_good:
            raise CannotDecideError(f"a live request was not cancelled (status {reply.status})")
        if (row := live.join(bench.settle_s)) is None:
            return Finding(Failure.NEVER, STILL_RUNS, evidence)
        evidence[f"{delivery}_finish_reason"] = row.finish_reason
    return judge_labels_of_cancelled(evidence)


def judge_labels_of_cancelled(evidence: Evidence) -> Finding:
    """`evidence`: the finish reasons."""
    wrong = {name: reason for name, reason in evidence.items() if reason in WHOLE}
    said = ", ".join(f"{name} is {reason}" for name, reason in wrong.items())
    good = ", ".join(map(str, evidence.values()))
    return found(
        f"cancelled requests end with the finish reasons {good}",
        f"a cancelled request looks whole: {said}" if wrong else None,
        evidence,
        Failure.HARM,
    )
