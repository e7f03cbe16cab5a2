"""The idle server, measured before the first experiment: its slots, its step, its first-token time.

Slots that were named are checked, and others are counted, by how many requests run at once. A
server that refuses a request beyond its slots shows them by that.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from typing import Final, NamedTuple

from harness.client.connection import BROKEN
from harness.client.http1 import CLOSED_EARLY
from harness.client.live_stream import Drain, LiveStream, join_all
from harness.client.session import LoadSession
from harness.client.stream import BUSY_STATUSES
from harness.errors import TargetError
from harness.experiments.flushes import Flush, flushes_of, step_of, typical_tokens
from harness.experiments.limit import FIRST_TOKENS, find_limit, four_times, is_limit, look_at
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.records import Outcome, RequestRow, Role
from harness.workload.abandon import RequestSpec
from harness.workload.event_scale import Counted

MOST_SLOTS: Final = 1024  # that are filled
PROMPT_TOKENS: Final = 24
PROBE_TOKENS: Final = 2
TOGETHER_TOKENS: Final = 32  # of requests that are to run at once: they hold their slots meanwhile
TOGETHER_FLUSHES: Final = 4
_TURNS: Final = 1.25  # times the steps that the requests of all slots take to begin
BUSY: Final = BUSY_STATUSES | {409}  # how a server refuses a request beyond its slots
_IDLE_PROBES: Final = 7
_AGAIN_S: Final = (0.1, 2.0)  # after which a request that was refused is sent again
MANY_WAIT: Final = 1 << 20  # of requests: a queue without a limit that matters
MOST_WAITING: Final = 128  # requests behind full slots, where it does not matter how many
_FIRST_TOKENS: Final = 8  # of the request that warms the server up
_TRIAL_S: Final = 2 * READY_S  # a wait for many requests, which were expected to take half of it
_READ_STREAMS: Final = 32  # the first of a trial; of the others only the first token is read
_PACE_TOKENS: Final = (32, 128, 512)  # of one answer, until it comes in a few flushes
_FEWEST_FLUSHES: Final = 3
_LEAST_STEP_S: Final = 1e-4  # shorter, and the answer was there before
COUNT_S, QUICK_COUNT_S = 60.0, 20.0  # at most, for slots that are not known
_LEAST_MORE: Final = 1.2  # times as many streams, or the limit is too far away to be found
_SETTLED_STEPS: Final = 4


class _NotServedError(Exception):
    """One of some requests at once was not answered, or they take too long to try."""


class _FullError(Exception):
    """Some requests run at once, and all others are refused."""

    def __init__(self, slots: int, turn_steps: float) -> None:
        self.slots, self.turn_steps = slots, turn_steps


class Answer(NamedTuple):
    """`counted`: its tokens by the server's account, without reasoning that was not shown."""

    row: RequestRow
    counted: Counted | None


class ServerFacts(NamedTuple):
    """The server when it is idle. `slots`: None if none were found, and `why`. `refuses`: beyond
    its slots it refuses a request instead of queueing it. `flush_tokens`: how many tokens come at
    once. `ran_at_once`: the most requests that were seen to run together, where no slots were
    found. `turn_steps`: the steps between the first tokens of requests that start at once.
    `closes`: it refuses by closing the connection without an answer. `queue`: how many
    requests may wait; None: not counted.
    """

    slots: int | None
    step_s: float
    ttft_s: float
    context: int | None
    why: str = ""
    refuses: bool = False
    flush_tokens: float = 1.0
    ran_at_once: int = 0
    turn_steps: float = 0.0
    closes: bool = False
    queue: int | None = None

    @property
    def can_fill(self) -> bool:
        """Whether its slots are known, and not too many to fill."""
        return self.slots is not None and self.slots <= MOST_SLOTS

    @property
    def has_queue(self) -> bool:
        """Whether its slots can be filled, and the next request then waits."""
        return self.can_fill and not self.refuses

    def lets_wait(self, requests: int) -> bool:
        return not self.refuses and (self.queue is None or requests <= self.queue)

    @property
    def may_refuse(self) -> bool:
        """Whether it refuses where it has no free slot, or no place in its queue."""
        return self.refuses or self.most_waiting < MANY_WAIT

    @property
    def most_waiting(self) -> int:
        return MANY_WAIT if self.queue is None else self.queue

    @property
    def together_tokens(self) -> int:
        """The answer length with which one request per slot can run at once: the first still runs
        when the last begins, and each lasts a few flushes."""
        together = _together_tokens(self.slots or 1, self.turn_steps)
        return max(together, int(TOGETHER_FLUSHES * self.flush_tokens))


