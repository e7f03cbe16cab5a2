"""Whether a server in use stops, by one or two streams of ours that leave now and then.

Never more than two streams of ours at once, or 1 % of the slots. They leave at random moments.
Where the server shows how much memory is held, one with a long prompt leaves at a time, and each
leave is seen by itself (`gentle_memory`): two forgotten leaves in a hundred are found in minutes.

Where that cannot be seen, what the server's gauge of its requests shows around the leaves is
averaged (`averaged`): one forgotten leave in two is found in a minute, one in fifty in hours. Where
no gauge can be trusted, it is the pace of a stream of ours that stays, a twin: there each second
time the other one ends by itself, to show what an end looks like.

It cannot see a latency below half a poll and the gauge's own lag, nor, by pace, anything on a
server whose streams do not slow each other down.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from itertools import count
from typing import Final, NamedTuple, TypeVar

import numpy as np

from harness.client.live_stream import LiveStream
from harness.client.session import LoadSession
from harness.collect.source import SourceError
from harness.experiments.averaged import (
    FEWEST,
    LEVEL_STEPS,
    Array,
    Averaged,
    Leave,
    arrays,
    average,
)
from harness.experiments.gentle_memory import ByMemory, UnseenError
from harness.experiments.gentle_plan import (
    MOST_TOGETHER,
    NO_CONTEXT,
    Gentle,
    GhostRate,
    JudgedLeaves,
    StreamTurns,
    WantedPrecision,
    figures,
    is_due,
    is_look,
    level_of,
    most_streams,
    shown_part,
)
from harness.experiments.idle_server import PROMPT_TOKENS
from harness.experiments.pace import gaps_of
from harness.experiments.patience import READY_S
from harness.experiments.readings import (
    Gauge,
    MemoryGauge,
    Readings,
    RunningGauge,
    gauge_lag_s,
    poll_of,
    why_no_gauge,
)
from harness.experiments.visitors import Visitors, first_look
from harness.intervals import Interval
from harness.workload.plan import LoadPlan
from harness.workload.target import Target

_Seen = TypeVar("_Seen")
_SHORTEST_POLL_S: Final = 0.02
_POLL_COSTS: Final = 10  # times what a reading takes
_COST_READINGS: Final = 5
_TWIN_EVENTS: Final = 10  # of a level: one may be read late
_FASTER: Final = 1.5  # than now: a twin must last for a whole turn


class GentleTerms(NamedTuple):
    """`max_seconds`: when the watch ends; it ends earlier only if all is as sure as `wanted`.
    `settle_s`: the time in which a server has to let go; at most 2 s of it are watched. `slots` and
    `context` (tokens): the server's, where they are known."""

    max_seconds: float
    settle_s: float
    slots: int | None = None
    context: int | None = None
    wanted: WantedPrecision | None = None


def watch(
    session: LoadSession, urls: Sequence[str], terms: GentleTerms, rng: random.Random
) -> Iterator[Gentle]:
    """Yields what is known after each leave; the last one is final. `urls`: the metrics pages.

    Raises TargetError if the server does not serve, and CannotDecideError if nothing can be seen.
    """
    step_s, together = first_look(session)
    gauge, cost_s = _gauge_of(session.plan, urls)
    turns = StreamTurns.of(
        step_s=step_s,
        poll_s=together * step_s if gauge is None else _poll_s(session.plan.target, step_s, cost_s),
        settle_s=terms.settle_s,
        context=terms.context,
        level_steps=round(_TWIN_EVENTS * together) if gauge is None else LEVEL_STEPS,
    )
    most = most_streams(terms.slots)
    visitors = Visitors(session, turns, rng, step_s=step_s, most=most)
    looks = partial(_watch, terms=terms, began_s=time.perf_counter(), levels=map(level_of, count()))
    if gauge is None:
        with _ByTwin(visitors) as twin:
            yield from looks(twin)
        return
    alone = Visitors(session, turns.brief, rng, step_s=step_s, most=1)
    with closing(gauge):
        yield from memory_first(
            lambda: _by_memory(alone, urls, terms), lambda: _ByGauge(visitors, gauge), looks
        )


