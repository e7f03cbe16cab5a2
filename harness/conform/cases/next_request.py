"""The request that comes after one that was left: its length, its text, its cache."""

from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any, Final

from harness.client.dialect import route
from harness.conform.bench import Bench
from harness.conform.bystanders import (
    Rows,
    compared,
    greedy_when_admitted,
    leave_each,
    leaver,
    lengths_of,
    one_by_one,
    rows_of,
    start_greedy,
    tokens_of,
)
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding, found
from harness.conform.routes import Reply, Routes
from harness.conform.stopping import MOST_FALSE_ALARM, false_alarm
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import READY_S
from harness.experiments.streams import STOP
from harness.store.conform_result import Failure, Level

ROUNDS: Final = 3
SHORT: Final = 8  # tokens
TEXT_TOKENS: Final = 16
MOST_BEFORE: Final = 16  # streams that leave or end before the next requests
CACHED_PROMPT: Final = 2000
FIRST_NUMBER: Final = 100  # of the prompts here
STOPPED_AFTER: Final = 64  # pieces
TEMPLATE_TOKENS: Final = 12  # that a chat template may put around an empty answer


@case(
    "next/length",
    Level.MUST,
    "The next request gets all the tokens that it asked for.",
    wire="As many requests of 8 tokens as slots queue behind full slots; the streams before them "
    "are left, or, in the control, end; as many more are sent right then.",
    passes="each gets 8 tokens, as in the control; an answer that ends with `stop` counts only if "
    "many do, and none in the control",
    methods="R",
    remedy="reset the state of a slot before the next request gets it",
    why="State of the request that was left, such as its stop flag, can end the next request.",
    caught=reports("tenstorrent/tt-inference-server#3605"),
)
def length(bench: Bench) -> Finding:
    control = queued_behind(bench, SHORT, leaving=False)
    rows = [row for _ in range(ROUNDS) for row in queued_behind(bench, SHORT, leaving=True)]
    return judge_lengths(control, rows)


def judge_lengths(control: Rows, rows: Rows) -> Finding:
    """Raises CannotDecideError."""
    if (least := min(lengths_of(control), default=SHORT)) < SHORT:
        raise CannotDecideError(f"without any leave, too, a request got {least} of {SHORT} tokens")
    got = lengths_of(rows)
    stopped, usual = (sum(row.finish_reason == STOP for row in some) for some in (rows, control))
    if stopped and not usual and false_alarm(stopped, len(rows), len(control)) <= MOST_FALSE_ALARM:
        got = [tokens_of(row) for row in rows]
    if not got:
        raise CannotDecideError("each answer ended by itself, with `stop`, before its length")
    short = [tokens for tokens in got if tokens < SHORT]
    said = f"{len(short)} of {len(got)} requests got fewer than {SHORT} tokens: {min(got)}"
    evidence: Evidence = {"requests": len(got), "cut_short": len(short), "fewest_tokens": min(got)}
    if stopped:
        evidence["ended_with_stop"] = stopped
    good = f"{len(got)} requests got their {SHORT} tokens"
    return found(good, said if short else None, evidence, Failure.HARM)


@case(
    "next/text",
    Level.MUST,
    "A freed slot carries nothing over to the next request.",
    wire="As many greedy requests as slots queue behind full slots whose streams are left, and as "
    "many more are sent right then. In the control the streams end. Both again if a text differs.",
    passes="each text is that of the control",
    methods="R",
    remedy="reset the state of a slot before the next request gets it",
    why="Penalties, a grammar or a block of the request that was left can colour the next answer.",
    quick=True,
    caught=reports("sgl-project/sglang#35049 sgl-project/sglang#33547"),
)
def text(bench: Bench) -> Finding:
    return compared(
        lambda: queued_behind(bench, TEXT_TOKENS, leaving=False),
        lambda: queued_behind(bench, TEXT_TOKENS, leaving=True),
        alone=lambda: alone(bench),
        whose="requests that came next",
        settle=bench.cleaning.rest,
    )


def queued_behind(bench: Bench, tokens: int, *, leaving: bool) -> Rows:
    """Greedy requests that get the slots of streams that were left, or have ended: as many as slots
    queue behind them, and as many come right after the leaves."""
    visit = 2 * SHORT + int(bench.ttft_s / bench.step_s)
    asked = leaver(bench, visit) if leaving else bench.short(visit)
    slots = bench.crowd(MOST_BEFORE)
    may_wait = _may_wait(bench)
    bench.filling.fill(bench.slots - slots if bench.facts.can_fill else 0)
    before = [bench.start(asked) for _ in range(slots)]
    for stream in before:
        stream.wait_tokens(1, READY_S)
    numbers = numbers_of(slots)
    queued = start_greedy(bench, numbers, tokens) if may_wait else []
    bench.pause(bench.ttft_s + bench.step_s)
    if leaving:
        leave_each(bench, before, within_s=bench.step_s)
    if not may_wait:
        return greedy_when_admitted(bench, numbers, tokens)
    queued += start_greedy(bench, numbers, tokens)
    return rows_of(queued)


def alone(bench: Bench) -> Rows:
    rows = one_by_one(bench, numbers_of(bench.crowd(MOST_BEFORE)), TEXT_TOKENS)
    return [*rows, *rows] if _may_wait(bench) else rows