def _together_tokens(streams: int, turn_steps: float) -> int:
    return TOGETHER_TOKENS + int(_TURNS * turn_steps * streams)


class _Slots(NamedTuple):
    number: int | None
    why: str
    refuses: bool = False
    ran_at_once: int = 0
    turn_steps: float = 0.0
    closes: bool = False


class Trial(NamedTuple):
    """Requests that were sent at once. `times`: the token times of each request that was answered;
    where there are many, most have only the first token's time. `refused`: how many were refused;
    `closed`: how many of these the server refused by closing the connection."""

    times: list[Sequence[int]]
    refused: int
    closed: int = 0


def was_refused(row: RequestRow) -> bool:
    """Whether the server refused it as if it had no slot for it."""
    return row.status_code in BUSY or row.outcome is Outcome.REJECTED


def was_closed(row: RequestRow) -> bool:
    """The server took the connection, and ended it without an answer."""
    is_broken = row.outcome is Outcome.FAILED and row.status_code is None
    return is_broken and (row.error or "").startswith((CLOSED_EARLY, BROKEN))


def find_facts(
    session: LoadSession, *, slots: int | None, context: int | None, count_s: float = COUNT_S
) -> ServerFacts:
    """The idle server's first-token time, its step, and its slots, if they were not named: counted
    for `count_s` at most.

    Raises TargetError if it does not serve, and CannotDecideError if it ignores `max_tokens`, or
    shows no step.
    """
    _first(session, _FIRST_TOKENS)
    probes = [_first(session, PROBE_TOKENS).row for _ in range(_IDLE_PROBES)]
    ttft_s = median((row.token_times_ns[0] - row.sent_ns) / 1e9 for row in probes[1:])
    step_s, flush_tokens = _find_pace(session)
    fewest = max(1, int(TOGETHER_FLUSHES * flush_tokens)) if flush_tokens > 1 else 1

    def trial(streams: int, tokens: int) -> Trial:
        return _try(session, streams, max(tokens, fewest), step_s)

    found = count_slots(trial, count_s) if slots is None else _check_slots(trial, slots)
    if found.number is None:
        _first(session, _FIRST_TOKENS)  # it may have died of the trials
    if found.number is not None and 1 < found.number <= MOST_SLOTS:
        step_s = _step_beside(session, found.number, max(TOGETHER_TOKENS, fewest)) or step_s
    return ServerFacts(
        slots=found.number,
        step_s=step_s,
        ttft_s=ttft_s,
        context=context,
        why=found.why,
        refuses=found.refuses,
        flush_tokens=flush_tokens,
        ran_at_once=found.ran_at_once,
        turn_steps=found.turn_steps,
        closes=found.closes,
    )


def recount(session: LoadSession, facts: ServerFacts) -> ServerFacts:
    """`facts` with the number of slots that the server has now, if it has changed."""
    fewest = max(1, int(TOGETHER_FLUSHES * facts.flush_tokens))

    def trial(streams: int, tokens: int) -> Trial:
        return _try(session, streams, max(tokens, fewest), facts.step_s)

    return recounted(trial, facts)


