"""A client leaves while its prompt is computed: what is still computed, and what the leave does to
other clients."""

from functools import partial
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import leaver, when_admitted
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding
from harness.conform.judgement import Bound
from harness.conform.stopping import HARM_S
from harness.experiments.full_slots import SlotTry
from harness.experiments.idle_server import was_refused
from harness.experiments.outcome import CannotDecideError, TooQuickError
from harness.experiments.patience import READY_S
from harness.formatting import quantity
from harness.records import Outcome, RequestRow, Role
from harness.store.conform_result import Failure, Level
from harness.workload.abandon import RequestSpec

# Shares of the prompt's time, after which its client leaves. Mostly early: late, little is saved.
SHARES: Final = (0.1, 0.5, 0.1, 0.9, 0.1)
EARLY_SHARE: Final = 0.1  # where seconds alone are judged: each try has the longest way to go
CHUNKS: Final = 2  # that may still be computed
STEPS: Final = 4  # that may pass in addition to these chunks
READ_TOKENS: Final = 8  # of a stream that is left while another client's prompt is computed
_FEWEST_CHUNKS: Final = 8
_HARMS: Final = 2.5  # times a harm: the least time of a prompt, where a harm is seen in seconds
_LONG_ENOUGH_STEPS: Final = 20
_MOST_LOOKS: Final = 3
_FIRST_GUESS: Final = 256  # tokens
_LONGEST_S: Final = 4.0
_ANSWER_TOKENS: Final = 4
_ROOM: Final = 0.75  # of the context
_MOST_TOKENS: Final = 65_536


class Prefill(NamedTuple):
    """A cold long prompt, computed while long streams run in all other slots. `chunk_s`: the
    longest gap between the tokens of one of these streams meanwhile; 0 with one slot, where no
    stream shows it."""

    tokens: int
    ttft_s: float
    chunk_s: float

    def spec(self, answer_tokens: int = _ANSWER_TOKENS) -> RequestSpec:
        return RequestSpec(user=0, max_tokens=answer_tokens, prompt_tokens=self.tokens)

    def bound(self, step_s: float) -> Bound:
        return Bound(round(CHUNKS * self.chunk_s / step_s + STEPS, 2), CHUNKS + STEPS)

    @property
    def evidence(self) -> Evidence:
        return {
            "prompt_tokens": self.tokens,
            "prompt_ms": round(1e3 * self.ttft_s, 1),
            "chunk_ms": round(1e3 * self.chunk_s, 1),
        }


def long_prefill(
    bench: Bench, *, fewest_chunks: float = _FEWEST_CHUNKS, in_seconds: bool = False
) -> Prefill:
    """The shortest prompt that takes 20 steps and `fewest_chunks` chunks, found by doubling. A
    stall of the machine looks like a chunk, so the longest prompt is tried again. `in_seconds`: the
    prompt must also take several times as long as a harm, so that its rest outlasts a harm.

    Raises CannotDecideError if its chunks are too long for that, and TooQuickError if all of the
    longest prompt may be computed for nobody within the bound.
    """
    context = bench.facts.context or _MOST_TOKENS
    most = int(_ROOM * context)
    tokens, looks = min(_FIRST_GUESS, most), 0
    while True:
        seen = _watched(bench, tokens)
        is_longest = tokens == most or seen.ttft_s > _LONGEST_S
        harm_s = seen.bound(bench.step_s).steps * bench.step_s + HARM_S if in_seconds else 0.0
        least_s = max(_LONG_ENOUGH_STEPS * bench.step_s, _HARMS * harm_s)
        is_long = seen.ttft_s >= (harm_s if is_longest else least_s)
        if is_long and seen.ttft_s >= fewest_chunks * seen.chunk_s:
            return seen
        looks += is_longest
        if looks == _MOST_LOOKS:
            break
        may_take_s = max(STEPS * bench.step_s, harm_s)
        if is_longest and seen.ttft_s <= may_take_s:
            raise TooQuickError(
                f"the longest prompt, of {tokens} tokens, is computed in "
                f"{quantity(seen.ttft_s, 's')}, and a leave may take {quantity(may_take_s, 's')}"
            )
        tokens = tokens if is_longest else min(2 * tokens, most)
    raise CannotDecideError(
        f"a prompt of {tokens} tokens is computed in {1e3 * seen.ttft_s:.0f} ms, in chunks of up "
        f"to {1e3 * seen.chunk_s:.0f} ms: too few to see where it stops (a longer context, or "
        "smaller chunks such as --max-num-batched-tokens 512)"
    )


