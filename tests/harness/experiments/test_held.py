"""What is still held, by one way or another."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.experiments.facts import Facts
from harness.experiments.gauge import GaugeWatcher
from harness.experiments.held import Count, Held
from harness.experiments.occupancy import Occupancy
from harness.experiments.pace import PaceWatcher
from harness.experiments.streams import Streams


def held_of(slots: int | None, counts: Iterator[int]) -> Held:
    """`counts`: of the gauge, or of the requests that run at once."""
    streams: Any = SimpleNamespace(
        slots=slots, facts=Facts(slots, 0.02, 0.02, None), settle_s=2.0, pause=lambda _: None
    )
    gauge: Any = SimpleNamespace(can_judge=lambda _: None, now=lambda: next(counts))
    occupancy: Any = SimpleNamespace(running_at_once=lambda: next(counts))
    return Held(
        cast(Streams, streams),
        cast(Occupancy, occupancy),
        cast(GaugeWatcher, gauge),
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
