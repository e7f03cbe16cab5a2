"""A gentle watch by memory: one stream of ours runs at a time. Its prompt is long enough for each
leave to be seen by itself in the memory that the server shows as held (`memory_falls`).

The prompt is the same each time: a prefix cache makes it cheap, and without one it is computed for
a tenth of the time at most. It is as short as the other users allow, and grows to 5 % of the memory
at most, by what a shorter one was seen to hold. Each tenth time the answer ends by itself, which
the memory must show, too: it does not where blocks that a cache keeps count as held.
"""

import random
import time
from collections import deque
from typing import Final, NamedTuple, NoReturn, Self

import numpy as np

from harness.experiments.averaged import FEWEST, Leave, arrays
from harness.experiments.gentle_plan import MANY_GHOSTS, Gentle, JudgedLeaves, figures
from harness.experiments.memory_falls import (
    Array,
    Falls,
    FallTally,
    Mistaken,
    Needed,
    median_interval,
    needed,
)
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.experiments.readings import MemoryGauge, Readings, gauge_lag_s
from harness.experiments.visitors import Visitors
from harness.formatting import quantity
from harness.intervals import Interval, rate_interval
from harness.workload.abandon import RequestSpec

MOST_MEMORY: Final = 0.05  # of the server's, that a stream of ours may hold
_MOST_LOST: Final = 0.1  # that never came back, and the watch ends
_LOST_RISK: Final = 0.01  # that it then says no wrongly
_LOST_ENDS: Final = 12  # to compare with, at least
_FIRST_TOKENS: Final = 256
_LOOK_S: Final = Interval(5.0, 10.0)  # of a look at the others alone
_LOOK_POLLS: Final = 100  # in a look, within these limits
_PROMPTS: Final = 6  # that are tried
_LONGER: Final = Interval(1.5, 8.0)  # the next prompt, at least and at most
_WORTH: Final = 1.1  # times as long, or no other prompt is tried
_SPARE: Final = 1.3  # times the memory that is needed
_UNSTEADY: Final = 1.2  # times the shortest and the longest step of late: an answer has ended
_END_EVERY: Final = 10
_FIRST_ENDS: Final = 3
_SPANS: Final = 100  # of the others alone, by which the prompt is chosen
_STALL_S: Final = 2.0  # of a page, at most
_POLLS: Final = 4  # of a level
_PREFILL_SHARE: Final = 10  # times as long as a prompt takes: a turn


class UnseenError(CannotDecideError):
    """Nothing can be seen by memory."""


class HeldShare(NamedTuple):
    """The share of the memory that a stream of ours holds, at least and at most."""

    least: float
    most: float

    @classmethod
    def of(cls, rise: float, fall: float, need: Needed, tokens: int) -> Self:
        """The scatter of the others may have hidden some of it. Raises UnseenError if a prompt of
        `tokens` tokens holds too much."""
        if (seen := max(rise, fall)) > MOST_MEMORY:
            _not_seen(
                f"a prompt of {tokens} tokens holds {quantity(seen, 'ratio')} of the memory, and "
                f"a stream of ours may hold {quantity(MOST_MEMORY, 'ratio')} at most"
            )
        return cls(max(0.0, min(rise, fall)), max(rise, fall, 0.0) + need.least / 2)

    def longer(self, need: Needed) -> float:
        """How many times as long the next prompt may be; 0 where that is not known."""
        if self.most <= 0:
            return 0.0
        wanted = _SPARE * need.ample / self.least if self.least else _LONGER.high
        return min(max(_LONGER.low, min(_LONGER.high, wanted)), MOST_MEMORY / self.most)

    def times(self, factor: float) -> Self:
        return self._replace(least=self.least * factor, most=self.most * factor)


