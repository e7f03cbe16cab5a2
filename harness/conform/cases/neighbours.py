"""Clients that stay, and what they notice when other clients leave.

Greedy streams run in half of the slots. In the other half short requests come and go: their clients
leave after a few tokens, or, in the control, their answers end after as many tokens. So batches
have the same sizes in both, and the control differs by the cancels alone.
"""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, inf, log
from statistics import fmean, quantiles
from threading import Thread
from typing import Final

from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import Rows, compared, leaver, one_by_one, rows_of, start_greedy
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding, found
from harness.conform.judgement import LEAST_STEP_S
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.experiments.streams import is_refused
from harness.intervals import mean_interval
from harness.records import Outcome, RequestRow
from harness.store.conform_result import Failure, Level

TOKENS: Final = 96  # of a greedy answer
QUICK_TOKENS: Final = 40
PACE_TOKENS: Final = 48  # of a turn: more and shorter turns narrow the interval sooner
PIECES: Final = 3  # of a turn, at least, where many tokens come at once
MOST_STREAMS: Final = 8  # that are compared; as many clients come and go
VISIT_TOKENS: Final = (3, 12)  # that a client reads before it goes
FEWEST_VISITS: Final = 3
MOST_RATIO: Final = 1.5
FEWEST_TURNS, MOST_TURNS = 4, 12
_PROMPTS: Final = 1 << 24  # sets of prompts; one set is drawn


@case(
    "bystander/text",
    Level.MUST,
    "The text of other clients does not change when clients leave.",
    wire="Greedy streams in half of the slots, while other answers end and then while clients "
    "leave; both a second time if a text differs.",
    passes="each text is that of the control",
    methods="B",
    remedy="reuse a block only when the last step that reads it has ended",
    why="A block that is reused before its last step has ended mixes two users' texts.",
    caught=reports(
        "sgl-project/sglang#35049 vllm-project/vllm-ascend#14055 vllm-project/tpu-inference#3449"
    ),
)
def text(bench: Bench) -> Finding:
    return compared(*turns_of(bench), alone=lambda: alone(bench), settle=bench.cleaning.rest)


@case(
    "bystander/pace",
    Level.SHOULD,
    "Other clients are not slowed when clients leave.",
    wire="Greedy streams in half of the slots, by turns while other answers "
    "end and while clients leave.",
    passes="the p99 of the gaps between tokens is at most 1.5 times that of the control",
    methods="B",
    remedy="abort without stopping the batch",
    why="A cancel that stops the whole batch for a moment is paid by everybody else.",
    caught=reports("BerriAI/litellm#36429"),
)
def pace(bench: Bench) -> Finding:
    flush = bench.facts.flush_tokens
    tokens, least_s = tokens_of_a_turn(flush), LEAST_STEP_S if flush > 1 else 0.0
    turns: list[tuple[float, float]] = []
    while True:
        control, act = (beside(bench, leaving=one, tokens=tokens) for one in (False, True))
        turns.append((p99_gap(control, least_s), p99_gap(act, least_s)))
        if len(turns) < FEWEST_TURNS:
            continue
        try:
            return judge_pace(turns)
        except CannotDecideError:
            if len(turns) >= MOST_TURNS:
                raise


def tokens_of_a_turn(flush_tokens: float) -> int:
    return max(PACE_TOKENS, int(PIECES * flush_tokens))


def p99_gap(rows: Sequence[RequestRow], least_s: float) -> float:
    """The 99th percentile of the gaps between tokens, in seconds. `least_s`: of a gap that counts;
    tokens of one piece, which may be read in parts, have none. Raises CannotDecideError without two
    gaps, or where nearly all have no length."""
    between = (late - early for row in rows for early, late in pairwise(row.token_times_ns))
    gaps_s = [gap_ns / 1e9 for gap_ns in between if gap_ns >= 1e9 * least_s]
    p99_s = quantiles(gaps_s, n=100, method="inclusive")[-1] if len(gaps_s) > 1 else 0.0
    if p99_s < LEAST_STEP_S:
        raise CannotDecideError("the answers came in one piece: they show no pace")
    return p99_s


def judge_pace(turns: Sequence[tuple[float, float]]) -> Finding:
    """`turns`: the p99 of the gaps in the control, and while clients leave (s). The ratio is the
    geometric mean over the turns, with its 95 % interval."""
    logs = [log(storm / control) for control, storm in turns]
    interval = mean_interval(logs) or (-inf, inf)
    low, ratio, high = (exp(one) for one in (interval[0], fmean(logs), interval[1]))
    said = f"the p99 gap is {ratio:.2f} times the control's (95 %: {low:.2f} to {high:.2f})"
    if low <= MOST_RATIO < high:
        raise CannotDecideError(f"{said}: too uneven to say whether it exceeds {MOST_RATIO}")
    evidence: Evidence = {
        "turns": len(turns),
        "p99_ratio": round(ratio, 3),
        "p99_ratio_low95": round(low, 3),
        "p99_ratio_high95": round(high, 3),
    }
    return found(said, said if low > MOST_RATIO else None, evidence, Failure.LATE)