def memory_first(
    by_memory: Callable[[], AbstractContextManager[_Seen]],
    by_requests: Callable[[], AbstractContextManager[_Seen]],
    looks: Callable[[_Seen], Iterator[Gentle]],
) -> Iterator[Gentle]:
    """Looks by memory, and by requests from the moment at which memory shows nothing any more."""
    try:
        with by_memory() as seen:
            yield from looks(seen)
        return
    except UnseenError as error:
        why_no_memory = str(error)
    with by_requests() as seen:
        for found in looks(seen):
            yield found._replace(why_no_memory=why_no_memory)


def _by_memory(visitors: Visitors, urls: Sequence[str], terms: GentleTerms) -> ByMemory:
    """Raises UnseenError."""
    plan, turns = visitors.session.plan, visitors.turns
    if (why := why_no_gauge(plan.target, urls, "kv_usage")) is not None:
        raise UnseenError(f"by memory it cannot be seen: {why}")
    answer = turns.tokens(turns.dwell_s.high, visitors.step_s)
    return ByMemory(
        visitors,
        MemoryGauge(plan, urls),
        late_s=_usual_lag_s(plan.target, visitors.step_s, "kv_usage"),
        most_tokens=(terms.context or NO_CONTEXT) - answer - PROMPT_TOKENS,
        rng=visitors.rng,
    )


def _gauge_of(plan: LoadPlan, urls: Sequence[str]) -> tuple[RunningGauge | None, float]:
    """None where none can be trusted, or read; and how long a reading takes."""
    if why_no_gauge(plan.target, urls) is not None:
        return None, 0.0
    gauge = RunningGauge(plan, urls, with_waiting=True)
    try:
        return gauge, min(gauge.cost_s() for _ in range(_COST_READINGS))
    except SourceError:
        gauge.close()
        return None, 0.0


def _poll_s(target: Target, step_s: float, cost_s: float) -> float:
    """The page is read for a tenth of the time at most: it costs the server as much."""
    return max(_SHORTEST_POLL_S, poll_of(target, step_s), _POLL_COSTS * cost_s)


def _watch(
    seen: "_ByGauge | _ByTwin | ByMemory",
    terms: GentleTerms,
    began_s: float,
    levels: Iterator[float],
) -> Iterator[Gentle]:
    """`levels`: the confidence levels of the intervals at its looks."""
    stops, why, counted, least = None, "too few leaves yet", 0, None
    judged: JudgedLeaves | None = None
    is_over = False
    while not is_over:
        seen.turn()
        seconds = time.perf_counter() - began_s
        is_over = seconds >= terms.max_seconds or seen.is_over
        if is_due(seen.moments, counted) or is_over:
            judged, counted = seen.judge(), seen.moments
            if judged is not None and (is_look(seen.moments) or is_over):
                level = next(levels)
                stops, why = judged.answer(level)
                least = judged.ghosts.interval(level).low
            if stops is not None and judged is not None and terms.wanted is not None:
                is_over = is_over or judged.is_sure(terms.wanted, seen.visitors.step_s)
        found = seen.figures(judged)._replace(stops=stops, why=why, ghosts_at_least=least)
        yield found._replace(seconds=seconds, is_final=is_over)


