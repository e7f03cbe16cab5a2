"""What several cases share: clients that leave in numbers, and bystanders, which stay.

Method B, bystander: greedy streams run while other clients leave, and are compared with a control
in which nobody leaves. Some servers' texts depend on the batch. So a changed text counts against
the server only if it comes twice and the control repeats itself, also without a neighbour. Where
the control does not repeat itself, texts must change far more often with leaves than without.
"""

import time
from collections.abc import Callable, Sequence
from math import comb
from typing import Any, Final, TypeVar

from harness.client.live_stream import LiveStream
from harness.client.session import canary_prompt
from harness.conform.bench import Bench
from harness.conform.finding import Evidence, Finding
from harness.experiments.idle_server import was_refused
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import READY_S
from harness.experiments.streams import STOP, whole
from harness.records import Delivery, Outcome, RequestRow, Role, Way
from harness.store.conform_result import Failure
from harness.workload.abandon import RequestSpec

MOST_AT_ONCE: Final = 8  # clients, where it does not matter how many
SPREAD_STEPS: Final = 8  # over which a wave's clients leave, after the time to first token
_SPARE_S: Final = 0.3  # for which an answer still lasts when its client leaves
_SPARE_TOKENS: Final = (12, 24)  # the fewest and the most tokens for that
SHOWN: Final = 200  # characters
_CERTAIN: Final = 0.001  # a chance below which texts differ because of the leaves
_LIKELY: Final = 0.05  # above it they do not
NO_GREEDY: Final = (
    "the server has no greedy text: answers to one prompt differ from their first word on"
)
UNLIKE_TEXTS: Final = "texts differ without any leave, too, and are not compared"
_AGAIN_S: Final = 0.1  # at least, between a refusal and the same request once more
Rows = list[RequestRow]
Answered = TypeVar("Answered", bound=RequestRow | None)


class UnlikeTextsError(CannotDecideError):
    """All streams are whole, but none has its text from one run to the next."""


class NoGreedyTextError(UnlikeTextsError, RefusedError):
    """The server draws its answers at random, whatever the request asks for."""


def differ_at_once(one: str, other: str) -> bool:
    """Two greedy answers to one prompt differ in their first word. Rounding, which depends on the
    batch, shows later as a rule."""
    return one.split()[:1] != other.split()[:1]


def leaver(bench: Bench, tokens: int = 0, **changes: Any) -> RequestSpec:
    """A request whose client leaves after `tokens` tokens. The length of its answer does not
    matter, so it is short on a server that never stops."""
    if bench.known.never_stops is None:
        return bench.long(**changes)
    fewest, most = _SPARE_TOKENS
    spare = max(fewest, min(most, int(_SPARE_S / bench.step_s)))
    return bench.short(tokens + spare, **changes)


def leave_after(
    bench: Bench, count: int, tokens: int, *, delivery: Delivery = Delivery.STREAM
) -> list[RequestRow]:
    """`count` clients leave, each within a step of reading `tokens` tokens (unary: after the time
    that these take). Raises CannotDecideError if a client does not leave."""
    rows: list[RequestRow] = []
    while len(rows) < count:
        some = min(bench.facts.slots or MOST_AT_ONCE, MOST_AT_ONCE, count - len(rows))
        asked = leaver(bench, tokens, delivery=delivery)
        streams = [bench.start(asked) for _ in range(some)]
        if delivery is Delivery.UNARY:
            bench.pause(bench.ttft_s + tokens * bench.step_s)
        else:
            wait_each(streams, tokens)
        left = leave_each(bench, streams, within_s=bench.step_s)
        if len(left) < some:
            raise CannotDecideError(f"{some - len(left)} of {some} requests ended by themselves")
        rows += left
    return rows


def read_whole(bench: Bench, count: int, tokens: int) -> None:
    """`count` answers of `tokens` tokens are read to the end of their connections."""
    some = min(bench.facts.slots or MOST_AT_ONCE, MOST_AT_ONCE)
    for first in range(0, count, some):
        for stream in [bench.start(bench.short(tokens)) for _ in range(min(some, count - first))]:
            joined(stream)


def rows_of(streams: Sequence[LiveStream]) -> Rows:
    """Raises CannotDecideError if a stream does not end, or was refused."""
    rows = []
    for stream in streams:
        if (row := stream.join(READY_S)) is None:
            raise CannotDecideError(f"a request was not answered in {READY_S:g} s")
        if row.outcome is Outcome.REJECTED:
            raise CannotDecideError(f"a request was refused: {row.error}")
        rows.append(row)
    return rows


