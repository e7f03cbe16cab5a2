"""Streams of ours that visit a server in use, a few at a time: they begin, run for a random time,
and leave or end by themselves."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import gevent

from harness.client.live_stream import LiveStream, join_all
from harness.client.session import LoadSession
from harness.errors import TargetError
from harness.experiments.averaged import Leave
from harness.experiments.flushes import Flush, flushes_of, latest_gaps, step_of, typical_tokens
from harness.experiments.gentle_plan import StreamTurns
from harness.experiments.idle_server import PROMPT_TOKENS, Answer, answer_flushes, was_refused
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.experiments.streams import without_token
from harness.intervals import Interval
from harness.records import Role
from harness.workload.abandon import RequestSpec

_FIRST_TOKEN_S: Final = 20.0
_PAUSE_S: Final = 2.0  # after a stream that was refused or kept waiting
_MOST_REFUSED: Final = 10  # in a row
_MOST_ENDED: Final = 10  # in a row
_FEWEST_TOKENS: Final = 8
_STEPS: Final = 20  # of the streams of late
_LOOK_TOKENS: Final = 32


class BusyError(CannotDecideError):
    """The server refused short requests, again and again."""


def first_look(
    session: LoadSession, pause: Callable[[float], object] = gevent.sleep
) -> tuple[float, float]:
    """The step, and how many tokens come at once, by one short answer. An answer whose tokens the
    server counts shows how many an event has. Raises TargetError, and BusyError or another
    CannotDecideError."""
    answer = _short_answer(session, pause)
    if answer.counted is not None and answer.counted[0] > answer.row.tokens_read:
        session.client.event_scale.observe(answer.counted)
    flushes = answer_flushes(answer)
    if not (step_s := usual_step(flushes)):
        raise CannotDecideError("the server shows no step: its tokens come in one piece")
    return step_s, max(1.0, typical_tokens(flushes))


def _short_answer(session: LoadSession, pause: Callable[[float], object]) -> Answer:
    """Others use the server: where it refuses a request, it is asked again."""
    asked = RequestSpec(
        user=0, max_tokens=_LOOK_TOKENS, prompt_tokens=PROMPT_TOKENS, role=Role.PROBE
    )
    refused = 0
    while True:
        stream = LiveStream(session, asked)
        row = stream.join(READY_S)
        if row is None or not was_refused(row):
            break
        refused += 1
        if refused == _MOST_REFUSED:
            raise BusyError(f"the server refused {refused} short requests in a row: {row.error}")
        pause(_PAUSE_S)
    if row is None or row.error or not row.token_times_ns:
        why = "it did not end in time" if row is None else row.error or row.outcome
        stream.leave()
        raise TargetError(f"{session.plan.url} does not answer a short request: {why}")
    return Answer(row, stream.counted)


def usual_step(flushes: Sequence[Flush]) -> float | None:
    """The time that a token usually takes, in seconds; None: all came at once. A few slow steps, as
    beside another's prompt, make it no longer."""
    times_ns = [one.at_ns for one in flushes]
    gaps = latest_gaps(times_ns, [one.tokens for one in flushes], latest=len(flushes))
    return median(gaps) if gaps else step_of(flushes)


