"""What clients that stay notice of those that leave beside them.

Half of the slots read greedily. In the others short requests come and go: clients leave after a few
tokens, or, in the control, their answers are so long. So batches have the same sizes in both, and
the control differs by the cancels alone.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from threading import Thread
from typing import Final

import numpy as np

from harness.analysis.stats import mean_ci95
from harness.conform.bench import Bench
from harness.conform.case import CannotDecideError, Evidence, Finding, case, found, reports
from harness.conform.waves import READY_S, joined
from harness.load.live import LiveStream
from harness.load.session import canary_prompt
from harness.records import Outcome, RequestRow, Role
from harness.store.conform_result import Failure, Level

TOKENS: Final = 96  # of a greedy answer
VISIT_TOKENS: Final = (3, 12)  # of those that come and go
PROMPT_TOKENS: Final = 24
MOST_RATIO: Final = 1.5
FEWEST_TURNS, MOST_TURNS = 3, 8
SHOWN: Final = 200  # characters


@case(
    "bystander/text",
    Level.MUST,
    "The text of other clients does not change when clients leave.",
    wire="Greedy streams in half of the slots, three times: twice beside answers that end, then "
    "beside clients that leave.",
    passes="each text is that of the controls",
    methods="B",
    why="A block that is reused before its last step has ended mixes two users' texts.",
    caught=reports(
        "sgl-project/sglang#35049 vllm-project/vllm-ascend#14055 vllm-project/tpu-inference#3449"
    ),
)
def text(bench: Bench) -> Finding:
    control, again, storm = (
        [row.answer or "" for row in beside(bench, leaving=leaving)]
        for leaving in (False, False, True)
    )
    if control != again:
        raise CannotDecideError("a greedy answer differs between two runs without any leave")
    return judge_texts(control, storm, "while other clients left")


def judge_texts(control: Sequence[str], texts: Sequence[str], when: str) -> Finding:
    changed = [pair for pair in zip(control, texts, strict=True) if pair[0] != pair[1]]
    evidence: Evidence = {"texts": len(texts), "changed": len(changed)}
    if changed:
        evidence |= {"control_text": changed[0][0][:SHOWN], "text": changed[0][1][:SHOWN]}
    said = f"{len(changed)} of {len(texts)} greedy texts changed {when}"
    good = f"{len(texts)} greedy texts are those of the control"
    return found(good, said if changed else None, evidence, Failure.HARM)


@case(
    "bystander/pace",
    Level.SHOULD,
    "Other clients are not slowed when clients leave.",
    wire="Greedy streams in half of the slots, by turns beside answers that end and beside clients "
    "that leave.",
    passes="the p99 of the gaps between tokens is at most 1.5 times that of the control",
    methods="B",
    why="A cancel that stops the whole batch for a moment is paid by everybody else.",
    caught=reports("BerriAI/litellm#36429"),
)
def pace(bench: Bench) -> Finding:
    turns: list[tuple[float, float]] = []
    while True:
        turns.append((p99_gap(beside(bench, leaving=False)), p99_gap(beside(bench, leaving=True))))
        if len(turns) < FEWEST_TURNS:
            continue
        try:
            return judge_pace(turns)
        except CannotDecideError:
            if len(turns) >= MOST_TURNS:
                raise


def p99_gap(rows: Sequence[RequestRow]) -> float:
    gaps = [late - early for row in rows for early, late in pairwise(row.token_times_ns)]
    if not gaps:
        raise CannotDecideError("the answers came in one piece: they show no pace")
    return float(np.quantile(gaps, 0.99)) / 1e9


def judge_pace(turns: Sequence[tuple[float, float]]) -> Finding:
    """`turns`: the control's p99 and that beside clients that leave. The ratio is their geometric
    mean, with an interval over the turns."""
    logs = np.array([np.log(storm / control) for control, storm in turns])
    interval = mean_ci95(logs) or (-np.inf, np.inf)
    low, ratio, high = (float(np.exp(log)) for log in (interval[0], logs.mean(), interval[1]))
    told = f"the p99 gap is {ratio:.2f} times the control's (95 %: {low:.2f} to {high:.2f})"
    if low <= MOST_RATIO < high:
        raise CannotDecideError(f"{told}: too uneven to tell it from {MOST_RATIO}")
    evidence: Evidence = {
        "turns": len(turns),
        "p99_ratio": round(ratio, 3),
        "p99_ratio_low95": round(low, 3),
        "p99_ratio_high95": round(high, 3),
    }
    return found(told, told if low > MOST_RATIO else None, evidence, Failure.LATE)


@case(
    "bystander/ends",
    Level.MUST,
    "No other client's stream ends early when clients leave.",
    wire="Greedy streams in half of the slots, beside answers that end and beside clients that "
    "leave.",
    passes="all are whole, with the finish reasons and lengths of the control",
    methods="B W",
    why="An abort that hits the wrong request ends a stream whose client is still reading.",
    quick=True,
    caught=reports(
        "sgl-project/sglang#39216 openvinotoolkit/model_server#4428 vllm-project/vllm#43226"
    ),
)
def ends(bench: Bench) -> Finding:
    control, rows = beside(bench, leaving=False), beside(bench, leaving=True)
    if any(row.outcome is not Outcome.COMPLETED for row in control):
        raise CannotDecideError("a stream of the control was not answered whole")
    wrong = [row for was, row in zip(control, rows, strict=True) if end_of(row) != end_of(was)]
    evidence: Evidence = {"streams": len(rows), "cut_short": len(wrong)}
    if not wrong:
        return Finding(None, f"{len(rows)} streams were read to their end", evidence)
    first = wrong[0]
    how = first.error or f"finish reason {first.finish_reason}"
    said = f"{len(wrong)} of {len(rows)} streams that stayed ended otherwise: {how}"
    return Finding(Failure.HARM, said, evidence | {"tokens_read": first.tokens_read})


def end_of(row: RequestRow) -> tuple[Outcome, str | None, int | None]:
    return row.outcome, row.finish_reason, row.completion_tokens


def beside(bench: Bench, *, leaving: bool) -> list[RequestRow]:
    """The greedy streams' rows."""
    if bench.slots < 2:
        raise CannotDecideError("a server with one slot runs no two requests at once")
    streams = start_greedy(bench, range(bench.slots // 2), TOKENS)
    visitors = [
        Thread(target=visit, args=(bench, streams, number), kwargs={"leaving": leaving})
        for number in range(bench.slots - len(streams))
    ]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    return [stream.join(READY_S) or joined(stream) for stream in streams]


def start_greedy(bench: Bench, numbers: Sequence[int], tokens: int) -> list[LiveStream]:
    asked = bench.short(tokens, role=Role.CANARY, prompt_tokens=PROMPT_TOKENS)
    scale = bench.session.plan.prompt_scale
    texts = (canary_prompt(number, tokens=PROMPT_TOKENS, scale=scale) for number in numbers)
    return [bench.start(asked, text) for text in texts]


def visit(bench: Bench, streams: Sequence[LiveStream], seed: int, *, leaving: bool) -> None:
    """One request after the other comes and goes, as long as one of the streams lasts."""
    rng = random.Random(seed)
    while not all(stream.has_ended for stream in streams):
        tokens = rng.randint(*VISIT_TOKENS)
        visitor = bench.start(bench.long() if leaving else bench.short(tokens))
        if not visitor.wait_tokens(tokens, READY_S) and not visitor.has_ended:
            return
        if leaving:
            bench.pause(rng.random() * bench.step_s)
            visitor.leave()
        visitor.join(READY_S)