def _watched(bench: Bench, tokens: int) -> Prefill:
    beside = bench.filling.fill(bench.beside)
    row = bench.whole(RequestSpec(user=0, max_tokens=1, prompt_tokens=tokens))
    assert row.first_token_ns is not None
    ttft_s = (row.first_token_ns - row.sent_ns) / 1e9
    if not beside:
        return Prefill(tokens, ttft_s, 0.0)
    times = bench.filling.metronomes[0].token_times_ns
    during = [at for at in times if row.sent_ns <= at <= row.first_token_ns]
    ends = [row.sent_ns, *during, row.first_token_ns]
    longest_ns = max(late - early for early, late in pairwise(ends))
    return Prefill(tokens, ttft_s, longest_ns / 1e9)


def judged(bench: Bench, tries: list[SlotTry], before: list[float], prefill: Prefill) -> Finding:
    bound = prefill.bound(median(before))
    finding = bench.recoveries.judged(tries, bound, before=before)
    return unless_a_chunk(bench, finding, prefill)


def unless_a_chunk(bench: Bench, finding: Finding, prefill: Prefill) -> Finding:
    """The finding, with the prompt's figures. Raises CannotDecideError if what seems late may be a
    chunk."""
    is_late = finding.failure in (Failure.LATE, Failure.NEVER)
    held_s = float(finding.evidence.get("median_ms") or 0.0) / 1e3
    if finding.failure is Failure.NEVER:
        held_s = bench.patience.probe_s
    whole_s = prefill.ttft_s + STEPS * bench.step_s + HARM_S
    if is_late and not prefill.chunk_s and held_s <= whole_s:
        prompt = quantity(prefill.ttft_s, "s")
        raise CannotDecideError(
            f"{finding.reason}; the prompt takes {prompt} in all, and with one slot no other "
            "stream shows how much of that is a chunk"
        )
    return finding._replace(evidence=finding.evidence | prefill.evidence)


@case(
    "prefill/leave",
    Level.MUST,
    "The prefill of a client that left stops at its next chunk.",
    wire="All slots but one are full. A long prompt that no cache holds is sent, and its "
    "connection closed after 10, 50 or 90 % of the time that it takes; a short request comes then.",
    passes="the short request's first token comes at most two chunks and 4 steps later than on the "
    "idle server at the median of the tries, and at most three times that in each; no other "
    "stream fails",
    methods="P B",
    remedy="look for aborts before each chunk of a prompt",
    why="A long prompt is the most expensive thing that a server computes, and the wait for it is "
    "what users leave in. A chunk is the longest gap of another stream while it is computed.",
    quick=True,
    caught=reports(
        "ai-dynamo/dynamo#13691 ai-dynamo/dynamo#14507 antirez/ds4#333 Neroued/ninfer#184"
    ),
)
def leave_prefill(bench: Bench) -> Finding:
    has_no_steps = bench.full_slots.can_judge(bench.facts) is not None
    in_seconds = has_no_steps or bench.facts.slots == 1
    prefill = long_prefill(bench, in_seconds=in_seconds)

    def wait(_leaver: LiveStream, number: int) -> None:
        share = EARLY_SHARE if in_seconds else SHARES[number % len(SHARES)]
        bench.pause(share * prefill.ttft_s)

    finding = bench.recoveries.find(
        prefill.spec(bench.patience.answer_tokens),
        ready=wait,
        queues_first=False,
        is_alone=True,
        bound=prefill.bound(bench.step_s),
    )
    return harm(bench, unless_a_chunk(bench, finding, prefill))


def harm(bench: Bench, finding: Finding) -> Finding:
    """The finding, unless a stream of this case failed that nobody had left."""
    for row in bench.rows():
        if was_refused(row):
            continue  # it came before the slot was free again, or there is a limit a minute
        if row.outcome in (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.REJECTED):
            said = f"a stream that was not left ended: {row.error or row.outcome}"
            return Finding(Failure.HARM, said, finding.evidence)
    return finding


