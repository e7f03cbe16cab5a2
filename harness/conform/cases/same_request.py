"""The same greedy request once more, after a client with that request has left.

Each round has a new prompt, so that no cache knows it. The right text comes from two controls that
agree. Where the target names a body that bypasses the cache of prefixes (`uncached_body`), they
come after the leave, which so meets a prompt that the server has not seen. Else they come by turns
after it and before it, when a cache knows the prompt. What a client had read before it left is the
beginning of the right text, too: it was computed before anything was left behind.

A leave in the prefill of a prompt that no cache knows, which spoils the cache for good, is not seen
without `uncached_body`: nothing was read, and each later request meets what was left behind.
Another text counts only if it comes twice.
"""

from collections.abc import Callable
from dataclasses import replace
from secrets import randbits, token_hex
from typing import Any, Final

from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import (
    NO_GREEDY,
    SHOWN,
    NoGreedyTextError,
    differ_at_once,
    joined,
    leave_each,
    rows_of,
    wait_each,
    when_admitted,
)
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding
from harness.experiments.idle_server import was_refused
from harness.experiments.outcome import CannotDecideError
from harness.records import Outcome, RequestRow, Role
from harness.store.conform_result import Failure, Level
from harness.workload.abandon import RequestSpec

ROUNDS: Final = 2
MOST_ROUNDS: Final = 4
TEXT_TOKENS: Final = 12
MOST_TEXT_TOKENS: Final = 64  # where steps are short: a client must leave before the answer's end
TEXT_S: Final = 0.1
READ_TOKENS: Final = 4  # before a leave in the answer
BEFORE_TOKENS: Final = 16  # of the answers before the one that is left in the queue, at least
BEFORE_S: Final = 0.3  # that they last, at least
LONG_PROMPT: Final = 1024  # tokens; about half are computed when its client leaves
PREFILL_SHARES: Final = (0.2, 0.8)
_RANDOM: Final = "{random}"
CAUGHT: Final = reports("Blaizzy/mlx-vlm#2206")
PASSES: Final = (
    "the text is that of two controls, and begins as what was read before the leave; red only if "
    "it differs for two prompts, while the controls of each agree"
)
REMEDY: Final = "drop what a request that was left has computed, unless it is whole and right"

# Both get a request and its prompt, and return the row whose text is compared. In an `Act` a client
# leaves, and it also returns the stream that was left.
Ask = Callable[[RequestSpec, str], RequestRow]
Act = Callable[[RequestSpec, str], tuple[RequestRow, LiveStream]]


def same_text(bench: Bench, control: Ask, act: Act, *, prompt_tokens: int | None = None) -> Finding:
    """Raises CannotDecideError."""
    size = {} if prompt_tokens is None else {"prompt_tokens": prompt_tokens}
    tokens = max(TEXT_TOKENS, min(MOST_TEXT_TOKENS, int(TEXT_S / bench.step_s)))
    spec = bench.short(tokens, role=Role.CANARY, **size)
    changed: list[tuple[str, str]] = []
    rounds = 0
    while rounds < ROUNDS or (len(changed) == 1 and rounds < MOST_ROUNDS):
        bench.wire.begin_try(rounds)
        expected, seen = _one_round(bench, spec, control, act, is_known=rounds % 2 == 1)
        rounds += 1
        if seen != expected:
            changed.append((expected, seen))
    return judge_texts(changed, rounds)


def judge_texts(changed: list[tuple[str, str]], rounds: int) -> Finding:
    """`changed`: the control's text and the other one, of each round in which they differ."""
    evidence: Evidence = {"prompts": rounds, "changed": len(changed)}
    if not changed:
        return Finding(None, f"{rounds} prompts have the text of their controls", evidence)
    expected, seen = changed[0]
    evidence |= {"control": expected[:SHOWN], "after_the_leave": seen[:SHOWN]}
    said = f"{len(changed)} of {rounds} prompts have another text than that of their controls"
    if len(changed) == 1:
        raise CannotDecideError(f"{said}: it came only once")
    return Finding(Failure.HARM, said, evidence)


def _one_round(
    bench: Bench, spec: RequestSpec, control: Ask, act: Act, *, is_known: bool
) -> tuple[str, str]:
    """The text of the controls, and that of the act, or why it has none. `is_known`: a cache knows
    the prompt when its client leaves, if it cannot be bypassed."""
    text = bench.session.prompt(spec, n=randbits(32))  # new to a server that outlives this run
    bypass = bench.session.plan.target.uncached_body

    def controls() -> list[str]:
        rows = [control(replace(spec, body=uncached(bypass)), text) for _ in range(2)]
        return [row.answer or "" for row in rows]

    if is_known and not bypass:
        one, other = controls()
        row, left = act(spec, text)
    else:
        row, left = act(spec, text)
        one, other = controls()
    if differ_at_once(one, other):
        raise NoGreedyTextError(NO_GREEDY)
    if one != other:
        raise CannotDecideError("two controls of one greedy request, without any leave, differ")
    if was_refused(row):
        raise CannotDecideError(f"the request was refused after the leave: {row.error}")
    if row.outcome is not Outcome.COMPLETED:
        return one, f"({row.error or row.outcome})"
    seen = row.answer or ""
    begun = (left.row.answer if left.row is not None else None) or ""
    return one if seen.startswith(begun) else begun, seen


