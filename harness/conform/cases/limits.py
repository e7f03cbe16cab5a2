"""What a server refuses or ends by itself: prompts that are too long, deadlines."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import combinations
from secrets import randbits
from statistics import median
from typing import Final, NamedTuple

from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import joined, rows_of, wait_each
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.records import Outcome, RequestRow
from harness.store.conform_result import Failure, Level

TRIES: Final = 3  # and three more before a server is called late
CHANCE: Final = 0.01  # late: chance explains such times with at most this probability
TOO_LONG: Final = 1.1  # times the context, since prompts are only about as long as they are to be
ROOM: Final = 0.75  # of the context
MOST_TOKENS: Final = 2048  # of the prompt whose time shows whether another one is computed
MOST_RATIO: Final = 1.5
LONG_STEPS: Final = 6  # that this prompt must take at least
REFUSED: Final = (400, 413, 422)

FILLER_TOKENS: Final = 30
QUEUED_TOKENS: Final = 2
SPREAD_STEPS: Final = 8  # of the deadlines, before and after the moment at which slots become free
EARLY_STEPS: Final = 2  # by which a deadline may seem to pass too soon


@case(
    "reject/too-long",
    Level.SHOULD,
    "What is refused is not computed.",
    wire="A prompt longer than the context is refused, and right then a cold prompt of up to 2,048 "
    "tokens is sent; in the control the cold prompt is sent alone. Three times, by turns, and "
    "three times more where the prompt takes longer.",
    passes=f"its first token takes at most {MOST_RATIO:g} times as long as in the control, at the "
    "median",
    methods="R",
    why="A client that gets a 400 sends again and again. If each prompt is computed before it is "
    "thrown away, the answer to the mistake is an overload.",
    remedy="compare a prompt's length with the context before it is queued",
    needs=("http",),
    caught=reports("sgl-project/sglang#30233"),
)
def too_long(bench: Bench) -> Finding:
    context = bench.facts.context
    if context is None:
        raise RefusedError("the server does not say how long its context is")
    tokens = min(MOST_TOKENS, int(ROOM * context))
    refused_s: list[float] = []
    alone: list[float] = []
    after: list[float] = []
    for number in range(2 * TRIES):
        bench.wire.begin_try(number)
        alone.append(_first_token_s(bench, tokens))
        refused_s.append(_refused_s(bench, int(TOO_LONG * context)))
        after.append(_first_token_s(bench, tokens))
        if number + 1 == TRIES and median(after) <= MOST_RATIO * median(alone):
            break
    return judge_refusals(alone, after, refused_s, step_s=bench.step_s)


def _first_token_s(bench: Bench, tokens: int) -> float:
    asked = bench.short(1, prompt_tokens=tokens)
    row = bench.whole(asked, bench.session.prompt(asked, n=randbits(32)))  # no cache knows it
    return ((row.first_token_ns or row.ended_ns) - row.sent_ns) / 1e9


def _refused_s(bench: Bench, tokens: int) -> float:
    row = bench.ask(bench.short(1, prompt_tokens=tokens))
    if row.outcome is Outcome.COMPLETED:
        raise RefusedError(f"a prompt of {tokens} tokens is not refused, but answered")
    if row.status_code not in REFUSED:
        why = f"a prompt of {tokens} tokens was refused for another reason"
        raise CannotDecideError(f"{why}: {row.error}")
    return (row.ended_ns - row.sent_ns) / 1e9


def judge_refusals(
    alone: list[float], after: list[float], refused_s: list[float], *, step_s: float
) -> Finding:
    """`alone`, `after`: a prompt's time to first token (s), by itself and right after a refusal.
    Raises CannotDecideError where the prompt takes too little time, or where its times vary as much
    by themselves (the exact test of Mann and Whitney)."""
    usual, later = median(alone), median(after)
    evidence: Evidence = {
        "first_token_ms": round(1e3 * usual, 1),
        "after_refusal_ms": round(1e3 * later, 1),
        "refused_after_ms": round(1e3 * median(refused_s), 1),
    }
    if usual < LONG_STEPS * step_s:
        raise CannotDecideError(
            f"the longest prompt takes {1e3 * usual:.0f} ms: too short to show another one"
        )
    said = f"right after a refusal a prompt takes {later / usual:.2f} times as long as by itself"
    if later <= MOST_RATIO * usual:
        return Finding(None, said, evidence)
    if _chance_of(after, alone) > CHANCE:
        longest_ms, shortest_ms = (1e3 * end(alone) for end in (max, min))
        raise CannotDecideError(
            f"{said}, but it varies: by itself from {shortest_ms:.0f} to {longest_ms:.0f} ms"
        )
    return Finding(Failure.LATE, said, evidence)


def _chance_of(later: Sequence[float], usual: Sequence[float]) -> float:
    """The probability that chance alone makes the first times so much longer: the share of all ways
    to split the times in which they have the same or higher ranks in the sum (Mann and Whitney)."""
    times = sorted([*later, *usual])
    ranks = [bisect_left(times, one) + bisect_right(times, one) for one in times]
    seen = sum(ranks[bisect_left(times, one)] for one in later)
    splits = [sum(some) for some in combinations(ranks, len(later))]
    return sum(one >= seen for one in splits) / len(splits)


@case(
    "deadline/straddle",
    Level.MUST,
    "A request ends at its deadline, and not before; what has ended so is not called whole.",
    wire="Twice as many requests as slots queue behind full slots, each with a deadline of its own "
    "(`deadline_key` of the target's file), spread over 8 steps before and after the moment at "
    "which the slots become free.",
    passes="each is answered whole, or ended within the settle time after its deadline, with an "
    "error or without a finish reason of a whole answer; no request ends before its deadline, no "
    "stream before them is cut, and no slot is held",
    methods="O W",
    why="Under overload waits straddle the deadline, and its two sides race: the request is "
    "admitted and expires in the same step.",
    remedy="decide an expiry once, in the scheduler at a step's boundary, and report an expiry",
    needs=("deadline", "http"),
    caught=(
        *reports("sgl-project/sglang#27221 sgl-project/sglang#37143"),
        *reports("Avarok-Cybersecurity/atlas#482"),
    ),
)
def straddle(bench: Bench) -> Finding:
    key = bench.session.plan.target.deadline_key
    if key is None:
        raise CannotDecideError("the target's file names no `deadline_key`")
    running = [bench.start(bench.short(FILLER_TOKENS)) for _ in range(bench.slots)]
    wait_each(running, 1)
    count = 2 * bench.slots
    until_free_s = (FILLER_TOKENS - 1) * bench.step_s
    asked: list[tuple[float, LiveStream]] = []
    for number in range(count):
        offset_steps = SPREAD_STEPS * (2 * number / (count - 1) - 1)
        deadline_s = max(bench.step_s, until_free_s + offset_steps * bench.step_s)
        body = {key: round(deadline_s, 4)}
        asked.append((deadline_s, bench.start(bench.short(QUEUED_TOKENS, body=body))))
    for stream in running:
        joined(stream)
    ended = list(zip((one for one, _ in asked), rows_of([one for _, one in asked]), strict=True))
    held = bench.occupancy.held(lambda: 0)
    early_s = EARLY_STEPS * bench.step_s
    seen = Deadlines.of(ended, early_s=early_s, settle_s=bench.settle_s)
    return judge_deadlines(seen, held)


class Deadlines(NamedTuple):
    """Requests with deadlines. `early_s`, `late_s`: by how much some ended too soon or too late.
    `called_whole`: finish reasons of requests that had expired."""

    requests: int
    whole: int
    early_s: list[float]
    late_s: list[float]
    called_whole: list[str]

    @classmethod
    def of(
        cls, ended: list[tuple[float, RequestRow]], *, early_s: float, settle_s: float
    ) -> "Deadlines":
        """`ended`: each request with its deadline (s). `early_s` and `settle_s` are allowed."""
        seen = cls(len(ended), sum(map(_is_whole, (row for _, row in ended))), [], [], [])
        for deadline_s, row in ended:
            late_s = (row.ended_ns - row.sent_ns) / 1e9 - deadline_s
            if late_s > settle_s:
                seen.late_s.append(late_s)
            elif not _is_whole(row) and late_s < -early_s:
                seen.early_s.append(-late_s)
            elif not _is_whole(row) and row.finish_reason in ("stop", "length"):
                seen.called_whole.append(row.finish_reason)
        return seen


def _is_whole(row: RequestRow) -> bool:
    tokens = row.completion_tokens or row.tokens_read
    return row.outcome is Outcome.COMPLETED and tokens >= QUEUED_TOKENS


def judge_deadlines(seen: Deadlines, held: int) -> Finding:
    """`held`: slots. Raises CannotDecideError if all requests ended alike."""
    expired = seen.requests - seen.whole
    evidence: Evidence = {
        "requests": seen.requests,
        "whole": seen.whole,
        "expired": expired,
        "early": len(seen.early_s),
        "late": len(seen.late_s),
        "held": held,
    }
    if words := seen.called_whole:
        said = f"{len(words)} requests that expired say `{words[0]}`, as a whole one"
        return Finding(Failure.HARM, said, evidence)
    if early := seen.early_s:
        said = f"{len(early)} requests ended up to {max(early):.2f} s before their deadline"
        return Finding(Failure.HARM, said, evidence)
    if seen.late_s or held:
        late = max(seen.late_s, default=0.0)
        said = f"{held} slots are held" if held else f"a request ended {late:.2f} s late"
        return Finding(Failure.NEVER, f"{said} after the deadlines", evidence)
    if not seen.whole or not expired:
        raise CannotDecideError("all requests ended on one side of their deadlines")
    good = f"{seen.whole} requests were in time, {expired} ended at their deadline"
    return Finding(None, good, evidence)