class _ByGauge:
    """Running and waiting together: a place that a leave frees is another's at once where some
    wait."""

    is_over = False

    def __init__(self, visitors: Visitors, gauge: RunningGauge) -> None:
        self.visitors = visitors
        self._target = visitors.session.plan.target
        self._gauge = gauge
        poll_s = visitors.turns.window.poll_s
        self._readings = Readings(self._gauge.read, poll_s=poll_s, rng=visitors.rng)
        self._draws = np.random.default_rng(visitors.rng.getrandbits(64))
        self._leaves: list[Leave] = []

    def __enter__(self) -> "_ByGauge":
        self._readings.__enter__()
        self._readings.level(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._readings.__exit__()

    @property
    def moments(self) -> int:
        return len(self._leaves)

    def turn(self) -> None:
        departure = self.visitors.leave(min(self.visitors.most, MOST_TOGETHER))
        if departure is not None:
            self._leaves.append(departure)

    def judge(self) -> JudgedLeaves | None:
        window = self.visitors.turns.window
        averaged = average(self._leaves, *arrays(self._readings.columns()), window, self._draws)
        if averaged is None:
            return None
        usual_s = _usual_lag_s(self._target, self.visitors.step_s)
        return _judged(averaged, GhostRate.by_gauge(averaged), usual_s)

    def figures(self, judged: JudgedLeaves | None) -> Gentle:
        times_s, values = arrays(self._readings.columns())
        all_s = float((np.diff(times_s) * values[1:]).sum())
        floor_s = self._readings.poll_s / 2 + gauge_lag_s(self._target, self.visitors.step_s)
        streams = sum(one.streams for one in self._leaves)
        most = self.visitors.most
        averaged = None if judged is None else judged.averaged
        return figures("gauge", len(self._leaves), streams, most, judged)._replace(
            floor_s=floor_s,
            share_of_load=self.visitors.in_flight_s / all_s if all_s else None,
            shown_part=None if averaged is None else shown_part(averaged),
        )


def _judged(averaged: Averaged, ghosts: GhostRate, usual_s: float = 0.0) -> JudgedLeaves:
    judged = JudgedLeaves(ghosts, None, None, averaged.seen_by_s, averaged)
    if averaged.freed.interval().low <= 0:  # there is no fall that has a place
        return judged
    low, high = (max(0.0, one - usual_s) for one in averaged.place_ci95)
    return judged._replace(
        latency_s=max(0.0, averaged.place_s - usual_s), latency=Interval(low, high)
    )


def _usual_lag_s(target: Target, step_s: float, gauge: Gauge = "running") -> float:
    """The delay with which the gauge usually shows that a request was let go of."""
    late = target.metrics[gauge].late_steps
    return 0.0 if late is None else late.left * step_s


class _ByTwin:
    """The pace of the stream that stays, at each of its tokens."""

    is_over = False

    def __init__(self, visitors: Visitors) -> None:
        self.visitors = visitors
        self._draws = np.random.default_rng(visitors.rng.getrandbits(64))
        visitors.staying = 1
        self._twin: LiveStream | None = None
        self._earlier: list[tuple[Array, Array]] = []
        self._leaves: list[Leave] = []
        self._ends: list[Leave] = []

    def __enter__(self) -> "_ByTwin":
        return self

    def __exit__(self, *_: object) -> None:
        if self._twin is not None:
            self._twin.leave()
            self._twin.join(READY_S)

    @property
    def moments(self) -> int:
        return len(self._leaves)

    def turn(self) -> None:
        if not self._has_twin():
            return
        if len(self._ends) < len(self._leaves):
            departure, kept = self.visitors.end(), self._ends
        else:
            departure, kept = self.visitors.leave(1), self._leaves
        if departure is not None and self._twin is not None and not self._twin.has_ended:
            kept.append(departure)

    def _has_twin(self) -> bool:
        """Have a twin that lasts for this turn; it ends by itself, so that it leaves no ghost."""
        turns, step_s = self.visitors.turns, self.visitors.step_s
        needed = turns.tokens(turns.dwell_s.high, step_s / _FASTER)
        twin = self._twin
        if twin is not None:
            if not twin.has_ended and twin.spec.max_tokens - twin.tokens >= needed:
                return True
            twin.join(READY_S + needed * step_s)
            self._earlier.append(_paces(twin))
        started = self.visitors.begin(1, max(needed, turns.most_tokens))
        self._twin = None if started is None else started[0]
        return started is not None

    def judge(self) -> JudgedLeaves | None:
        parts = [*self._earlier, *([] if self._twin is None else [_paces(self._twin)])]
        if not parts or min(len(self._leaves), len(self._ends)) < FEWEST:
            return None
        times_s, paces = (np.concatenate(one) for one in zip(*parts, strict=True))
        window = self.visitors.turns.window
        left = average(self._leaves, times_s, paces, window, self._draws)
        ended = average(self._ends, times_s, paces, window, self._draws)
        if left is None or ended is None:
            return None
        why_not = ""
        if ended.freed.interval().low <= 0:
            why_not = "another stream's pace does not show yet that one ends (here it may never)"
        ghosts = GhostRate.by_pace(left, ended)
        return _judged(left, ghosts)._replace(why_not=why_not)

    def figures(self, judged: JudgedLeaves | None) -> Gentle:
        leaves = len(self._leaves)
        return figures("pace", leaves, leaves, self.visitors.most, judged)._replace(
            floor_s=self.visitors.turns.window.poll_s
        )


def _paces(twin: LiveStream) -> tuple[Array, Array]:
    """The seconds between two events, each in the middle of its gap."""
    gaps = gaps_of(twin.token_times_ns)
    middles = [gap.since_s + gap.pace_s / 2 for gap in gaps]
    return np.array(middles), np.array([gap.pace_s for gap in gaps])
