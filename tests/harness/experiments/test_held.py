"""What is still held, by one way or another."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.experiments.gauge import GaugeWatcher
from harness.experiments.held import Count, Held
from harness.experiments.idle_server import ServerFacts
from harness.experiments.occupancy import Occupancy
from harness.experiments.outcome import CannotDecideError
from harness.experiments.pace import PaceWatcher
from harness.experiments.quiet import QuietWatcher
from harness.experiments.streams import Streams


def held_of(
    slots: int | None, counts: Iterator[int], quiet: Any = None, *, could_run: bool = True
) -> Held:
    """`counts`: of the gauge, or of the requests that run at once. `quiet`: without a gauge."""
    streams: Any = SimpleNamespace(
        slots=slots,
        facts=ServerFacts(slots, 0.02, 0.02, None),
        settle_s=2.0,
        pause=lambda _: None,
        wait_for_ghosts=lambda _: None,
        could_run=lambda: could_run,
        check_ran_on=lambda: None,
    )
    no_gauge = None if quiet is None else "no gauge"
    gauge: Any = SimpleNamespace(can_judge=lambda _: no_gauge, now=lambda: next(counts))
    occupancy: Any = SimpleNamespace(running_at_once=lambda: next(counts))
    return Held(
        cast(Streams, streams),
        cast(Occupancy, occupancy),
        cast(GaugeWatcher, gauge),
        cast(QuietWatcher, quiet),
        cast(PaceWatcher, None),
    )


@pytest.mark.parametrize(("readings", "held"), [([1, 1], 0), ([1, 3, 1], 0), ([1, 3, 3], 2)])
def test_a_gauge_that_idles_above_zero_shows_nothing_held(readings: list[int], held: int) -> None:
    one = held_of(None, iter(readings))
    one.learn_idle()
    assert one.now().held == held


@pytest.mark.parametrize(("running", "held"), [([4], 0), ([3, 4], 0), ([3, 3], 1)])
def test_slots_are_held_if_a_second_count_finds_them_too(running: list[int], held: int) -> None:
    one = held_of(4, iter(running))
    one.learn_idle()
    assert one.now().held == held


@pytest.mark.parametrize(("held", "said"), [(1, "1 request still runs,"), (2, "2 requests still")])
def test_what_a_gauge_still_counts_is_said_in_its_number(held: int, said: str) -> None:
    assert Count(held, 4, "gauge").said.startswith(said)


@pytest.mark.parametrize("held", [0, 1])
def test_where_neither_slots_nor_requests_can_be_counted_a_rest_shows_that_none_is_held(
    held: int,
) -> None:
    def after(leave: Callable[[], int]) -> int:
        assert leave() == 3
        return held

    quiet: Any = SimpleNamespace(
        can_judge=lambda _: None, rest="known", is_busy=lambda: held, held=after
    )
    one = held_of(None, iter([]), quiet=quiet)
    count = one.after(lambda: 3, sees_one=True)
    assert count == Count(held, 3, "quiet")
    assert one.now() == Count(held, 0, "quiet")
    assert "at least one of 3" in Count(1, 3, "quiet").said


def test_a_rest_after_the_answers_have_ended_by_themselves_shows_nothing() -> None:
    quiet: Any = SimpleNamespace(can_judge=lambda _: None, rest="known", is_busy=lambda: False)
    assert held_of(None, iter([]), quiet).at_once() == Count(0, 0, "quiet")
    with pytest.raises(CannotDecideError, match="have ended by themselves by now"):
        held_of(None, iter([]), quiet, could_run=False).at_once()


def test_pace_is_traffic_and_shows_nothing_at_once() -> None:
    quiet: Any = SimpleNamespace(can_judge=lambda _: "no --pid", rest=None)
    with pytest.raises(CannotDecideError, match="no --pid"):
        held_of(None, iter([]), quiet).at_once()
