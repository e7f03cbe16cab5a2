"""A client leaves a stream (between tokens, by a reset, before the first, in the last step) or an
answer in one piece."""

from functools import partial
from typing import Final

from harness.client.exchange import StreamClient
from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import lengths_of
from harness.conform.case import ABORT, FREED, case
from harness.conform.finding import Finding
from harness.conform.judgement import AT_ONCE
from harness.experiments.outcome import CannotDecideError, TooQuickError
from harness.formatting import quantity
from harness.records import Delivery, Outcome, Way
from harness.store.conform_result import Failure, Level
from harness.workload.abandon import RequestSpec

LAST_TOKENS: Final = 12  # of an answer that is left in its last step
RACES: Final = 50
QUICK_RACES: Final = 16
MOST_RACING: Final = 16  # at once
UNARY_STEPS: Final = 8  # after the first token of an answer in one piece
BEFORE_FIRST: Final = (0.25, 0.75)  # of the idle time to first token


@case(
    "stream/fin-decode",
    Level.MUST,
    "The slot of a closed stream works for another request.",
    wire="All slots are full and a short request queues. One stream reads 1, 16 or 64 tokens, "
    "waits for a random part of a step, reads what has come, and closes its connection: the "
    "server gets a FIN.",
    passes=FREED,
    methods="P",
    remedy=ABORT,
    why="The commonest way to leave: a tab is closed, a stop button is pressed.",
    quick=True,
    caught=(
        "https://github.com/sgl-project/sglang/issues/36333",
        "https://github.com/sgl-project/sglang/issues/37833",
        "https://github.com/ggml-org/llama.cpp/issues/11720",
        "https://github.com/Trans-N-ai/swama/issues/116",
    ),
)
def fin_decode(bench: Bench) -> Finding:
    finding = bench.recoveries.find()
    resets = finding.evidence.get("left_by_reset")
    left = finding.evidence.get("left") or bench.tries
    if float(resets or 0) > float(left) / 2:
        raise CannotDecideError(f"unread bytes made {resets} of {left} closes a reset")
    return finding


@case(
    "stream/rst-decode",
    Level.MUST,
    "The slot of a stream that was reset works for another request.",
    wire="As stream/fin-decode, but the socket is closed with SO_LINGER 0: the server gets a RST.",
    passes=FREED,
    methods="P",
    remedy=ABORT,
    why="A crashed client, a killed app or a proxy that gives up sends a reset, which servers see "
    "as an error of writing or reading, not as an end.",
    needs=("http",),
    quick=True,
    caught=("https://github.com/Neroued/ninfer/issues/111",),
)
def rst_decode(bench: Bench) -> Finding:
    return bench.recoveries.find(leave=lambda stream: stream.leave(Way.RST))


@case(
    "stream/before-first",
    Level.MUST,
    "A stream that is left before its first token gives its slot back.",
    wire="All slots but one are full. A short prompt is sent, and its connection closed after 25 "
    "or 75 % of the idle time to first token; a short request comes at that moment.",
    passes="the short request's first token comes later than on the idle server by at most 4 steps "
    "and the time of a short prompt, which may be in flight, at the median of the tries, and by at "
    "most three times that in each",
    methods="P",
    remedy="watch each connection from its request on, not only when a token is written",
    why="Impatient users leave before the answer begins. Servers that look at the connection only "
    "when they write a token do not see that.",
    caught=(
        "https://github.com/BerriAI/litellm/pull/31499",
        "https://github.com/JustVugg/colibri/pull/956",
        "https://github.com/ModelTC/LightLLM/pull/1409",
    ),
)
def before_first(bench: Bench) -> Finding:
    if bench.ttft_s < 2 * bench.lag_s:
        raise TooQuickError(
            f"the first token comes in {quantity(bench.ttft_s, 's')}, within twice the lag of this "
            "client"
        )

    def wait(_leaver: LiveStream, number: int) -> None:
        bench.pause(BEFORE_FIRST[number % len(BEFORE_FIRST)] * bench.ttft_s)

    steps = AT_ONCE.steps + bench.ttft_s / bench.step_s
    bound = AT_ONCE._replace(steps=round(steps, 2))
    return bench.recoveries.find(ready=wait, queues_first=False, bound=bound)