def count_queue(session: LoadSession, facts: ServerFacts) -> int:
    """How many requests may wait behind the slots; MANY_WAIT: as many as a case needs."""
    return counted_queue(
        lambda streams, tokens: _try(session, streams, tokens, facts.step_s), facts
    )


def counted_queue(trial: Callable[[int, int], Trial], facts: ServerFacts) -> int:
    assert facts.slots is not None
    streams = facts.slots + min(2 * facts.slots, MOST_WAITING) + 1
    try:
        tried = trial(streams, FIRST_TOKENS + ceil(streams * facts.turn_steps))
    except _NotServedError:
        return MANY_WAIT
    return max(0, len(tried.times) - facts.slots) if tried.refused else MANY_WAIT


def recounted(trial: Callable[[int, int], Trial], facts: ServerFacts) -> ServerFacts:
    """A count that finds no slots is believed if more requests than slots ran at once."""
    assert facts.slots is not None
    try:
        _check_slots(trial, facts.slots)
    except CannotDecideError:
        found = count_slots(trial, QUICK_COUNT_S)
    else:
        return facts
    if found.number is None and found.ran_at_once <= facts.slots:
        return facts
    return facts._replace(
        slots=found.number,
        why=found.why,
        refuses=found.refuses,
        ran_at_once=found.ran_at_once,
        turn_steps=found.turn_steps,
        closes=found.closes,
        queue=None,
    )


def _first(session: LoadSession, tokens: int) -> Answer:
    """One request to the idle server. Raises TargetError and CannotDecideError."""
    row, counted = _alone(session, tokens)
    for again_s in _AGAIN_S:  # a slot may be free only a moment after the answer before
        if row.status_code not in BUSY:
            break
        refused = row.error
        time.sleep(again_s)  # noqa: TID251
        row, counted = _alone(session, tokens)
        if again_s == _AGAIN_S[-1] and row.outcome is Outcome.COMPLETED:
            raise CannotDecideError(
                f"the server limits the rate of requests: it refused a single one ({refused}) and "
                f"took it {again_s:g} s later; this suite needs an access without such a limit, or "
                "--gentle"
            )
    if row.outcome is not Outcome.COMPLETED:
        why = row.error or row.outcome
        raise TargetError(f"{session.plan.url} does not answer a request of {tokens} tokens: {why}")
    if row.tokens_read > tokens:
        raise CannotDecideError(
            f"the server ignores max_tokens: {tokens} were asked for, {row.tokens_read} came"
        )
    if not row.token_times_ns:
        raise CannotDecideError("the server answers without a token")
    return Answer(row, counted)


def _alone(session: LoadSession, tokens: int) -> Answer:
    spec = RequestSpec(user=0, max_tokens=tokens, prompt_tokens=PROMPT_TOKENS, role=Role.PROBE)
    stream = LiveStream(session, spec)
    if (row := stream.join(READY_S)) is not None:
        return Answer(row, stream.counted)
    stream.leave()
    if stream.tokens:
        raise CannotDecideError(
            f"the server is too slow for this suite: {stream.tokens} of {tokens} tokens came in "
            f"{READY_S:g} s, and a case reads some hundred; --gentle takes its time"
        )
    raise TargetError(f"{session.plan.url} has no first token within {READY_S:g} s")


def _at_once(session: LoadSession, streams: int, tokens: int, role: Role) -> list[Answer]:
    """Those that have ended in time."""
    spec = RequestSpec(user=0, max_tokens=tokens, prompt_tokens=PROMPT_TOKENS, role=role)
    started = [LiveStream(session, spec) for _ in range(streams)]
    rows = join_all(started, READY_S)
    both = zip(rows, started, strict=True)
    return [Answer(row, stream.counted) for row, stream in both if row is not None]