def _may_wait(bench: Bench) -> bool:
    """Requests for the slots of all that leave, and as many more."""
    return bench.lets_wait(2 * bench.crowd(MOST_BEFORE))


def numbers_of(slots: int) -> range:
    return range(FIRST_NUMBER, FIRST_NUMBER + slots)


@case(
    "prefix/survives",
    Level.INFO,
    "A stopped turn leaves its prompt in the cache.",
    wire="A prompt of 2,000 tokens is sent, and its answer left after 8; then the prompt is sent "
    "again, with a question behind it. Three times, and once more for `cached_tokens`.",
    passes="not judged; the evidence has the ratio of the two times to first token",
    methods="R",
    why="Users stop an answer and ask again; without the cache the prompt is computed twice.",
    caught=reports("ggml-org/llama.cpp#29163"),
)
def survives(bench: Bench) -> Finding:
    ratios = []
    for turn in (1, 2, 3):
        prompt, cold_ns = stopped_turn(bench, turn)
        row = bench.whole(bench.short(4), f"{prompt} And then?")
        if row.first_token_ns is None:
            raise CannotDecideError("the next turn has no token")
        ratios.append((row.first_token_ns - row.sent_ns) / cold_ns)
    evidence: Evidence = {"ttft_ratio": round(median(ratios), 3)}
    if bench.session.plan.target.http:
        prompt, _ = stopped_turn(bench, 4)
        answer = Routes(bench.session.plan, bench.known).complete(
            f"{prompt} And then?", max_tokens=1
        )
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        evidence["cached_tokens"] = details.get("cached_tokens")
    said = f"the next turn's first token takes {median(ratios):.2f} times that of the first turn"
    return Finding(None, said, evidence)


def stopped_turn(bench: Bench, turn: int) -> tuple[str, int]:
    """A new prompt, whose answer was left, and its time to first token in nanoseconds."""
    asked = leaver(bench, SHORT, prompt_tokens=CACHED_PROMPT, user=turn)
    prompt = bench.session.prompt(asked, n=bench.session.sent)
    stopped = bench.start(asked, prompt)
    stopped.wait_tokens(SHORT, READY_S)
    (left,) = leave_each(bench, [stopped], within_s=bench.step_s)
    if left.first_token_ns is None:
        raise CannotDecideError("the first turn has no token")
    return prompt, left.first_token_ns - left.sent_ns


@case(
    "session/clean",
    Level.SHOULD,
    "A stopped answer's text is not in the context of the next turn.",
    wire="A stored answer of /v1/responses is left after 64 pieces; a next turn names it as its "
    "previous one. A control does so with a whole answer.",
    passes="the next turn's prompt is as long as without the stopped text, or the server says that "
    "there is no such answer",
    methods="R",
    remedy="keep a stopped answer out of the stored conversation",
    why="A model that continues half a sentence answers a conversation that no user saw.",
    needs=("http",),
    caught=reports("sgl-project/sglang#36475"),
)
def session_clean(bench: Bench) -> Finding:
    plan = bench.session.plan
    return stop_a_turn(
        Routes(plan, bench.known),
        route(plan.target.path, "responses"),
        plan.model,
        long_tokens=bench.patience.answer_tokens,
        settle=lambda: bench.pause(bench.settle_s),
    )


def stop_a_turn(
    routes: Routes, path: str, model: str, *, long_tokens: int, settle: Callable[[], None]
) -> Finding:
    asked: dict[str, Any] = {"model": model, "input": "And what happened then?", "store": True}

    def turn(previous: str | None) -> Reply:
        chain = {} if previous is None else {"previous_response_id": previous}
        return routes.post(path, {**asked, **chain, "max_output_tokens": SHORT})

    first, alone = turn(None), turn(None)
    if first.status != 200:
        raise RefusedError(f"POST {path} was answered with status {first.status}")
    second = turn(first.body.get("id"))
    if prompt_of(second) <= prompt_of(alone):
        raise RefusedError("the server keeps no answers: `previous_response_id` changes nothing")
    stopped = stop(routes, path, {**asked, "max_output_tokens": long_tokens, "stream": True})
    settle()
    after = turn(stopped)
    clean = prompt_of(second) - int(first.body["usage"]["output_tokens"])
    said = f"the next turn's prompt has {prompt_of(after)} tokens, {clean} without the stopped text"
    is_clean = after.status == 200 and prompt_of(after) <= clean + TEMPLATE_TOKENS
    return found(
        f"a stopped answer cannot be continued (status {after.status})"
        if after.is_refused
        else said,
        None if after.is_refused or is_clean else f"{said} (status {after.status})",
        {"status": after.status, "prompt_tokens": prompt_of(after), "clean_prompt_tokens": clean},
        Failure.HARM,
    )


def prompt_of(reply: Reply) -> int:
    return int((reply.body.get("usage") or {}).get("input_tokens", 0))


def stop(routes: Routes, path: str, asked: dict[str, Any]) -> str | None:
    """Leave a streamed answer; its id."""
    name, pieces = None, 0
    with closing(routes.events(path, asked)) as events:
        for event in events:
            if not isinstance(event, dict):
                continue
            response = event.get("response")
            name = name or (response.get("id") if isinstance(response, dict) else None)
            pieces += "delta" in event
            if pieces >= STOPPED_AFTER:
                return name
    raise CannotDecideError("the answer that was to be stopped ended by itself")
