"""Streams on a server whose slots, step and first-token time are known."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median
from typing import Any, Final

import gevent

from harness.client.lag import LagWatch
from harness.client.live_stream import Drain, LiveStream, join_all
from harness.client.session import LoadSession
from harness.experiments.idle_server import (
    MOST_SLOTS,
    PROBE_TOKENS,
    PROMPT_TOKENS,
    ServerFacts,
    count_queue,
    was_closed,
    was_refused,
)
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import READY_S, SLOWER, Patience
from harness.records import Outcome, RequestRow, Role
from harness.workload.abandon import RequestSpec

_NO_LIMIT: Final = 1 << 20  # tokens of an unknown context
_NOT_OFFERED: Final = frozenset({400, 404, 405, 415, 422, 501})
LONGEST_PROBE_S: Final = 2.0  # a slot that comes back later is late whatever the settle time is
LONGEST_PROBE_STEPS: Final = 30
_SPARE_TOKENS: Final = 32  # that a stream may get beyond `longest_read` before it leaves
_PACE_TOKENS: Final = 32  # of a stream, which show its step
_LAST_WORDS_S: Final = 1.0  # of streams that were left
_QUICKER: Final = 0.8  # times the typical step
_NO_QUEUE: Final = 16  # requests that run at once, of a server without a limit that is known
STOP: Final = "stop"  # the finish reason of an answer that ended by itself, before its length


class Streams:
    """`facts` may change: slots may be lost. `settle_s`: the target's settle time. Reading `slots`
    raises CannotDecideError if the slots cannot be filled. `opened`: the streams started since the
    last `forget`. `fillers`: the streams that keep the slots full, from try to try. `_lengths`: of
    plain requests for long answers, the tokens of those that ended by themselves long before their
    limit; inf for one that lasted as long as the settle time."""

    def __init__(
        self, session: LoadSession, facts: ServerFacts, settle_s: float, *, lag: LagWatch
    ) -> None:
        self.session = session
        self.facts = facts
        self.lag = lag
        self.step_s, self.ttft_s = facts.step_s, facts.ttft_s
        self.opened: list[LiveStream] = []
        self.fillers: list[LiveStream] = []
        self.drain = Drain()
        self._ghosts_end_ns: list[int] = []
        self._lengths: list[float] = []
        self.patience = self.usual_patience(settle_s)
        self.settle_s = self.patience.settle_s

    def usual_patience(self, settle_s: float) -> Patience:
        """The patience with the server that `facts` describes."""
        facts = self.facts
        to_fill = min(facts.slots or 1, MOST_SLOTS) if facts.can_fill else 1
        patience = Patience.of(
            settle_s,
            self.session.plan.target.settle_steps,
            step_s=facts.step_s,
            begin_s=facts.ttft_s * to_fill,
            most_tokens=self.room(4 * PROMPT_TOKENS),
            ttft_s=facts.ttft_s,
        )
        longest_s = max(LONGEST_PROBE_S, LONGEST_PROBE_STEPS * facts.step_s)
        return patience._replace(probe_s=min(patience.probe_s, longest_s))

    @property
    def slots(self) -> int:
        slots = self.facts.slots
        if slots is None or not self.facts.can_fill:
            raise CannotDecideError(
                f"this case needs a server whose slots can be filled, but {self.facts.why}"
            )
        return slots

    def crowd(self, most: int) -> int:
        """A number of clients: one per slot, but at most `most`; `most` if slots are not known."""
        return min(self.facts.slots or most, most)

    def lets_wait(self, requests: int) -> bool:
        """Whether as many may queue. The first call for more than one counts the places, which
        takes a server at rest."""
        if requests > 1 and self.facts.has_queue and self.facts.queue is None:
            self.facts = self.facts._replace(queue=count_queue(self.session, self.facts))
        return self.facts.lets_wait(requests)

    def check_queues(self) -> None:
        """Raises RefusedError if no request of ours can wait in a queue."""
        facts = self.facts
        if facts.refuses:
            raise RefusedError("the server refuses a request beyond its slots; it has no queue")
        if facts.slots is None and facts.ran_at_once >= _NO_QUEUE:
            raise RefusedError(f"no queue within reach: {facts.why}")

    def check_runs_two(self) -> None:
        """Raises RefusedError if no request has a neighbour."""
        if self.facts.slots == 1:
            raise RefusedError("a server with one slot runs no two requests at once")

    @property
    def lag_s(self) -> float:
        """How late this client is, at the median of the latest seconds."""
        latest = self.lag.latest_ns
        return median(latest) / 1e9 if latest else 0.0

    def room(self, prompt_tokens: int) -> int:
        """The tokens of an answer that the server's context allows."""
        return (self.facts.context or _NO_LIMIT) - prompt_tokens

    def long(self, **changes: Any) -> RequestSpec:
        """A request whose answer runs on; `changes` are fields of RequestSpec."""
        tokens = self.patience.answer_tokens
        return replace(
            RequestSpec(user=0, max_tokens=tokens, prompt_tokens=PROMPT_TOKENS), **changes
        )

    @property
    def brief_tokens(self) -> int:
        """The length of an answer that just outlives both waits of a probe: behind the stream, and
        then for its slot. If the server does not stop the answer, the next case waits for its end.
        A first token may take its time before the queue, so `ttft_s` is in both waits."""
        patience = self.patience
        outlived = int((patience.outlives * patience.probe_s + 2 * self.ttft_s) / self.step_s)
        wanted = outlived + patience.longest_read + _SPARE_TOKENS
        return min(patience.answer_tokens, wanted)

    def short(self, tokens: int = 8, **changes: Any) -> RequestSpec:
        return self.long(**{"max_tokens": tokens, **changes})

    def probe(self) -> RequestSpec:
        return self.short(PROBE_TOKENS, role=Role.PROBE)

    def start(
        self, spec: RequestSpec, text: str | None = None, *, session: LoadSession | None = None
    ) -> LiveStream:
        """The answer ends with the server's context at the latest. `session`: a session with other
        settings than the usual one's."""
        tokens = max(1, min(spec.max_tokens, self.room(spec.prompt_tokens + PROMPT_TOKENS)))
        spec = replace(spec, max_tokens=tokens, user=spec.user or len(self.opened))
        stream = LiveStream(session or self.session, spec, text, partial(self._note_end, spec))
        self.opened.append(stream)
        return stream

    def _note_end(self, spec: RequestSpec, row: RequestRow) -> None:
        if self.facts.closes and was_closed(row):
            row.outcome = Outcome.REJECTED
        is_long = spec.max_tokens >= self.patience.answer_tokens / 2
        if row.first_token_ns is None or not is_long or spec.body or spec.path is not None:
            return
        end_ns = row.ended_ns if row.abandoned_ns is None else row.abandoned_ns
        if end_ns - row.first_token_ns >= self.settle_s * 1e9:
            self._lengths.append(inf)
        elif row.finish_reason == STOP and row.tokens_read < spec.n * spec.max_tokens / 2:
            self._lengths.append(row.tokens_read / spec.n)

    def pause(self, seconds: float) -> None:
        gevent.sleep(seconds)

    def ask(
        self, spec: RequestSpec, text: str | None = None, *, session: LoadSession | None = None
    ) -> RequestRow:
        """Send it and read its answer whole. Raises CannotDecideError if that takes too long."""
        stream = self.start(spec, text, session=session)
        limit_s = READY_S + 4 * (self.ttft_s + spec.max_tokens * self.step_s)
        row = stream.join(limit_s)
        if row is None:
            raise CannotDecideError(f"a request was not answered in {limit_s:.0f} s")
        return row

    def whole(
        self, spec: RequestSpec, text: str | None = None, *, session: LoadSession | None = None
    ) -> RequestRow:
        """Like `ask`; raises CannotDecideError unless the request is answered whole."""
        return whole(self.ask(spec, text, session=session), "a request of the set-up")

    def offered(self, spec: RequestSpec, what: str, text: str | None = None) -> RequestRow:
        """The whole answer. Raises RefusedError if the server says that it does not offer this."""
        row = self.ask(spec, text)
        if row.status_code in _NOT_OFFERED:
            raise RefusedError(f"{what}: {row.error}")
        return whole(row, what)

    def serves(self) -> bool:
        """A short request is answered, however long it waits for a slot."""
        row = self.start(self.short()).join(READY_S)
        return row is not None and row.outcome is Outcome.COMPLETED

    def tokens_left(self, stream: LiveStream) -> float:
        """The tokens still to come. For a drained stream they are estimated from the time."""
        left = stream.spec.max_tokens - stream.tokens
        if stream in self.drain.streams and stream.last_token_ns is not None:
            left -= int((time.perf_counter_ns() - stream.last_token_ns) / 1e9 / self._pace_s())
        return left

    def _pace_s(self) -> float:
        """The step of the streams that are read, or a short one: it may have changed."""
        for one in self.fillers:
            if one not in self.drain.streams and one.tokens > _PACE_TOKENS:
                span_ns = one.token_times_ns[-1] - one.token_times_ns[0]
                return min(self.step_s, max(span_ns, 1) / 1e9 / one.tokens)
        return self.step_s / 2

    def together(self, acts: Sequence[Callable[[], object]]) -> None:
        """Run all `acts` at once, until all are done. Raises what the first failing act raises."""
        if len(acts) == 1:
            acts[0]()
            return
        gevent.joinall([gevent.spawn(act) for act in acts], raise_error=True)

    def ghosts(self) -> int:
        """Requests that left and whose answers could still run, if the server did not stop them."""
        now_ns = time.perf_counter_ns()
        ends = [*self._ghosts_end_ns, *self._ends_of_left()]
        return sum(end_ns > now_ns for end_ns in ends)

    def could_run(self, most: float = inf, *, at_ns: int | None = None) -> bool:
        """Whether an answer that was left would still run now (or `at_ns`), on a server that does
        not stop it and is quicker than it was. `most`: the tokens after which answers end by
        themselves. Several answers to one request run at once."""
        now_ns = time.perf_counter_ns() if at_ns is None else at_ns
        step_ns = 1e9 * _QUICKER * self.step_s
        return any(
            left_ns + step_ns * (min(spec.max_tokens, most) - row.tokens_read / spec.n) > now_ns
            for spec, row, left_ns in self._left()
        )

    def check_ran_on(self) -> None:
        """Raises CannotDecideError where answers that were left would still run by their limit, but
        most answers of this server end by themselves before: what is not held shows nothing."""
        now_ns = time.perf_counter_ns()
        if not self.could_run(at_ns=now_ns):
            return
        if not self._lengths:
            self._look_how_long()
        usual = median(self._lengths)
        if usual < inf and not self.could_run(usual, at_ns=now_ns):
            raise CannotDecideError(
                "the answers that were left may have ended by themselves: most answers of this "
                f"server end after {usual:.0f} tokens or fewer"
            )

    def _look_how_long(self) -> None:
        """A long answer lasts, unless it ends by itself."""
        stream = self.start(self.long(role=Role.CHECK))
        stream.join(self.ttft_s + self.settle_s + self.step_s)
        stream.leave()
        join_all([stream], _LAST_WORDS_S)
        self._lengths = self._lengths or [inf]

    def wait_for_ghosts(self, are_gone: Callable[[], bool]) -> None:
        """Wait until `are_gone` is true, or until all ghosts must have ended by themselves."""
        while self.ghosts() and not are_gone():
            self.pause(self.step_s)

    def _left(self) -> Iterator[tuple[RequestSpec, RequestRow, int]]:
        """Each request that was left, and the time at which its client left."""
        for stream in self.opened:
            row = stream.row
            if row is not None and row.abandoned_ns is not None:
                yield stream.spec, row, row.abandoned_ns

    def _ends_of_left(self) -> list[int]:
        """The latest ends: several answers to one request may run one after the other."""
        step_ns = 1e9 * SLOWER * self.step_s
        return [
            left_ns + int(step_ns * (spec.n * spec.max_tokens - row.tokens_read))
            for spec, row, left_ns in self._left()
        ]

    def rows(self) -> list[RequestRow]:
        """The rows of the streams that have ended."""
        return [stream.row for stream in self.opened if stream.row is not None]

    def end(self) -> None:
        """Nothing stays in flight."""
        for stream in self.opened:
            if not stream.has_ended:
                stream.leave()
        join_all(self.opened, _LAST_WORDS_S)
        self.fillers.clear()

    def forget(self) -> None:
        self.end()
        now_ns = time.perf_counter_ns()
        ends = [*self._ghosts_end_ns, *self._ends_of_left()]
        self._ghosts_end_ns = [end_ns for end_ns in ends if end_ns > now_ns]
        self.opened.clear()

    def forget_ghosts(self) -> None:
        """All slots are free: no request that left still runs."""
        self._ghosts_end_ns.clear()