def _find_pace(session: LoadSession) -> tuple[float, float]:
    """The step of one stream, and the tokens that come at once. An answer whose tokens the server
    counts shows how many an event has. Raises CannotDecideError if all come in one piece."""
    for tokens in _PACE_TOKENS:
        answer = _first(session, tokens)
        if answer.counted is not None and answer.counted[0] > answer.row.tokens_read:
            session.client.event_scale.observe(answer.counted)
        flushes = answer_flushes(answer)
        step_s = step_of(flushes)
        if len(flushes) >= _FEWEST_FLUSHES and step_s is not None and step_s > _LEAST_STEP_S:
            return step_s, max(1.0, typical_tokens(flushes))
    raise CannotDecideError(
        "the server shows no step: the tokens of an answer come in one piece (a proxy that "
        "buffers, or an answer made beforehand)"
    )


def answer_flushes(answer: Answer) -> list[Flush]:
    row, counted = answer
    by_events = sum(row.event_tokens)
    scale = counted[0] / by_events if counted is not None and by_events else 1.0
    return flushes_of(row.token_times_ns, [scale * tokens for tokens in row.event_tokens])


def _step_beside(session: LoadSession, streams: int, tokens: int) -> float | None:
    """The step of `streams` streams that run at once."""
    answers = _at_once(session, streams, tokens, Role.FILLER)
    whole = [one for one in answers if one.row.outcome is Outcome.COMPLETED]
    if not whole:
        why = next((row.error or row.outcome for row, _ in answers), "no answer")
        raise TargetError(f"{session.plan.url} does not answer {streams} requests at once: {why}")
    steps = [step for one in whole if (step := step_of(answer_flushes(one))) is not None]
    return median(steps) if steps and median(steps) > _LEAST_STEP_S else None


def _try(session: LoadSession, streams: int, tokens: int, step_s: float) -> Trial:
    spec = RequestSpec(user=0, max_tokens=tokens, prompt_tokens=PROMPT_TOKENS, role=Role.CHECK)
    started = [LiveStream(session, spec) for _ in range(streams)]
    drain = Drain()
    drain.add_later_ones(started, _READ_STREAMS, _TRIAL_S)  # the first to begin end first
    rows = join_all(started, _TRIAL_S)
    ended = [row for row in rows if row is not None]
    are_served = any(row.outcome is Outcome.COMPLETED for row in ended)
    closed = sum(map(was_closed, ended)) if are_served else 0
    refused = sum(map(was_refused, ended)) + closed
    for row in rows:
        is_refused = row is not None and (was_refused(row) or (closed and was_closed(row)))
        if not is_refused and (row is None or row.outcome is not Outcome.COMPLETED):
            why = "no answer" if row is None else row.error or row.outcome
            raise _NotServedError(f"of {streams} streams at once one was not answered: {why}")
    if refused:
        time.sleep(_SETTLED_STEPS * step_s)  # noqa: TID251  until slots are given back
    times: list[Sequence[int]] = []
    for stream, row in zip(started, rows, strict=True):
        if row is not None and row.outcome is Outcome.COMPLETED:
            times.append(row.token_times_ns[: 1 if stream in drain.taken else None])
    return Trial(times, refused, closed)


def count_slots(trial: Callable[[int, int], Trial], longest_s: float) -> _Slots:
    """The number, or why there is none."""
    count = _Count(trial, time.monotonic() + longest_s)
    try:
        found = find_limit(count.ask, most=MOST_SLOTS, more=count.more)
    except _NotServedError as error:
        return _Slots(None, str(error), ran_at_once=count.most)
    except _FullError as full:
        return _check_refusal(trial, full.slots, full.turn_steps)
    if found is None and count.most < 2:
        return _Slots(None, "no two requests were seen to run at once")
    if found is None:
        why = f"{count.most} requests ran at once, and no limit was found"
        return _Slots(None, why, ran_at_once=count.most)
    return _Slots(found, f"{found} requests run at once", turn_steps=count.turn_steps)