@case(
    "stream/last-token",
    Level.MUST,
    "A stream that is left in its last step ends once.",
    wire="Answers of 12 tokens in all slots; each connection is closed within a step before or "
    "after its last token is due, 50 times in all.",
    passes="as many requests as slots run at once afterwards, no more and no fewer, and each gets "
    "as many tokens as before",
    methods="O R",
    remedy="let either the end of an answer or its abort free the slot, whichever comes first",
    why="The end of the answer and the abort race for one slot: freed twice, it is given to two "
    "requests; freed by neither, it is lost.",
    caught=("https://github.com/vllm-project/vllm/pull/29987",),
)
def last_token(bench: Bench) -> Finding:
    races = QUICK_RACES if bench.is_quick else RACES
    left = 0
    if bench.facts.can_fill and (more := _most_at_once(bench)) > bench.slots:
        raise CannotDecideError(f"{more} requests run at once, before anybody left: it has grown")
    control = _fewest(bench)

    def race() -> int:
        nonlocal left
        done = 0
        while done < races:
            left += _race(bench)
            done += bench.crowd(MOST_RACING)
            if done >= races // 2 and not left:
                raise CannotDecideError("every answer had ended before its client left")
        return left

    count = bench.held.after(race)
    if count.way not in ("occupancy", "gauge"):
        raise CannotDecideError("a slot that is lost at an answer's end computes nothing to see")
    together = _most_at_once(bench) if bench.facts.can_fill else None
    shortest = _fewest(bench)
    evidence: dict[str, float | str | None] = {
        "races": races,
        "left_in_time": left,
        "held": count.held,
        "ran_at_once": together,
        "fewest_tokens": shortest,
        "fewest_tokens_before": control,
    }
    if count.held:
        return Finding(Failure.NEVER, count.said, evidence, way=count.way)
    if together is not None and together > bench.slots:
        return Finding(Failure.HARM, f"{together} requests run in {bench.slots} slots", evidence)
    if control is not None and shortest is not None and shortest < control:
        said = f"a later answer has {shortest} tokens, and each before had {control}"
        return Finding(Failure.HARM, said, evidence)
    said = f"{left} clients left in the last step: {count.good}"
    return Finding(None, said, evidence, way=count.way)


def _most_at_once(bench: Bench) -> int:
    """The most requests that run at once, one more than the slots if that is seen twice: a late
    reader sees two that met at a token run together."""
    counts = (bench.occupancy.running_at_once(extra=1) for _ in range(2))
    return next((one for one in counts if one <= bench.slots), bench.slots + 1)


def _fewest(bench: Bench) -> int | None:
    """Tokens of an answer, of as many at once as slots; None: each ended before its length."""
    rows = bench.occupancy.whole_at_once(LAST_TOKENS, bench.crowded)
    return min(lengths_of(rows), default=None)


def _race(bench: Bench) -> int:
    """One stream per slot; each leaves around its last token. Returns how many left in time."""

    def leave(stream: LiveStream, late_s: float) -> None:
        stream.wait_tokens(LAST_TOKENS - 1, 10.0)
        bench.pause(late_s)
        stream.leave()

    streams = [bench.start(bench.short(LAST_TOKENS)) for _ in range(bench.crowd(MOST_RACING))]
    late = [2 * bench.rng.random() * bench.step_s for _ in streams]
    bench.together([partial(leave, *one) for one in zip(streams, late, strict=True)])
    rows = [stream.join(10.0) for stream in streams]
    return sum(row is not None and row.outcome is Outcome.ABANDONED for row in rows)


@case(
    "stream/reused-conn",
    Level.MUST,
    "A stream is cancelled on a connection that served another request before.",
    wire="A whole answer on a kept connection; then a stream on the same connection, which is "
    "closed as in stream/fin-decode.",
    passes=FREED,
    methods="P",
    remedy="watch a kept connection again for each of its requests",
    why="Pools of connections are the rule behind proxies. A server that watches a connection for "
    "its first request alone does not see the later close.",
    needs=("http",),
    caught=(
        "https://github.com/ggml-org/llama.cpp/issues/15232",
        "https://github.com/BerriAI/litellm/pull/17365",
    ),
)
def reused_conn(bench: Bench) -> Finding:
    session = bench.session_that_keeps()
    client = session.client
    assert isinstance(client, StreamClient)

    def begin_again(spec: RequestSpec) -> LiveStream:
        bench.whole(bench.short(4), session=session)
        reused = client.num_reused
        stream = bench.start(spec, session=session)
        stream.wait_tokens(1, 10.0)
        if client.num_reused == reused:
            raise CannotDecideError("the server closes its connections after an answer")
        return stream

    try:
        return bench.recoveries.find(begin=begin_again, is_alone=True)
    finally:
        session.close()


@case(
    "unary/leave",
    Level.MUST,
    "A client that waits for its answer in one piece may leave.",
    wire='All slots are full, one by a request with `"stream": false`, and a short request queues. '
    "The connection of the unary one is closed 8 steps and more after its first token was made. "
    "Nothing is scraped.",
    passes=FREED,
    methods="P",
    remedy="watch the connection also while an answer in one piece is computed",
    why="A server that writes nothing until the end learns of a disconnect only if it looks.",
    quick=True,
    caught=(
        "https://github.com/vllm-project/vllm/issues/10806",
        "https://github.com/InternLM/lmdeploy/issues/4776",
        "https://github.com/BerriAI/litellm/issues/13774",
    ),
)
def unary_leave(bench: Bench) -> Finding:
    asked = bench.long(delivery=Delivery.UNARY)
    return bench.recoveries.find(asked, ready=lambda *_: bench.pause(UNARY_STEPS * bench.step_s))
