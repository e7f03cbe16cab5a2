"""What a gentle watch by memory may hold, and when it is sure of what it saw."""

import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import gevent  # noqa: TID251
import numpy as np
import pytest

from harness.experiments.averaged import Leave, LeaveWindow
from harness.experiments.gentle import memory_first
from harness.experiments.gentle_memory import (
    MOST_MEMORY,
    ByMemory,
    HeldShare,
    UnseenError,
    natural_end,
)
from harness.experiments.gentle_plan import Gentle, JudgedLeaves, StreamTurns
from harness.experiments.memory_falls import Falls, FallTally, Needed
from harness.experiments.readings import Readings, gauge_lag_s
from harness.intervals import Interval
from harness.workload.workload import load_target

NEED = Needed(least=0.01, ample=0.02)


@pytest.mark.parametrize(("rise", "fall"), [(0.06, 0.06), (0.0, 0.07), (0.051, 0.04)])
def test_a_first_prompt_that_holds_too_much_is_the_last(rise: float, fall: float) -> None:
    with pytest.raises(UnseenError, match=r"256 tokens holds .* may hold 5 % at most"):
        HeldShare.of(rise, fall, NEED, 256)
    assert HeldShare.of(0.02, 0.03, NEED, 256) == pytest.approx((0.02, 0.035))


@pytest.mark.parametrize("rise", [0.0, -0.02, 0.001, 0.004, 0.03, 0.05])
@pytest.mark.parametrize("scatter", [0.0, 0.001, 0.01, 0.08])
def test_no_prompt_grows_beyond_what_it_may_hold_by_what_was_seen(
    rise: float, scatter: float
) -> None:
    """Not even one of which noise hid all: then the scatter says how much that may be."""
    need = Needed(6 * scatter, 15 * scatter)
    holds = HeldShare.of(rise, rise, need, 256)
    longer = holds.longer(need)
    assert longer <= 8
    assert longer * (max(rise, 0.0) + 3 * scatter) <= MOST_MEMORY * (1 + 1e-9)
    if rise <= 0 == scatter:
        assert longer == 0


def test_a_prompt_that_holds_too_little_grows() -> None:
    assert HeldShare.of(0.002, 0.002, NEED, 256).longer(NEED) == pytest.approx(0.05 / 0.007)
    grown = HeldShare(0.004, 0.005).times(2)
    assert grown == (0.008, 0.01)
    assert grown.longer(NEED) == pytest.approx(1.3 * 0.02 / 0.008)


@pytest.mark.parametrize(
    ("fell_s", "is_ghost"), [(2.5, False), (3.0, True), (3.3, True), (5.5, False)]
)
def test_a_ghost_is_let_go_of_when_its_answer_must_end(fell_s: float, is_ghost: bool) -> None:
    """150 tokens of 20 to 21 ms were left at 0 s: another's fall at another time is no ghost."""
    near = natural_end(0.0, 150, Interval(0.02, 0.021), late_s=0.1)
    times_s = np.arange(0, 8, 0.02)
    falls = Falls.of(times_s, np.where(times_s < fell_s, 9.0, 1.0))
    near = near._replace(low=max(near.low, 2.6))  # until then it was let go of
    assert (falls.first(*near, held=8) is not None) is is_ghost


def test_what_leaves_never_give_back_is_a_no_and_what_is_not_known_has_bounds() -> None:
    lost = JudgedLeaves(FallTally(3, 0, 3, 12, 0), None, None, 2.0, loses=True)
    stops, why = lost.answer(0.99)
    assert stops is False
    found = Gentle(way="gauge", stops=stops, why=why, seconds=60.0, moments=3, leaves=3)
    assert found.sentence.startswith("it does not stop: the memory of streams that leave never")
    few = JudgedLeaves(FallTally(8, 0, 4, 3, 0), None, None, 2.0)
    assert few.answer(0.975) == (None, "too few leaves yet: 0 % to 87.1 % of them may be forgotten")


@pytest.mark.parametrize("before", [0, 2])
def test_where_memory_shows_nothing_any_more_the_watch_goes_on_by_requests(before: int) -> None:
    def looks(way: str) -> Iterator[Gentle]:
        for moments in range(before if way == "memory" else 3):
            yield Gentle(way="gauge", stops=None, why="", seconds=1.0, moments=moments, leaves=0)
        if way == "memory":
            raise UnseenError("its page is read too seldom")

    found = [*memory_first(lambda: nullcontext("memory"), lambda: nullcontext("requests"), looks)]
    assert [one.why_no_memory for one in found] == [""] * before + [
        "its page is read too seldom"
    ] * 3