class _Count:
    """`most`: the most requests that were seen to run at once."""

    def __init__(
        self,
        trial: Callable[[int, int], Trial],
        until_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trial, self._until_s, self._clock = trial, until_s, clock
        self.most = 0
        self.turn_steps = self.took_s = 0.0

    def ask(self, streams: int, tokens: int) -> list[Sequence[int]]:
        began_s = self._clock()
        tried = self._trial(streams, tokens)
        seen = look_at(tried.times, tokens)
        self.took_s = self._clock() - began_s
        if seen is not None:
            self.most, self.turn_steps = max(self.most, seen.running), seen.spacing
            if tried.refused and not seen.waiting:
                raise _FullError(seen.running, seen.spacing)
        return tried.times

    def more(self, streams: int) -> int:
        """The number of streams that can be tried, and confirmed, in the time that is left, and in
        the time that an answer may take."""
        left_s = min(self._until_s - self._clock(), READY_S)
        most_cost = self._cost(streams) * left_s / max(2 * self.took_s, _LEAST_STEP_S)
        wanted = four_times(streams)
        in_time = bisect_right(range(wanted + 1), most_cost, key=self._cost) - 1
        if in_time < _LEAST_MORE * streams:
            why = f"{self.most} requests ran at once, and more take too long to try"
            raise _NotServedError(why)
        return min(wanted, in_time)

    def _cost(self, streams: int) -> float:
        """The tokens of all `streams` requests: the more there are, the longer each must last."""
        return streams * (FIRST_TOKENS + self.turn_steps * streams)


def _check_refusal(trial: Callable[[int, int], Trial], slots: int, turn_steps: float) -> _Slots:
    """One of `slots + 1` requests must be refused, and none of `slots` requests."""
    tokens = _together_tokens(slots, turn_steps)
    try:
        more, enough = trial(slots + 1, tokens), trial(slots, tokens)
    except _NotServedError as error:
        return _Slots(None, str(error))
    if more.refused == 1 and not enough.refused:
        closes = bool(more.closed)
        how = "more are refused" + (" by the end of their connections" if closes else "")
        said = f"{slots} requests run at once, and {how}"
        return _Slots(slots, said, refuses=True, turn_steps=turn_steps, closes=closes)
    if more.closed or enough.closed:
        said = f"of {slots} to {slots + 1} streams at once some were not answered: {CLOSED_EARLY}"
        return _Slots(None, said)
    return _Slots(
        None,
        f"it refuses requests, but not each beyond a number: {len(more.times)} of {slots + 1} were "
        f"answered, and then {len(enough.times)} of {slots}, as under a limit of their rate",
    )


def _check_slots(trial: Callable[[int, int], Trial], slots: int) -> _Slots:
    """Check that `slots` requests run at once, and that one more waits or is refused. Raises
    CannotDecideError."""
    if slots > MOST_SLOTS:
        return _Slots(slots, f"it has {slots:,} slots, more than the {MOST_SLOTS:,} that are tried")
    refused, closed, ran, turn_steps = 0, 0, 0, 0.0

    def ask(streams: int, tokens: int) -> list[Sequence[int]]:
        nonlocal refused, closed, ran, turn_steps
        tried = trial(streams, tokens)
        refused, closed, ran = tried.refused, tried.closed, 0
        if (seen := look_at(tried.times, tokens)) is not None:
            ran, turn_steps = seen.running, seen.spacing
        return tried.times

    try:
        if is_limit(ask, slots):
            return _Slots(slots, f"it has {slots}", turn_steps=turn_steps)
    except _NotServedError:  # where no request can queue, one more may fail
        return _Slots(slots, f"it has {slots}")
    if refused == 1 and ran == slots:
        said = f"it has {slots}, and refuses more requests"
        return _Slots(slots, said, refuses=True, turn_steps=turn_steps, closes=closed > 0)
    raise CannotDecideError(
        f"the server is said to have {slots} slots, but of {slots + 1} requests {ran} ran at "
        "once: --slots names another number, or another load takes slots"
    )