def whole(row: RequestRow, what: str) -> RequestRow:
    """Raises CannotDecideError unless the request was answered whole."""
    if row.outcome is not Outcome.COMPLETED:
        raise CannotDecideError(f"{what} was not answered: {row.error or row.outcome}")
    return row


def is_refused(stream: LiveStream) -> bool:
    return stream.row is not None and was_refused(stream.row)


def end_of(stream: LiveStream) -> str:
    row = stream.row
    return "no end yet" if row is None else row.error or row.finish_reason or row.outcome


def without_token(streams: Sequence[LiveStream], longest_s: float) -> list[LiveStream]:
    """The streams that have no token within `longest_s`."""
    until_s = time.monotonic() + longest_s
    for stream in streams:
        stream.wait_tokens(1, max(0.0, until_s - time.monotonic()))
    return [stream for stream in streams if not stream.tokens]


def refill(
    fillers: Sequence[LiveStream],
    wanted: int,
    *,
    start: Callable[[], LiveStream],
    lasts: Callable[[LiveStream], bool],
    longest_s: float,
    retire: Callable[[LiveStream], object] = lambda one: one.leave(),
) -> tuple[list[LiveStream], list[LiveStream]]:
    """Keep the slots full with `wanted` streams: the `fillers` that still last, and new streams.
    Returns the running streams, and the new streams that got no slot within `longest_s`. `retire`
    gets each filler that does not last: its own end would give a probe a slot."""
    kept = list(fillers)
    while gone := [one for one in kept if one.has_ended or not lasts(one)]:
        for filler in gone:
            retire(filler)
        kept = [one for one in kept if one not in gone]
    new = [start() for _ in range(wanted - len(kept))]
    waiting = without_token(new, longest_s)
    for filler in waiting:
        filler.leave()
    return [*kept, *(one for one in new if one not in waiting)], waiting
