"""Clients that leave in numbers, those that stay beside them, and the memory that is left behind:
what several cases do.

Method B, bystander: greedy streams beside clients that leave, against a control without. Servers
whose texts depend on the batch repeat themselves only by chance. So another text is held against a
server only if it comes twice, while the control repeats itself.

Method K, capacity: as many requests as slots start at once, all with prompts of one length. They
fit if all get their first token in time, while all of them run: then none waited for memory. The
longest prompts that fit are found by bisection; the server's context must not be the limit.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from harness.conform.bench import Bench, whole
from harness.conform.facts import READY_S
from harness.conform.finding import Evidence, Finding
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.load.live import LiveStream
from harness.load.session import canary_prompt
from harness.records import Delivery, Outcome, RequestRow, Role, Way
from harness.store.conform_result import Failure

MOST_AT_ONCE: Final = 8  # clients, where it does not matter how many
SPREAD_STEPS: Final = 8  # of the moments at which a wave's clients leave
LONGEST_PROMPT: Final = 2000  # tokens
LONGEST_PREFILL_S: Final = 8.0  # of all slots together
LONGER: Final = 2  # times the time that the prompts take, before a wait is one for memory
HELD_TOKENS: Final = 16  # beyond that time
SHOWN: Final = 200  # characters
Rows = list[RequestRow]


def leave_after(
    bench: Bench, count: int, tokens: int, *, delivery: Delivery = Delivery.STREAM
) -> list[RequestRow]:
    """So many clients leave, each within a step after it has read so many tokens (unary: after the
    time of so many). Raises CannotDecideError if one does not."""
    rows: list[RequestRow] = []
    while len(rows) < count:
        some = min(bench.facts.slots or MOST_AT_ONCE, MOST_AT_ONCE, count - len(rows))
        streams = [bench.start(bench.long(delivery=delivery)) for _ in range(some)]
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
    """So many answers of so many tokens, read to the end of their connections."""
    some = min(bench.facts.slots or MOST_AT_ONCE, MOST_AT_ONCE)
    for first in range(0, count, some):
        for stream in [bench.start(bench.short(tokens)) for _ in range(min(some, count - first))]:
            joined(stream)


def rows_of(streams: Sequence[LiveStream]) -> Rows:
    """Raises CannotDecideError if one does not end, or was refused."""
    rows = []
    for stream in streams:
        if (row := stream.join(READY_S)) is None:
            raise CannotDecideError(f"a request was not answered in {READY_S:g} s")
        if row.outcome is Outcome.REJECTED:
            raise CannotDecideError(f"a request was refused: {row.error}")
        rows.append(row)
    return rows


def joined(stream: LiveStream) -> RequestRow:
    """Raises CannotDecideError unless it is answered whole."""
    return whole(rows_of([stream])[0], "a request")


def start_greedy(
    bench: Bench, numbers: Sequence[int], tokens: int, *, way: Way | None = None
) -> list[LiveStream]:
    """Streams of the most likely tokens; each number has a prompt."""
    asked = bench.short(tokens, role=Role.CANARY, way=way)
    size, scale = asked.prompt_tokens, bench.session.plan.prompt_scale
    return [bench.start(asked, canary_prompt(one, tokens=size, scale=scale)) for one in numbers]


def compared(
    control: Callable[[], Rows],
    act: Callable[[], Rows],
    seen: Callable[[RequestRow], object] = lambda row: row.answer,
    *,
    what: str = "text",
    settle: Callable[[], None],
) -> Finding:
    """Method B: what is `seen` of the streams of the act, against those of the control. A stream
    that is not whole is red at once. `settle` waits until the leaves have no effect any more.
    Raises CannotDecideError."""
    before = control()
    first = _beside(before, act(), seen, what)
    if "changed" not in first.evidence:
        return first
    settle()
    again = control()
    if list(map(seen, again)) != list(map(seen, before)):
        raise CannotDecideError(f"a {what} differs between two runs without any leave")
    second = _beside(again, act(), seen, what)
    if second.failure is None:
        raise CannotDecideError(f"{first.reason}, but not a second time")
    return second


def _beside(before: Rows, rows: Rows, seen: Callable[[RequestRow], object], what: str) -> Finding:
    if any(row.outcome is not Outcome.COMPLETED for row in before):
        raise CannotDecideError("a stream of the control was not answered whole")
    says_why = all(row.finish_reason for row in before)
    evidence: Evidence = {"streams": len(rows)}
    for row in rows:
        if row.outcome is not Outcome.COMPLETED or (says_why and not row.finish_reason):
            how = row.error or "it has no finish reason"
            return Finding(Failure.HARM, f"a stream that stayed was cut: {how}", evidence)
    pairs = zip(map(seen, before), map(seen, rows), strict=True)
    changed = [(str(was), str(now)) for was, now in pairs if was != now]
    if not changed:
        return Finding(None, f"{len(rows)} streams have the {what} of the control", evidence)
    was, now = changed[0]
    evidence |= {"changed": len(changed), "control": was[:SHOWN], "beside_leaves": now[:SHOWN]}
    said = f"the {what} of {len(changed)} of {len(rows)} streams that stayed is not the control's"
    return Finding(Failure.HARM, said, evidence)


def wait_each(streams: Sequence[LiveStream], tokens: int) -> None:
    """Raises CannotDecideError unless each gets so many."""
    if not all(stream.wait_tokens(tokens, READY_S) for stream in streams):
        raise CannotDecideError(f"a stream did not get {tokens} tokens")


def leave_each(
    bench: Bench, streams: Sequence[LiveStream], *, within_s: float = 0.0
) -> list[RequestRow]:
    """Each leaves at a random moment within this time. Returns the rows of those that did; raises
    CannotDecideError unless half of them did."""
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


def wave(bench: Bench, *, prompt_tokens: int | None = None) -> int:
    """As many clients as slots leave: in the queue, in their prefill, or between tokens. Returns
    how many did."""
    streams = _start(bench, prompt_tokens)
    bench.pause(0)  # the requests go out
    spread_s = bench.ttft_s + SPREAD_STEPS * bench.step_s
    return len(leave_each(bench, streams, within_s=spread_s))


def storm(bench: Bench, *, prompt_tokens: int | None = None) -> int:
    """As many clients as slots are running (where they get that far), and as many queue; all leave
    at once."""
    running = _start(bench, prompt_tokens)
    until_s = time.perf_counter() + bench.patience_s
    for stream in running:
        stream.wait_tokens(1, max(0.0, until_s - time.perf_counter()))
    queued = _start(bench, prompt_tokens)
    bench.pause(bench.ttft_s + bench.step_s)
    return len(leave_each(bench, [*running, *queued]))


def _start(bench: Bench, prompt_tokens: int | None) -> list[LiveStream]:
    size = {} if prompt_tokens is None else {"prompt_tokens": prompt_tokens}
    return [bench.start(bench.long(**size)) for _ in range(bench.slots)]


class Memory:
    """Method K. `prompt_tokens`: the longest prompt of which as many as slots fit at once.

    Raises RefusedError if memory is not what limits this server.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        context = bench.facts.context or 2 * LONGEST_PROMPT
        longest = min(LONGEST_PROMPT, 3 * context // 4)
        row = bench.whole(bench.short(1, prompt_tokens=longest))
        assert row.first_token_ns is not None
        self._token_s = (row.first_token_ns - row.sent_ns) / 1e9 / longest
        if bench.slots * longest * self._token_s > LONGEST_PREFILL_S:
            raise CannotDecideError(
                f"{bench.slots} prompts of {longest} tokens take too long to fill its memory"
            )
        if bench.fitting_prompt is not None and self.fits(bench.fitting_prompt):
            self.prompt_tokens = bench.fitting_prompt  # found by a case before
            return
        if self.fits(longest):
            raise RefusedError(
                f"{bench.slots} contexts of {longest} tokens fit at once: its slots, not its "
                "memory, are the limit"
            )
        self.prompt_tokens = bench.fitting_prompt = self.find(longest)

    @property
    def tokens(self) -> int:
        return self._bench.slots * self.prompt_tokens

    def find(self, too_long: int) -> int:
        fitting = 0
        while too_long - fitting > max(16, too_long // 8):
            middle = (fitting + too_long) // 2
            fitting, too_long = (middle, too_long) if self.fits(middle) else (fitting, middle)
        if not fitting:
            raise CannotDecideError(f"not even {self._bench.slots} short contexts fit at once")
        return fitting

    def fits(self, prompt_tokens: int | None = None) -> bool:
        """They end by themselves: left, they could themselves hold memory. Only those that have to
        wait are left, since they hold none."""
        bench, size = self._bench, prompt_tokens or self.prompt_tokens
        longest_s = LONGER * bench.slots * size * self._token_s + HELD_TOKENS * bench.step_s
        tokens = int(longest_s / bench.step_s) + HELD_TOKENS
        until_s = time.perf_counter() + longest_s
        streams = [bench.start(bench.short(tokens, prompt_tokens=size)) for _ in range(bench.slots)]
        waiting = [
            stream
            for stream in streams
            if not stream.wait_tokens(1, max(0.0, until_s - time.perf_counter()))
        ]
        for stream in waiting:
            stream.leave()
        for stream in streams:
            if stream in waiting:
                stream.join(READY_S)
            else:
                joined(stream)
        return not waiting