class Server:
    """A quiet server and the streams of ours on it, of which each holds `held`; one that leaves is
    held for `after_s` more, None: for ever. It is its own session, plan and gauge."""

    target = load_target("vllm")
    requests = 1.0
    in_flight_s = 0.0
    step_s = 0.001
    steps = Interval(0.001, 0.001)
    prompt_tokens = 0
    text = ""

    def __init__(self, held: float, after_s: float | None) -> None:
        self.session = self.plan = self
        window = LeaveWindow(poll_s=0.005, level_s=0.02, after_s=0.1)
        self.turns = StreamTurns(window, Interval(0.05, 0.06), most_tokens=1000)
        self._held, self._after_s, self._now = held, after_s, 0.0
        self._reads = 0

    def read(self) -> float:
        self._reads += 1
        return self._now

    def close(self) -> None:
        pass

    def prompt(self, _spec: object, n: int) -> str:
        return f"prompt {n}"

    def pause(self, seconds: float) -> None:
        """And until some more readings came: the machine may be slow."""
        enough = self._reads + 6
        gevent.sleep(min(seconds, 0.5))
        while self._reads < enough:
            gevent.sleep(0.005)

    def _begin(self) -> tuple[float, float]:
        self.pause(0.05)
        asked_s = time.perf_counter()
        self._now += self._held
        began_s = time.perf_counter()
        self.pause(0.06)
        return asked_s, began_s

    def _let_go(self) -> None:
        self._now -= self._held

    def end(self) -> Leave:
        begun, t0_s = self._begin(), time.perf_counter()
        self._let_go()
        self.pause(0.1)
        return Leave(*begun, t0_s)

    def depart(self, _count: int) -> tuple[Leave, int]:
        begun, t0_s = self._begin(), time.perf_counter()
        if self._after_s is not None:
            gevent.spawn_later(self._after_s, self._let_go)
        return Leave(*begun, t0_s), 600


def seen_by_memory(server: Any) -> ByMemory:
    return ByMemory(server, server, late_s=0.0, most_tokens=256, rng=random.Random(1))


@pytest.mark.parametrize(
    ("after_s", "tally"),
    [
        (0.0, (2, 0, 0)),
        (0.6, (2, 2, 0)),  # when its answer ends
        (0.3, (2, 0, 2)),  # when nothing of ours does
    ],
)
def test_a_leave_is_seen_by_when_its_memory_comes_back(
    after_s: float, tally: tuple[int, int, int]
) -> None:
    with seen_by_memory(Server(0.04, after_s)) as seen:
        for _ in range(2):
            seen.turn()
        assert seen.tally[:3] == tally
        assert not seen.is_over


def test_a_server_that_gives_back_the_memory_of_ends_alone_does_not_stop() -> None:
    with seen_by_memory(Server(0.04, None)) as seen:
        while not seen.is_over:
            seen.turn()
        assert seen.tally == (3, 0, 3, 12, 0)
        judged = seen.judge()
        assert judged is not None
        assert judged.answer(0.975)[0] is False
        assert seen.figures(judged).loses


def test_a_first_prompt_that_holds_too_much_is_not_sent_again() -> None:
    with pytest.raises(UnseenError, match="may hold 5 % at most"), seen_by_memory(Server(0.06, 0)):
        pass


def test_each_gauge_has_a_lag_of_its_own() -> None:
    target = load_target("vllm")
    memory = target.metrics["kv_usage"].model_copy(update={"lag_steps": 4.0, "lag_s": 0.1})
    target = target.model_copy(update={"metrics": {**target.metrics, "kv_usage": memory}})
    assert gauge_lag_s(target, 0.02) == pytest.approx(0.04)
    assert gauge_lag_s(target, 0.02, "kv_usage") == pytest.approx(0.18)


def test_readings_are_kept_until_nobody_asks_for_them() -> None:
    readings = Readings(lambda: 7.0, poll_s=0.001, rng=random.Random(1))
    with readings:
        readings.level(10)
    times_s, _ = readings.columns()
    readings.forget(times_s[4])
    assert readings.columns()[0].tolist() == times_s[4:].tolist()
    assert [one.at_s for one in readings.since(times_s[6])] == times_s[6:].tolist()


def test_gauges_that_come_with_one_report_are_equally_late() -> None:
    """Else a watch by memory takes nothing off, and a latency is a step too long."""
    gauges = load_target("reference").metrics
    assert gauges["kv_usage"].late_steps == gauges["running"].late_steps
    assert gauges["kv_usage"].late_steps is not None
