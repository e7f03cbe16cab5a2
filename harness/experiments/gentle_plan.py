"""What a gentle watch decides: how little it loads, when a stream leaves, when it says what.

Pure: the experiment itself is `gentle`.
"""

import math
import random
from typing import Final, Literal, NamedTuple, Self

from harness.experiments.averaged import LEVEL_STEPS, Averaged, LeaveWindow, MeanEstimate
from harness.experiments.memory_falls import FallTally
from harness.experiments.outcome import CannotDecideError
from harness.formatting import quantity
from harness.intervals import Interval

FEWEST_STREAMS: Final = 2  # of ours at once, on any server
SLOTS_A_STREAM: Final = 100  # 1 % of the slots
MOST_TOGETHER: Final = 4  # that leave at one moment: more would be a crowd
FIRST_LOOK: Final = 8  # moments of leaving
RISK: Final = 0.05  # that any of all looks says yes or no wrongly
MANY_GHOSTS: Final = 0.1  # of the leaves: more, and the server does not stop
_WHOLE: Final = 0.9  # of our streams: a gauge that surely shows less is of a part of the server
# At each look. Leaves that are late, not forgotten, are taken for MANY_GHOSTS only if `freed` says
# so at the look's own level, too: over ten looks the chances add up to less than RISK, where the
# error of `at_last` is up to 2.5 times that of `freed`.
_LATE_LEVEL: Final = 0.98
_LONGEST_AFTER_S: Final = 2.0
_SHORTEST_AFTER_STEPS: Final = 20
_DWELL_S: Final = 1.0  # the width of the random time before a leave
_DWELL_STEPS: Final = 10
_BRIEF: Final = 0.3
_CONTROL_S: Final = 0.2
_FASTER: Final = 1.3  # than seen so far: a stream that leaves must not end by itself
_SPARE_TOKENS: Final = 4
_GROWN: Final = 1.05  # times as many moments, and the figures are made anew
NO_CONTEXT: Final = 2000  # tokens, where it is not known