def lengths_of(rows: Rows) -> list[int]:
    """Tokens of the answers that did not end by themselves."""
    return [tokens_of(row) for row in rows if row.finish_reason != STOP]


def tokens_of(row: RequestRow) -> int:
    """The tokens by the server's count, or else by the events."""
    return row.completion_tokens or row.tokens_read


def joined(stream: LiveStream) -> RequestRow:
    """Raises CannotDecideError unless the stream is answered whole."""
    return whole(rows_of([stream])[0], "a request")


def start_greedy(
    bench: Bench, numbers: Sequence[int], tokens: int, *, way: Way | None = None
) -> list[LiveStream]:
    """Streams of the most likely tokens, one per number; each number has a prompt of its own."""
    asked = bench.short(tokens, role=Role.CANARY, way=way)
    size, scale = asked.prompt_tokens, bench.session.plan.prompt_scale
    return [bench.start(asked, canary_prompt(one, tokens=size, scale=scale)) for one in numbers]


def one_by_one(bench: Bench, numbers: Sequence[int], tokens: int) -> Rows:
    """The streams of `start_greedy`, one after the other, while no other request runs."""
    return [rows_of(start_greedy(bench, [one], tokens))[0] for one in numbers]


def greedy_when_admitted(bench: Bench, numbers: Sequence[int], tokens: int) -> Rows:
    """The same streams on a server that refuses requests beyond its slots: each request is sent
    until the server takes it."""
    until_s = time.perf_counter() + bench.patience.filler_s
    rows: dict[int, RequestRow] = {}
    while len(rows) < len(numbers):
        missing = [one for one in numbers if one not in rows]
        streams = start_greedy(bench, missing, tokens)
        for number, stream in zip(missing, streams, strict=True):
            row = stream.join(READY_S)
            is_late = time.perf_counter() > until_s
            if row is None or row.outcome is not Outcome.REJECTED or is_late:
                rows[number] = rows_of([stream])[0]
        bench.pause(bench.step_s)
    return [rows[number] for number in numbers]


def when_admitted(bench: Bench, send: Callable[[], Answered], *, other_s: float = 0.0) -> Answered:
    """What `send` returns. A refused request is sent again for as long as a slot is waited for: its
    slot, or its place in the queue, may come back a moment after a leave. `other_s`: the time for
    which another request may have the slot first."""
    until_s = time.monotonic() + bench.patience.filler_s + other_s
    while True:
        row = send()
        if row is None or not was_refused(row) or time.monotonic() > until_s:
            return row
        bench.pause(max(bench.step_s, _AGAIN_S))


def compared(
    control: Callable[[], Rows],
    act: Callable[[], Rows],
    seen: Callable[[RequestRow], object] = lambda row: row.answer,
    *,
    alone: Callable[[], Rows],
    what: str = "text",
    whose: str = "streams that stayed",
    settle: Callable[[], None],
) -> Finding:
    """Method B: compares what is `seen` of the act's streams with the same of the control's
    streams. A stream of the act that is not whole is red at once. `alone`: the same streams one by
    one. `whose`: what these streams are, in words. `settle` waits until the leaves have no effect
    any more. Raises CannotDecideError."""
    before = control()
    first = _beside(before, act(), seen, what, whose)
    if "changed" not in first.evidence:
        return first
    settle()
    again = control()
    if what == "text" and all(map(_differ_at_once, before, again)):
        raise NoGreedyTextError(NO_GREEDY)
    own = max(_num_changed(before, again, seen), _num_changed(before, alone(), seen))
    second = _beside(again, act(), seen, what, whose)
    if second.failure is not None and "changed" not in second.evidence:
        return second
    if own:
        changed = sum(int(one.evidence.get("changed") or 0) for one in (first, second))
        return _more_often(changed, own, len(before), what)
    if second.failure is None:
        raise CannotDecideError(f"{first.reason}, but not a second time")
    return second


def _differ_at_once(one: RequestRow, other: RequestRow) -> bool:
    return differ_at_once(one.answer or "", other.answer or "")


def _num_changed(before: Rows, rows: Rows, seen: Callable[[RequestRow], object]) -> int:
    return sum(seen(one) != seen(other) for one, other in zip(before, rows, strict=True))