@case(
    "bystander/ends",
    Level.MUST,
    "No other client's stream ends early when clients leave.",
    wire="Greedy streams in half of the slots, while other answers end and then while clients "
    "leave; both a second time if an end differs.",
    passes="all are whole, with the finish reasons and lengths of the control",
    methods="B W",
    remedy="abort by the request, not by its slot or its place",
    why="An abort that hits the wrong request ends a stream whose client is still reading.",
    quick=True,
    caught=reports(
        "sgl-project/sglang#39216 openvinotoolkit/model_server#4428 vllm-project/vllm#43226"
    ),
)
def ends(bench: Bench) -> Finding:
    def judge(*, are_new: bool = False) -> Finding:
        return compared(
            *turns_of(bench, are_new=are_new),
            end_of,
            alone=lambda: alone(bench, are_new=are_new),
            what="end",
            settle=bench.cleaning.rest,
        )

    try:
        return judge()
    except AnsweredBeforeError:
        return judge(are_new=True)


def end_of(row: RequestRow) -> tuple[str | None, int | None]:
    return row.finish_reason, row.completion_tokens


class AnsweredBeforeError(CannotDecideError):
    """The server had the answers already, as from a cache."""


def turns_of(
    bench: Bench, *, are_new: bool = False
) -> tuple[Callable[[], Rows], Callable[[], Rows]]:
    """The control, and the same streams while clients leave. `are_new`: each run has other
    prompts."""
    return (
        lambda: beside(bench, leaving=False, are_new=are_new),
        lambda: beside(bench, leaving=True, are_new=are_new),
    )


def beside(
    bench: Bench, *, leaving: bool, tokens: int | None = None, are_new: bool = False
) -> Rows:
    """The rows of the greedy streams. Raises CannotDecideError if hardly any other request came and
    went as it should."""
    bench.check_runs_two()
    most = bench.crowd(2 * MOST_STREAMS)
    tokens = tokens or greedy_tokens(bench)
    streams = start_greedy(bench, prompts(bench, most // 2, are_new=are_new), tokens)
    visits: Rows = []
    visitors = [
        Thread(target=visit, args=(bench, streams, number, visits), kwargs={"leaving": leaving})
        for number in range(most - len(streams))
    ]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    rows = rows_of(streams)
    went = [row for row in visits if (row.outcome is Outcome.ABANDONED) == leaving]
    if len(went) < FEWEST_VISITS and all(row.outcome is Outcome.COMPLETED for row in rows):
        check_computed(rows, tokens * bench.step_s)
        how = "left" if leaving else "ended"
        why = next((row.error or row.outcome for row in visits if row not in went), "no end")
        raise CannotDecideError(f"only {len(went)} clients {how} while the streams ran: {why}")
    return rows


def were_there(rows: Rows, usual_s: float) -> bool:
    """Each answer came in far less than its usual time."""
    return all(row.ended_ns - row.sent_ns < 1e9 * usual_s / 2 for row in rows)


def check_computed(rows: Rows, usual_s: float) -> None:
    """Raises AnsweredBeforeError if the server had the answers already."""
    if were_there(rows, usual_s):
        raise AnsweredBeforeError(
            "the same requests are answered at once, as from a cache of answers: no stream "
            "runs while clients leave"
        )


def prompts(bench: Bench, streams: int, *, are_new: bool) -> range:
    """The numbers of the greedy streams' prompts."""
    first = bench.rng.randrange(1, _PROMPTS) * streams if are_new else 0
    return range(first, first + streams)


def alone(bench: Bench, *, are_new: bool = False) -> Rows:
    streams = bench.crowd(2 * MOST_STREAMS) // 2
    return one_by_one(bench, prompts(bench, streams, are_new=are_new), greedy_tokens(bench))


def greedy_tokens(bench: Bench) -> int:
    return QUICK_TOKENS if bench.is_quick else TOKENS


def visit(
    bench: Bench, streams: Sequence[LiveStream], seed: int, visits: Rows, *, leaving: bool
) -> None:
    """Requests come and go, one after the other, until all streams have ended or a request fails.
    A refused request fails, too, unless the server refuses what exceeds its slots."""
    rng = random.Random(seed)
    while not all(stream.has_ended for stream in streams):
        tokens = rng.randint(*VISIT_TOKENS)
        visitor = bench.start(leaver(bench, tokens) if leaving else bench.short(tokens))
        visitor.wait_tokens(tokens, READY_S)
        if leaving:
            bench.pause(rng.random() * bench.step_s)
            visitor.leave()
        if (row := visitor.join(READY_S)) is None:
            return
        visits.append(row)
        if bench.facts.refuses and is_refused(visitor):
            bench.pause(bench.step_s)  # the slot of the request before is not free yet
        elif row.outcome not in (Outcome.COMPLETED, Outcome.ABANDONED):
            return