def uncached(bypass: dict[str, Any]) -> dict[str, Any] | None:
    """The fields with a new name in place of `{random}`."""
    if not bypass:
        return None
    return {
        key: value.replace(_RANDOM, token_hex(8)) if isinstance(value, str) else value
        for key, value in bypass.items()
    }


def left_first(bench: Bench, leave: Callable[[LiveStream], object]) -> Act:
    """A client asks and leaves, and then another one asks the same."""

    def act(spec: RequestSpec, text: str) -> tuple[RequestRow, LiveStream]:
        stream = bench.start(spec, text)
        leave(stream)
        return when_admitted(bench, lambda: bench.ask(spec, text)), stream

    return act


@case(
    "same/answer",
    Level.MUST,
    "A request whose client left in its answer has the same text when it is asked again.",
    wire="A greedy request is left after 4 tokens, and sent again. Its controls are two whole "
    "answers.",
    passes=PASSES,
    methods="R",
    why="A regenerate button asks for the same again. Caches of prefixes and of answers keep what "
    "the first attempt left behind.",
    remedy=REMEDY,
    caught=CAUGHT,
)
def in_answer(bench: Bench) -> Finding:
    def leave(stream: LiveStream) -> None:
        wait_each([stream], READ_TOKENS)
        leave_each(bench, [stream], within_s=bench.step_s)

    return same_text(bench, bench.whole, left_first(bench, leave))


@case(
    "same/prefill",
    Level.MUST,
    "A request whose client left in its prefill has the same text when it is asked again.",
    wire="A greedy request with a long prompt is left after 20 to 80 % of the time to first token "
    "of another prompt of that length, and sent again. Its controls are two whole answers.",
    passes=PASSES,
    methods="R",
    why="Blocks of a prompt that is half computed look to a cache like blocks of a whole one.",
    remedy=REMEDY,
    caught=CAUGHT,
)
def in_prefill(bench: Bench) -> Finding:
    tokens = min(LONG_PROMPT, bench.room(0) // 2)
    asked = bench.short(1, prompt_tokens=tokens)
    other = bench.whole(asked, bench.session.prompt(asked, n=randbits(32)))
    takes_s = ((other.first_token_ns or other.ended_ns) - other.sent_ns) / 1e9

    def leave(stream: LiveStream) -> None:
        bench.pause(bench.rng.uniform(*PREFILL_SHARES) * takes_s)
        leave_each(bench, [stream])

    return same_text(bench, bench.whole, left_first(bench, leave), prompt_tokens=tokens)


@case(
    "same/queue",
    Level.MUST,
    "A request whose client left the queue has the same text when it is asked again.",
    wire="A greedy request queues behind full slots and is left; when the answers before it have "
    "ended it is sent again. Its controls are two whole answers.",
    passes=PASSES,
    methods="R",
    why="What is prepared for a request in the queue, such as its cached prefix, is given back by "
    "another path than that of a running one.",
    remedy=REMEDY,
    caught=CAUGHT,
)
def in_queue(bench: Bench) -> Finding:
    bench.check_queues()

    def act(spec: RequestSpec, text: str) -> tuple[RequestRow, LiveStream]:
        lasts_s = bench.ttft_s + BEFORE_S
        tokens = max(BEFORE_TOKENS, int(lasts_s / bench.step_s))
        before = [bench.start(bench.short(tokens)) for _ in range(bench.slots)]
        wait_each(before, 1)
        queued = bench.start(spec, text)
        bench.pause(bench.ttft_s + bench.step_s)
        if queued.tokens:
            raise CannotDecideError("a request that should queue was served: slots were free")
        leave_each(bench, [queued])
        rows_of(before)
        bench.pause(spec.max_tokens * bench.step_s)  # a forgotten request runs no longer than this
        return when_admitted(bench, lambda: bench.ask(spec, text)), queued

    return same_text(bench, bench.whole, act)


@case(
    "same/twin",
    Level.MUST,
    "A request has its own text when its twin is left.",
    wire="Two clients send the same greedy request at once, and one of them leaves after 4 tokens, "
    "or, in the controls, has asked for no more.",
    passes=PASSES,
    methods="R",
    why="Twins share their prompt's blocks, and in some gateways one request to the server: what "
    "is taken from the one that left, the other still reads.",
    remedy="count the readers of what requests share, and free it with the last one",
    caught=CAUGHT,
)
def beside_twin(bench: Bench) -> Finding:
    def control(spec: RequestSpec, text: str) -> RequestRow:
        first = bench.start(replace(spec, max_tokens=READ_TOKENS + 1), text)
        second = bench.start(spec, text)
        wait_each([first, second], READ_TOKENS)
        return joined(second)

    def act(spec: RequestSpec, text: str) -> tuple[RequestRow, LiveStream]:
        first, second = bench.start(spec, text), bench.start(spec, text)
        wait_each([first, second], READ_TOKENS)
        leave_each(bench, [first])
        return rows_of([second])[0], first

    return same_text(bench, control, act)