class ByMemory:
    """`most_tokens`: of the longest prompt. Entering takes seconds, and raises UnseenError."""

    def __init__(
        self,
        visitors: Visitors,
        gauge: MemoryGauge,
        *,
        late_s: float,
        most_tokens: int,
        rng: random.Random,
    ) -> None:
        self.visitors = visitors
        self._gauge = gauge
        self._late_s = late_s
        self._most_tokens = most_tokens
        poll_s = visitors.turns.window.poll_s
        self._readings = Readings(gauge.read, poll_s=poll_s, rng=rng)
        self._poll_s = poll_s
        self._lag_s = gauge_lag_s(visitors.session.plan.target, visitors.step_s, "kv_usage")
        self._holds = HeldShare(0.0, 0.0)
        self._others = deque[Array](maxlen=_SPANS)  # their changes while nothing of ours moved
        self._mistaken = Mistaken()
        self._places_s: list[float] = []
        self._ghosts = self._unclear = self._ends = self._missed = self._turns = 0
        self.is_over = False  # it never gives back what leaves held
        self._began_s = time.perf_counter()

    def __enter__(self) -> Self:
        self._readings.__enter__()
        try:
            self._readings.level(1)
            self._choose_prompt()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._readings.__exit__()
        self._gauge.close()

    @property
    def _held(self) -> float:
        return self._holds.least

    @property
    def moments(self) -> int:
        return len(self._places_s) + self._ghosts + self._unclear

    def turn(self) -> None:
        self._turns += 1
        self._readings.forget(time.perf_counter() - _STALL_S - _POLLS * self._poll_s)
        if self._turns % _END_EVERY == 0:
            if (need := self._needed()).ample > self._held:  # the others hold more by now
                self._grow(need)
            self._end()
        else:
            self._leave()

    def judge(self) -> JudgedLeaves | None:
        if self.moments < FEWEST and not self.is_over:
            return None
        tally, seen_by_s = self.tally, self.visitors.turns.window.after_s
        if len(self._places_s) < FEWEST:
            return JudgedLeaves(tally, None, None, seen_by_s, loses=self.is_over)
        low, high = median_interval(self._places_s)
        middle = sorted(self._places_s)[len(self._places_s) // 2]
        usual = self._late_s
        return JudgedLeaves(
            tally,
            max(0.0, middle - usual),
            Interval(max(0.0, low - usual), max(0.0, high - usual)),
            seen_by_s,
            loses=self.is_over,
        )

    @property
    def tally(self) -> FallTally:
        return FallTally(self.moments, self._ghosts, self._unclear, self._ends, self._missed)

    def figures(self, judged: JudgedLeaves | None) -> Gentle:
        seconds = time.perf_counter() - self._began_s
        requests_s = self._gauge.requests * seconds
        return figures("gauge", self.moments, self.moments, 1, judged)._replace(
            floor_s=self._poll_s / 2 + self._lag_s,
            share_of_load=self.visitors.in_flight_s / requests_s if requests_s else None,
            share_of_memory=self._held,
            prompt_tokens=self.visitors.prompt_tokens,
            mistaken_share=self._mistaken.share(self.visitors.turns.window.after_s),
            ends=self._ends,
            missed_ends=self._missed,
        )

    # The prompt...

    def _choose_prompt(self) -> None:
        since_s = time.perf_counter()
        self.visitors.pause(min(_LOOK_S.high, max(_LOOK_S.low, _LOOK_POLLS * self._poll_s)))
        look = Interval(since_s, time.perf_counter())
        self._note_others(look)
        self._use(min(_FIRST_TOKENS, self._most_tokens))
        need = self._measure()
        for _ in range(_PROMPTS):
            if self._holds.least > need.ample or not self._grow(need):
                break
            need = self._measure()
        if self._held <= need.least:
            _not_seen(
                f"a prompt of {self.visitors.prompt_tokens} tokens holds "
                f"{quantity(self._held, 'ratio')} of the memory, and "
                f"{quantity(need.least, 'ratio')} would be needed with these users"
            )
        falls = Falls.of(*arrays(self._readings.columns(look.low)))
        self._mistaken = Mistaken().also(falls, look, self._held)  # what ours holds is known now
        for _ in range(_FIRST_ENDS):
            self._end()
        if self._missed > 1 or not self._ends:
            _not_seen(f"it does not fall when our answers end ({self._missed} of {self._ends})")

    def _needed(self) -> Needed:
        need = needed(np.concatenate(self._others))
        if need is None:
            _not_seen("its page is read too seldom")
        return need

    def _measure(self) -> Needed:
        """What a stream of ours holds, by the rise as it begins and the fall at its end; returns
        what it has to hold. Raises UnseenError if it holds too much."""
        ended = self.visitors.end()
        if ended is None:
            _not_seen(f"no stream with {self.visitors.prompt_tokens} tokens ran to its end")
        late_s, span_s = self._lag_s + self._poll_s, _POLLS * self._poll_s
        self._note_alone(ended)
        rise = self._level(ended.began_s + late_s, span_s) - self._level(
            ended.asked_s - span_s, span_s
        )
        fall = self._level(ended.t0_s - late_s - span_s, span_s) - self._level(
            ended.t0_s + late_s, span_s
        )
        need = self._needed()
        self._holds = HeldShare.of(rise, fall, need, self.visitors.prompt_tokens)
        return need

    def _level(self, since_s: float, span_s: float) -> float:
        """The mean level; by the readings around the span where the page stalled in it."""
        times_s, values = arrays(self._readings.columns())
        is_in = (times_s >= since_s) & (times_s < since_s + span_s)
        if not is_in.any():
            return float(np.interp(since_s + span_s / 2, times_s, values))
        return float(values[is_in].mean())

    def _grow(self, need: Needed) -> bool:
        """A longer prompt, where there is room for one."""
        now = self.visitors.prompt_tokens
        longer = self._holds.longer(need)
        tokens = min(int(now * longer), self._most_tokens)
        if tokens < _WORTH * now:
            return False
        self._holds = self._holds.times(tokens / now)
        self._use(tokens)
        return True

    def _use(self, tokens: int) -> None:
        spec = RequestSpec(user=0, max_tokens=1, prompt_tokens=tokens)
        self.visitors.prompt_tokens = tokens
        self.visitors.text = self.visitors.session.prompt(spec, n=0)

    # Leaves and ends...

    def _end(self) -> None:
        ended = self.visitors.end()
        if ended is None:
            return
        self._note_alone(ended)
        self._ends += 1
        until_s = ended.t0_s + self.visitors.turns.window.after_s
        self._missed += self._fall(ended.t0_s - self._poll_s, until_s) is None  # it is read later

    def _leave(self) -> None:
        departed = self.visitors.depart(1)
        if departed is None:
            return
        departure, tokens_left = departed
        self._note_alone(departure)
        t0_s, after_s = departure.t0_s, self.visitors.turns.window.after_s
        soon = Interval(t0_s, t0_s + after_s + self._lag_s)
        steps = self.visitors.steps
        late = natural_end(t0_s, tokens_left, steps, self._lag_s + 2 * self._poll_s)
        if (place_s := self._wait_fall(soon)) is not None:
            self._places_s.append(place_s - t0_s)
        elif self._wait_fall(late._replace(low=max(late.low, soon.high))) is not None:
            self._ghosts += 1
        else:
            self._unclear += 1
            self._check_lost()
        prefill_s = departure.began_s - departure.asked_s - self.visitors.step_s
        rest_s = max(_POLLS * self._poll_s, _PREFILL_SHARE * prefill_s - (t0_s - departure.asked_s))
        self.visitors.pause(rest_s)

    def _check_lost(self) -> None:
        """Ends are safe where leaves take the memory: some more of them to compare with."""
        if self._unclear * self._held <= _MOST_LOST:
            return
        for _ in range(_LOST_ENDS - self._ends):
            self._end()
        self.is_over = is_lost(self.tally)
        if not self.is_over:
            raise CannotDecideError(
                f"the memory that streams of ours held was not seen to come back {self._unclear} "
                f"times; more leaves could take the server's memory"
            )

    def _wait_fall(self, span: Interval) -> float | None:
        """Waits until a reading shows the fall, or one is so late that it cannot."""
        self._readings.wait(
            lambda: self._readings.latest_s > span.high or self._fall(*span) is not None,
            span.high + READY_S - time.perf_counter(),
        )
        self.visitors.pause(self._poll_s)  # the next reading may have more of it
        return self._fall(*span)

    def _fall(self, since_s: float, until_s: float) -> float | None:
        falls = Falls.of(*arrays(self._readings.columns(since_s - _STALL_S)))
        return falls.first(since_s, until_s, self._held)

    def _note_alone(self, ours: Leave) -> None:
        """Note the others between the beginning and the end of our stream."""
        late_s = self._lag_s + 2 * self._poll_s
        self._note_others(Interval(ours.began_s + late_s, ours.t0_s - self._poll_s))

    def _note_others(self, span: Interval) -> None:
        falls = Falls.of(*arrays(self._readings.columns(span.low)))
        self._others.append(falls.within(span).sizes)
        self._mistaken = self._mistaken.also(falls, span, self._held)


def natural_end(t0_s: float, tokens_left: int, steps: Interval, late_s: float) -> Interval:
    """The interval in which the answer of a stream that left at t0 ends, if nobody stops it."""
    soonest_s, latest_s = (tokens_left * one for one in steps)
    return Interval(t0_s + soonest_s / _UNSTEADY, t0_s + latest_s * _UNSTEADY + late_s)


def is_lost(tally: FallTally) -> bool:
    """Whether what leaves held stayed away often enough to show that the server does not stop."""
    fewest, _ = rate_interval(tally.unclear, tally.leaves, 1 - _LOST_RISK)
    return fewest > MANY_GHOSTS and tally.loses(_LOST_RISK)


def _not_seen(why: str) -> NoReturn:
    raise UnseenError(f"by memory it cannot be seen: {why}")
