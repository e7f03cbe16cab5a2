"""A proxy before the server: does it pass a leave on, and what does that cost?

One server is asked twice: through the proxy, and directly (`--direct URL`).
"""

import time
from typing import Final

from harness.conform.bench import Bench
from harness.conform.bystanders import leave_each
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding, found
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.records import Delivery
from harness.store.conform_result import Failure, Level

DRAINED_AFTER: Final = 64  # tokens
LONG_ANSWER: Final = 4000
UNARY_STEPS: Final = 8
LONGEST_DRAIN_S: Final = 45.0


@case(
    "hop/tax",
    Level.SHOULD,
    "A proxy passes the leave on at once.",
    wire="Streams and unary requests are left behind full slots, directly and through the proxy.",
    passes="the median through the proxy is at most a step and a round trip more than directly; "
    "what the server itself does not pass is not judged",
    methods="P",
    remedy="close the connection to the server when the client's closes",
    why="A proxy that reads the answer to its end hides every leave from the server.",
    needs=("direct",),
    caught=reports("BerriAI/litellm#30244 sgl-project/sglang#39461"),
    limit_s=120.0,
)
def tax(bench: Bench) -> Finding:
    direct = bench.past_the_proxy()
    most = 1 + max(0.0, bench.ttft_s - direct.ttft_s) / bench.step_s
    evidence: Evidence = {}
    open_ones: list[str] = []
    for delivery in Delivery:
        try:
            before = _directly(direct, delivery)
        except CannotDecideError as error:
            open_ones.append(f"{delivery}: {error}")
            continue
        one = judge_tax(delivery, before, recovery_of(bench, delivery), most_steps=most)
        evidence |= one.evidence
        if one.failure is not None:
            return one._replace(evidence=evidence)
    if not evidence:
        raise CannotDecideError("; ".join(open_ones))
    said = "the proxy passes leaves on within a step and a round trip"
    return Finding(None, "; not judged: ".join([said, *open_ones]), evidence)


def _directly(direct: Bench, delivery: Delivery) -> Finding:
    """Raises CannotDecideError, also if the server itself does not pass."""
    try:
        finding = recovery_of(direct, delivery)
    finally:
        direct.end()
    if finding.failure is not None:
        raise CannotDecideError(f"asked directly, the server does not pass: {finding.reason}")
    return finding


def judge_tax(
    delivery: Delivery, direct: Finding, through: Finding, *, most_steps: float
) -> Finding:
    before, after = (one.evidence.get("median_steps") for one in (direct, through))
    evidence: Evidence = {
        f"{delivery}_direct_steps": before,
        f"{delivery}_steps": after,
        "most_steps_more": round(most_steps, 2),
    }
    if through.failure is not None:
        return Finding(
            through.failure, f"{delivery}: {through.reason}", evidence, stops=through.stops
        )
    if not isinstance(after, float | int) or not isinstance(before, float | int):
        return Finding(None, f"{delivery}: {through.reason}", evidence, stops=through.stops)
    said = f"{delivery}: {after:.1f} steps through the proxy, {before:.1f} directly"
    return found(said, said if after - before > most_steps else None, evidence, Failure.LATE)


def recovery_of(bench: Bench, delivery: Delivery) -> Finding:
    if delivery is Delivery.STREAM:
        return bench.recoveries.find()
    return bench.recoveries.find(
        bench.long(delivery=delivery),
        ready=lambda _leaver, _number: bench.pause(UNARY_STEPS * bench.step_s),
    )


@case(
    "hop/drain",
    Level.INFO,
    "A proxy that reads on after its client left says for how long.",
    wire="As many streams as slots, of 4,000 tokens, are left after 64 tokens through the proxy; "
    "then as many probes as slots start directly, again and again.",
    passes="not judged; the reason says after which time all slots are free",
    methods="O",
    why="Some proxies read on for seconds or minutes on purpose, to store or to bill the answer.",
    needs=("direct",),
    caught=reports("QuantumNous/new-api#7178 Wei-Shaw/sub2api#5016 Menci/Floway#447"),
    limit_s=90.0,
)
def drain(bench: Bench) -> Finding:
    direct = bench.past_the_proxy()
    tokens = min(LONG_ANSWER, (bench.facts.context or LONG_ANSWER) - 128)
    streams = [bench.start(bench.long(max_tokens=tokens)) for _ in range(bench.slots)]
    for stream in streams:
        stream.wait_tokens(DRAINED_AFTER, READY_S)
    if len(leave_each(bench, streams)) < len(streams):
        raise CannotDecideError("a stream that was to be left ended by itself")
    left_s = time.monotonic()
    longest_s = min(LONGEST_DRAIN_S, (tokens - DRAINED_AFTER) * bench.step_s)
    while direct.occupancy.running_at_once() < direct.slots:
        if time.monotonic() - left_s > longest_s:
            raise CannotDecideError(
                f"slots were held for {longest_s:.0f} s, as long as answers run"
            )
    drained_s = time.monotonic() - left_s
    said = f"all slots were free {drained_s:.1f} s after the leaves"
    return Finding(None, said, {"drained_s": round(drained_s, 2)})