def most_streams(slots: int | None) -> int:
    return max(FEWEST_STREAMS, (slots or 0) // SLOTS_A_STREAM)


class StreamTurns(NamedTuple):
    """Streams begin together, run for a random time, and leave together. `dwell_s`: the shortest
    and the longest such time, from the last one's first token. The next turn begins when the
    streams would have ended by themselves: until then a forgotten one counts as ours."""

    window: LeaveWindow
    dwell_s: Interval
    most_tokens: int

    @classmethod
    def of(
        cls,
        *,
        step_s: float,
        poll_s: float,
        settle_s: float,
        context: int | None,
        level_steps: int = LEVEL_STEPS,
    ) -> Self:
        """Shorter where the context holds no longer answers. Raises CannotDecideError if it is too
        short for any window."""
        most_tokens = (context or NO_CONTEXT) * 3 // 4
        after_s = max(min(settle_s, _LONGEST_AFTER_S), _SHORTEST_AFTER_STEPS * step_s)
        window = LeaveWindow.of(
            poll_s=poll_s, step_s=step_s, after_s=after_s, level_steps=level_steps
        )
        width_s = max(_DWELL_S, _DWELL_STEPS * step_s)
        while True:
            turns = cls(window, _dwell(window, width_s), most_tokens)
            if turns.tokens(turns.dwell_s.high, step_s) <= most_tokens:
                return turns
            width_s /= 2
            window = window._replace(after_s=window.after_s / 2)
            if window.after_s < 2 * window.before_s:
                raise CannotDecideError(
                    f"answers of {most_tokens} tokens end in {most_tokens * step_s:.2g} s: too "
                    f"soon to see a leave by readings {poll_s:.2g} s apart"
                )

    @property
    def brief(self) -> Self:
        """The plan where each leave is seen by itself: its moment must be random only in a step."""
        shortest_s, longest_s = self.dwell_s
        width_s = _BRIEF * (longest_s - shortest_s)
        return self._replace(dwell_s=Interval(shortest_s, shortest_s + width_s))

    def tokens(self, dwell_s: float, step_s: float) -> int:
        """The tokens to ask for, so that the answer outlasts the window."""
        seconds = dwell_s + _FASTER * self.window.whole_after_s
        return math.ceil(seconds / step_s) + _SPARE_TOKENS

    def draw_s(self, rng: random.Random) -> float:
        return rng.uniform(*self.dwell_s)

    def next_after_s(self, tokens_left: int, step_s: float, *, all_used: bool) -> float:
        """The time from t0 until another stream may begin."""
        if not all_used:
            return self.window.whole_after_s
        return max(self.window.whole_after_s, _FASTER * tokens_left * step_s)


def _dwell(window: LeaveWindow, width_s: float) -> Interval:
    shortest_s = 2 * window.before_s + _CONTROL_S
    return Interval(shortest_s, shortest_s + width_s)


def is_look(moments: int) -> bool:
    """There is a look at 8, 16, 32, ... moments: each further one would be a chance to be wrong."""
    return (
        moments >= FIRST_LOOK
        and (moments // FIRST_LOOK).bit_count() == 1
        and (moments % FIRST_LOOK == 0)
    )


def is_due(moments: int, judged: int) -> bool:
    """Whether to judge anew: at each look once, and else where the moments have grown since."""
    return moments > _GROWN * judged or (is_look(moments) and moments > judged)


def level_of(look: int) -> float:
    """The level of the interval at this look (from 0): the risks of all looks add up to RISK."""
    return 1 - RISK / 2.0 ** (look + 1)


class GhostRate(NamedTuple):
    """The share of the leaves that nothing followed from: 1 less `freed`, and at most 1 less
    `at_once` (see `Averaged`). The interval begins where `at_last` and each of `accusers` allow it:
    what was let go of late, or is not shown, was not forgotten."""

    freed: MeanEstimate
    at_once: MeanEstimate
    at_last: MeanEstimate
    accusers: tuple[MeanEstimate, ...]

    @classmethod
    def by_gauge(cls, left: Averaged) -> Self:
        """A page of one of several replicas shows a part of the leaves, and as much of the
        beginnings: these must accuse, too. Where they showed nothing, nothing is said (`is_seen`).
        """
        if left.seen is None or left.seen.interval().low <= 0:
            return cls(left.freed, left.at_once, left.at_last, (left.freed,))
        shares = left.freed, left.at_once, left.at_last
        freed, at_once, at_last = (_over(one, left.seen) for one in shares)
        if shown_part(left) is not None:
            return cls(freed, at_once, at_last, (freed,))
        return cls(left.freed, left.at_once, at_last, (left.freed, freed))

    @classmethod
    def by_pace(cls, left: Averaged, ended: Averaged) -> Self:
        """Compares with what the natural end of a stream does to another's pace."""
        shares = left.freed, left.at_once, left.at_last
        freed, at_once, at_last = (_over(one, ended.freed) for one in shares)
        return cls(freed, at_once, at_last, (freed,))

    @property
    def rate(self) -> float:
        low, high = self.interval()
        return min(high, max(low, 1 - self.freed.mean))

    def interval(self, level: float = 0.95) -> Interval:
        """The interval of the rate, not cut off at 0 and 1."""
        shares = *(one.interval(level) for one in self.accusers), self.at_last.interval(_LATE_LEVEL)
        low = 1 - max(one.high for one in shares)
        high = 1 - max(one.interval(level).low for one in (self.freed, self.at_once))
        return Interval(low, max(low, high))


def _over(left: MeanEstimate, whole: MeanEstimate) -> MeanEstimate:
    share = left.mean / whole.mean
    error = math.hypot(left.error, share * whole.error) / abs(whole.mean)
    return MeanEstimate(share, error, min(left.n, whole.n))


def decide(ghosts: GhostRate | FallTally, level: float) -> bool | None:
    """Whether the server stops; None: not yet known."""
    low, high = ghosts.interval(level)
    if low > MANY_GHOSTS:
        return False
    return True if high < 1 - MANY_GHOSTS and high < 0.5 else None


def is_seen(averaged: Averaged, level: float) -> bool:
    """Whether the reading shows that our streams begin: else it cannot show that they are gone."""
    return averaged.seen is not None and averaged.seen.interval(level).low > 0


def shown_part(averaged: Averaged) -> float | None:
    """The share of our streams that the gauge shows, where that is surely not all of them."""
    seen = averaged.seen
    return None if seen is None or seen.interval().high >= _WHOLE else seen.mean


def drifts(averaged: Averaged, level: float) -> bool:
    """Whether a leave would be seen where there was none: others come and go as ours do."""
    if averaged.control is None:
        return False
    low, high = averaged.control.interval(level)
    return low > 0 or high < 0


class WantedPrecision(NamedTuple):
    """How sure to be before the end of the time: `latency`, the width of its interval over itself;
    `ghosts`, the width of the rate's."""

    latency: float = 0.2
    ghosts: float = 0.1

    def is_met(
        self, *, latency_s: float, latency: Interval, ghosts: Interval, step_s: float
    ) -> bool:
        is_narrow = latency.width <= max(self.latency * latency_s, step_s)
        return is_narrow and ghosts.width <= self.ghosts


class JudgedLeaves(NamedTuple):
    """`averaged`: None where each leave was seen by itself. `why_not`: nothing can be said, since
    no natural end is seen either. `loses`: the memory of leaves is never given back."""

    ghosts: GhostRate | FallTally
    latency_s: float | None
    latency: Interval | None
    seen_by_s: float
    averaged: Averaged | None = None
    why_not: str = ""
    loses: bool = False

    def answer(self, level: float) -> tuple[bool | None, str]:
        if self.why_not:
            return None, self.why_not
        if self.loses:
            return False, "the memory of streams that leave never comes back, that of ends does"
        if self.averaged is not None:
            if not is_seen(self.averaged, level):
                return None, "no reading shows yet that our streams begin (is it this server's?)"
            if drifts(self.averaged, level):
                return (
                    None,
                    "others come and go as our streams do: a leave is seen where there was none",
                )
        stops = decide(self.ghosts, level)
        if stops is not None:
            return stops, ""
        if self.averaged is not None:
            return None, "too few leaves yet, for the load of the other users varies"
        low, high = (_share(one) for one in self.ghosts.interval(level))
        return None, f"too few leaves yet: {low} to {high} of them may be forgotten"

    def is_sure(self, wanted: WantedPrecision, step_s: float) -> bool:
        if self.latency_s is None or self.latency is None:
            return False
        return wanted.is_met(
            latency_s=self.latency_s,
            latency=self.latency,
            ghosts=self.ghosts.interval(),
            step_s=step_s,
        )


class Gentle(NamedTuple):
    """What is known by now. `stops`: None: not known yet. `why`: the reason for None or False.
    `seen_by_s`: a leave that showed nothing by then counts as forgotten. `share_of_memory`: what a
    stream of ours holds, with its `prompt_tokens`; None where leaves are not judged by memory, for
    the reason `why_no_memory`. `mistaken_share`: how often the reading looked like a leave while
    nothing of ours moved. `missed_ends`: how many of the `ends` of our answers showed nothing.
    `share_of_load`: our streams over all that ran; None where no gauge shows that. `shown_part`: of
    our streams, if the gauge surely does not show all of them. `most_streams` of ours ran at once.
    `ghosts_at_least`: the least share of forgotten leaves, as sure as `stops`. `latency_s` has the
    gauge's usual lag taken off; nothing below `floor_s` can be seen. `loses`: see JudgedLeaves."""

    way: Literal["gauge", "pace"]
    stops: bool | None
    why: str
    seconds: float
    moments: int
    leaves: int
    latency_s: float | None = None
    latency_ci95: Interval | None = None
    floor_s: float = 0.0
    ghost_rate: float | None = None
    ghost_ci95: Interval | None = None
    ghosts_at_least: float | None = None
    seen_by_s: float | None = None
    most_streams: int = 0
    share_of_load: float | None = None
    shown_part: float | None = None
    share_of_memory: float | None = None
    prompt_tokens: int = 0
    mistaken_share: float | None = None
    ends: int = 0
    missed_ends: int = 0
    why_no_memory: str = ""
    loses: bool = False
    is_final: bool = False

    @property
    def sentence(self) -> str:
        """What is known, for a person."""
        if self.stops is None:
            said = f"not known yet whether it stops: {self.why}"
        else:
            said = "it stops" if self.stops else "it does not stop"
            said += f": {self.why}" if self.why else ""
        said += f"; {self.leaves} leaves in {quantity(self.seconds, 's')} alongside other users"
        if self.latency_s is not None and self.latency_s < self.floor_s:
            floor = quantity(self.floor_s, "s")
            said += f"; a stream is held for at most {floor}, the least that can be seen"
        elif self.latency_s is not None and self.latency_ci95 is not None:
            held, low, high = (quantity(one, "s") for one in (self.latency_s, *self.latency_ci95))
            said += f"; a stream is held for {held} after its client left ({low} to {high})"
        if self.ghost_rate is not None and self.ghost_ci95 is not None:
            rate, low, high = (_share(one) for one in (self.ghost_rate, *self.ghost_ci95))
            within = quantity(self.seen_by_s, "s")
            said += f"; {rate} of the streams are still held after {within} ({low} to {high})"
        if self.shown_part is not None:
            shown = _share(self.shown_part)
            said += f"; the page shows only {shown} of our streams: name the pages of all replicas"
        if self.share_of_load is not None:
            said += f"; {_share(self.share_of_load)} of its load was ours"
        if self.share_of_memory is not None:
            said += f", and {_share(self.share_of_memory)} of its memory at most"
        if self.why_no_memory:
            said += f"; {self.why_no_memory}"
        return said


def figures(
    way: Literal["gauge", "pace"], moments: int, leaves: int, most: int, judged: JudgedLeaves | None
) -> Gentle:
    found = Gentle(
        way=way,
        stops=None,
        why="",
        seconds=0.0,
        moments=moments,
        leaves=leaves,
        most_streams=most,
    )
    if judged is None or judged.why_not:
        return found
    return found._replace(
        latency_s=judged.latency_s,
        latency_ci95=judged.latency,
        ghost_rate=judged.ghosts.rate,
        ghost_ci95=judged.ghosts.interval(),
        seen_by_s=judged.seen_by_s,
        loses=judged.loses,
    )


def _share(value: float) -> str:
    return quantity(min(1.0, max(0.0, value)), "ratio")