def _more_often(changed: int, own: int, streams: int, what: str) -> Finding:
    """Fisher's exact test. `changed`: streams of the two acts that differ from their control.
    `own`: streams that differ between two runs without leaves. Raises CannotDecideError."""
    if own == streams:
        raise UnlikeTextsError(f"each {what} differs between two runs without any leave")
    chance = chance_of(changed, 2 * streams, of_all=changed + own, among=3 * streams)
    shares = (
        f"{changed} of {2 * streams} differ from the control, and without any leave "
        f"{own} of {streams}"
    )
    evidence: Evidence = {"streams": 2 * streams, "changed": changed, "changed_without_leaves": own}
    if chance < _CERTAIN:
        return Finding(Failure.HARM, f"a {what} changes with leaves: {shares}", evidence)
    if chance < _LIKELY:
        raise CannotDecideError(f"a {what} may change with leaves: {shares}")
    return Finding(None, f"this server's {what}s vary, but not with leaves: {shares}", evidence)


def chance_of(hits: int, drawn: int, *, of_all: int, among: int) -> float:
    """The probability that chance alone puts `hits` or more of all hits (`of_all`) into the `drawn`
    ones `among` all: the upper tail of the hypergeometric distribution."""
    ways = (
        comb(drawn, more) * comb(among - drawn, of_all - more)
        for more in range(hits, min(drawn, of_all) + 1)
    )
    return sum(ways) / comb(among, of_all)


def _beside(
    before: Rows, rows: Rows, seen: Callable[[RequestRow], object], what: str, whose: str
) -> Finding:
    if any(row.outcome is not Outcome.COMPLETED for row in before):
        raise CannotDecideError("a stream of the control was not answered whole")
    says_why = all(row.finish_reason for row in before)
    evidence: Evidence = {"streams": len(rows)}
    for row in rows:
        if row.outcome is not Outcome.COMPLETED or (says_why and not row.finish_reason):
            how = row.error or "it has no finish reason"
            return Finding(Failure.HARM, f"one of the {whose} was cut: {how}", evidence)
    pairs = zip(map(seen, before), map(seen, rows), strict=True)
    changed = [(str(was), str(now)) for was, now in pairs if was != now]
    if not changed:
        return Finding(None, f"{len(rows)} streams have the {what} of the control", evidence)
    was, now = changed[0]
    evidence |= {"changed": len(changed), "control": was[:SHOWN], "beside_leaves": now[:SHOWN]}
    said = f"the {what} of {len(changed)} of {len(rows)} {whose} is not the control's"
    return Finding(Failure.HARM, said, evidence)


def wait_each(streams: Sequence[LiveStream], tokens: int) -> None:
    """Raises CannotDecideError unless each stream gets `tokens` tokens."""
    if not all(stream.wait_tokens(tokens, READY_S) for stream in streams):
        raise CannotDecideError(f"a stream did not get {tokens} tokens")


def leave_each(
    bench: Bench, streams: Sequence[LiveStream], *, within_s: float = 0.0
) -> list[RequestRow]:
    """Each client leaves at a random moment within this time. Returns the rows of the clients that
    left; raises CannotDecideError unless half of the clients did."""
    started_s = time.perf_counter()
    moments = sorted((bench.rng.random() * within_s, number) for number in range(len(streams)))
    for moment_s, number in moments:
        bench.pause(max(0.0, started_s + moment_s - time.perf_counter()))
        streams[number].leave()
    rows = [stream.join(READY_S) for stream in streams]
    left = [row for row in rows if row is not None and row.outcome is Outcome.ABANDONED]
    if 2 * len(left) < len(rows):
        ended = next((row for row in rows if row is not None and row not in left), None)
        why = "no end" if ended is None else ended.error or ended.outcome
        raise CannotDecideError(f"only {len(left)} of {len(rows)} clients could leave: {why}")
    return left


def wave(bench: Bench, asked: RequestSpec | None = None, *, steps: int = SPREAD_STEPS) -> int:
    """As many clients as slots leave: in the queue, in their prefill, or within the first
    tokens of their answers. `asked`: what each asks for (default: a long answer).
    Returns how many left."""
    streams = _start(bench, asked)
    bench.pause(0)  # the requests go out
    spread_s = bench.ttft_s + steps * bench.step_s
    return len(leave_each(bench, streams, within_s=spread_s))


def storm(bench: Bench, asked: RequestSpec | None = None) -> int:
    """As many clients as slots run (where they get that far), and as many queue; all leave at once.
    `asked`: what each asks for (default: a long answer). Returns how many left."""
    running = _start(bench, asked)
    until_s = time.perf_counter() + bench.patience.probe_s
    for stream in running:
        stream.wait_tokens(1, max(0.0, until_s - time.perf_counter()))
    queued = _start(bench, asked)
    bench.pause(bench.ttft_s + bench.step_s)
    return len(leave_each(bench, [*running, *queued]))


def _start(bench: Bench, asked: RequestSpec | None) -> list[LiveStream]:
    return [bench.start(asked or bench.long()) for _ in range(bench.crowded)]