@case(
    "prefill/retry-at-once",
    Level.MUST,
    "After a leave in prefill the next request may come at once.",
    wire="A long prompt is sent and its connection closed in mid-prefill; the same prompt and "
    "another one as long come within a step.",
    passes="both are answered whole, each time",
    methods="R",
    remedy="finish the clean-up of a prefill before its slot or prefix is used again",
    why="A regenerate button cancels and asks again. Clean-up that still runs meets a new request "
    "with the same prefix, or in the same slot.",
    caught=reports("osaurus-ai/osaurus#1796"),
)
def retry_at_once(bench: Bench) -> Finding:
    prefill = long_prefill(bench, fewest_chunks=1)
    if bench.facts.refuses:  # what fills the other slots would keep the second request out
        bench.filling.fill(0)
    rows: list[RequestRow | None] = []

    def answer(text: str) -> None:
        def send() -> RequestRow | None:
            return bench.start(prefill.spec(), text).join(READY_S)

        rows.append(when_admitted(bench, send, other_s=prefill.ttft_s))

    for number, share in enumerate(SHARES):
        bench.wire.begin_try(number)
        text, other = prompt_of(bench, prefill), prompt_of(bench, prefill)
        leaver = bench.start(prefill.spec(), text)
        bench.pause(share * prefill.ttft_s)
        leaver.leave()
        bench.together([partial(answer, text), partial(answer, other)])
        if any(row is not None and was_refused(row) for row in rows):
            break  # as by a limit a minute: the next tries would be refused, too
    return judge_answers(rows, "a request after a leave in prefill", prefill)


def prompt_of(bench: Bench, prefill: Prefill) -> str:
    return bench.session.prompt(prefill.spec(), n=bench.rng.getrandbits(32))


def judge_answers(rows: list[RequestRow | None], what: str, prefill: Prefill) -> Finding:
    """`rows`: None is no answer. Raises CannotDecideError if the server refused a request."""
    whole = [row for row in rows if row is not None and row.outcome is Outcome.COMPLETED]
    evidence: Evidence = {"asked": len(rows), "whole": len(whole), **prefill.evidence}
    if None in rows:
        said = f"{what} was not answered within {READY_S:g} s"
        return Finding(Failure.NEVER, said, evidence)
    others = [row for row in rows if row is not None and row.outcome is not Outcome.COMPLETED]
    for row in others:
        if not was_refused(row):
            return Finding(Failure.HARM, f"{what} failed: {row.error or row.outcome}", evidence)
    if others:
        raise CannotDecideError(f"{what} was refused: {others[0].error}")
    return Finding(None, f"{len(whole)} of {len(rows)} were answered whole", evidence)


@case(
    "prefill/beside",
    Level.MUST,
    "A leave harms no other client's prefill.",
    wire="One stream decodes, a long prompt is sent, and in mid-prefill the first stream's "
    "connection is closed; when the long prompt is answered, a short request comes.",
    passes="the long prompt is answered whole; the short request's first token comes at most two "
    "chunks and 4 steps later than on the idle server",
    methods="B R",
    remedy="keep the state of a prefill apart from requests that are aborted meanwhile",
    why="The batch changes while one of its members is half computed: positions, block tables and "
    "chunk counters must follow.",
    caught=reports("ggml-org/llama.cpp#27604"),
)
def beside(bench: Bench) -> Finding:
    bench.check_runs_two()
    prefill = long_prefill(bench, fewest_chunks=1)
    rows: list[RequestRow | None] = []
    tries: list[SlotTry] = []
    fillers = max(0, bench.beside - 1)
    bench.full_slots.begin(fillers)
    before = bench.filling.steps_at_rest()
    for number, share in enumerate(SHARES):
        bench.filling.fill(fillers)
        bench.full_slots.serve_probe(bench.start(bench.probe()))
        bench.wire.begin_try(number)
        until = READ_TOKENS + int(2 * prefill.ttft_s / bench.step_s)
        left = bench.start(leaver(bench, until, role=Role.USER))
        left.wait_tokens(READ_TOKENS, READY_S)
        reader = bench.start(prefill.spec())
        bench.pause(share * prefill.ttft_s)
        left.leave()
        rows.append(reader.join(READY_S))
        if rows[-1] is None or rows[-1].outcome is not Outcome.COMPLETED:
            break
        tries.append(bench.full_slots.time_probe(bench.start(bench.probe())))
    finding = judge_answers(rows, "a long prompt, computed as another stream was left,", prefill)
    return finding if finding.failure is not None else judged(bench, tries, before, prefill)