class Visitors:
    """At most `most` streams run at once. `step_s`: the latest step; `steps`: the shortest and the
    longest of the latest steps. `in_flight_s`: stream-seconds so far. `staying`: how many more
    streams of ours stay. `text`: the prompt, the same each time; None: a short prompt, another each
    time."""

    def __init__(
        self,
        session: LoadSession,
        turns: StreamTurns,
        rng: random.Random,
        *,
        step_s: float,
        most: int,
    ) -> None:
        self.session = session
        self.turns = turns
        self.rng = rng
        self._steps_s = deque([step_s], maxlen=_STEPS)
        self.most = most
        self.in_flight_s = 0.0
        self.staying = 0
        self.text: str | None = None
        self.prompt_tokens = PROMPT_TOKENS
        self._refused = self._ended = 0

    @property
    def step_s(self) -> float:
        return self._steps_s[-1]

    @property
    def steps(self) -> Interval:
        return Interval(min(self._steps_s), max(self._steps_s))

    def pause(self, seconds: float) -> None:
        gevent.sleep(seconds)

    def begin(self, count: int, tokens: int) -> list[LiveStream] | None:
        """Streams that all run; None if one was refused or had to wait: others need the server.
        Raises CannotDecideError if that is always so."""
        asked = RequestSpec(
            user=0, max_tokens=tokens, prompt_tokens=self.prompt_tokens, role=Role.USER
        )
        streams = [LiveStream(self.session, asked, self.text) for _ in range(count)]
        if not without_token(streams, _FIRST_TOKEN_S):
            self._refused = 0
            return streams
        for one in streams:
            one.leave()
        rows = join_all(streams, READY_S)
        self._refused += 1
        if self._refused == _MOST_REFUSED:
            why = next((row.error for row in rows if row is not None and row.error), "it waited")
            raise CannotDecideError(
                f"in {self._refused} tries in a row no stream of ours could run: {why}"
            )
        gevent.sleep(max(_PAUSE_S, tokens * self.step_s))
        return None

    def leave(self, count: int) -> Leave | None:
        """Streams begin, run for a random time and leave; returns when others of ours may begin."""
        left = self.depart(count)
        if left is None:
            return None
        departure, tokens_left = left
        rest_s = self.turns.next_after_s(
            tokens_left, self.step_s, all_used=self.staying + 2 * count > self.most
        )
        gevent.sleep(max(0.0, departure.t0_s + rest_s - time.perf_counter()))
        return departure

    def depart(self, count: int) -> tuple[Leave, int] | None:
        """Streams begin, run for a random time and leave. Returns the leave, and the largest number
        of tokens that one of them still had to come. None, too, if an answer may end by itself in
        the window: that would look like letting go."""
        turns = self.turns
        dwell_s, asked_s = turns.draw_s(self.rng), time.perf_counter()
        streams = self.begin(count, turns.tokens(dwell_s, self.step_s))
        if streams is None:
            return None
        began_s = time.perf_counter()
        gevent.sleep(dwell_s)
        for one in streams:
            one.leave()
        join_all(streams, READY_S)
        left_ns = [one.abandoned_ns for one in streams if one.abandoned_ns is not None]
        self._learn_step(streams)
        to_come = [one.spec.max_tokens - one.tokens for one in streams]
        if len(left_ns) < count or min(to_come) * self.step_s < turns.window.whole_after_s:
            self._ended_early(streams)
            return None
        self._ended = 0
        t0_s, left = max(left_ns) / 1e9, max(to_come)
        self.in_flight_s += count * (t0_s - began_s)
        return Leave(asked_s, began_s, t0_s, count), left

    def end(self) -> Leave | None:
        """One begins, runs for a random time and ends by itself."""
        turns = self.turns
        tokens = max(_FEWEST_TOKENS, int(turns.draw_s(self.rng) / self.step_s))
        asked_s = time.perf_counter()
        streams = self.begin(1, tokens)
        if streams is None:
            return None
        began_s = time.perf_counter()
        (row,) = join_all(streams, READY_S + 4 * tokens * self.step_s)
        if row is None or row.last_token_ns is None or row.error:
            streams[0].leave()
            return None
        t0_s = row.last_token_ns / 1e9
        self.in_flight_s += t0_s - began_s
        gevent.sleep(max(0.0, t0_s + turns.window.whole_after_s - time.perf_counter()))
        return Leave(asked_s, began_s, t0_s, 1)

    def _ended_early(self, streams: Sequence[LiveStream]) -> None:
        """The server became faster, or its answers are as long as it likes."""
        self._ended += 1
        if self._ended == _MOST_ENDED:
            tokens = max(one.tokens for one in streams)
            raise CannotDecideError(
                f"answers end by themselves before our streams leave, or soon after, {self._ended} "
                f"times in a row, the last after {tokens} tokens of {streams[0].spec.max_tokens}"
            )
        gevent.sleep(self.turns.window.whole_after_s)

    def _learn_step(self, streams: Sequence[LiveStream]) -> None:
        found = [usual_step(flushes_of(one.token_times_ns, one.event_tokens)) for one in streams]
        if steps_s := [one for one in found if one]:
            self._steps_s.append(median(steps_s))
