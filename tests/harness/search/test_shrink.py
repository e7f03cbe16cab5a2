"""A schedule is made small by what breaks, also where that comes now and then."""

import random

import pytest

from harness.records import Way
from harness.search.schedule import Feature, Leave, Phase, Schedule, Visit
from harness.search.shrink import MOST_TRIES, shrink, tries_for

WANTED = Visit(n=2, leave=Leave(phase=Phase.SENT, at=3))
NOISE = Visit(features=(Feature.CHAT,), prompt=300, shared=150, at=7, leave=Leave(way=Way.RST))


def breaks(schedule: Schedule) -> bool:
    """Two answers to one request that is left before its first token, and another visit."""
    is_there = any(
        one.n > 1 and one.leave is not None and one.leave.phase is Phase.SENT
        for one in schedule.visits
    )
    return is_there and len(schedule.visits) > 1


def test_what_is_needed_stays_and_all_else_goes() -> None:
    drawn = Schedule(seed=1, visits=(NOISE,) * 5 + (WANTED,) + (NOISE,) * 6, bystanders=2)
    smallest = shrink(drawn, breaks, rate=1.0, go_on=lambda: True)
    assert len(smallest.visits) == 2
    assert WANTED in smallest.visits
    other = next(one for one in smallest.visits if one != WANTED)
    assert other == Visit(leave=Leave())
    assert not smallest.bystanders


def test_what_comes_half_of_the_time_is_made_as_small() -> None:
    rng = random.Random(3)
    drawn = Schedule(seed=1, visits=(NOISE,) * 3 + (WANTED,) + (NOISE,) * 4)
    smallest = shrink(
        drawn, lambda one: breaks(one) and rng.random() < 0.5, rate=0.5, go_on=lambda: True
    )
    assert len(smallest.visits) == 2
    assert breaks(smallest)


def test_no_try_is_made_when_the_time_is_up() -> None:
    drawn = Schedule(seed=1, visits=(NOISE, WANTED))
    tried: list[Schedule] = []

    def note(schedule: Schedule) -> bool:
        tried.append(schedule)
        return True

    assert shrink(drawn, note, rate=1.0, go_on=lambda: False) == drawn
    assert not tried


@pytest.mark.parametrize(("rate", "tries"), [(1.0, 5), (0.5, 11), (0.25, MOST_TRIES)])
def test_a_reduction_that_breaks_it_half_as_often_is_missed_once_in_twenty(
    rate: float, tries: int
) -> None:
    assert tries_for(rate) == tries
    if tries < MOST_TRIES:
        assert (1 - rate / 2) ** tries <= 0.05 < (1 - rate / 2) ** (tries - 1)
