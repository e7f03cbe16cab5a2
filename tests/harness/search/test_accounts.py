"""The server's own account: which numbers cannot be, and gauges that are late."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.bench import Bench
from harness.records import Delivery, Outcome, RequestRow, Way
from harness.search.accounts import Counts, Gauges, left_in_the_middle, wrong_counts
from harness.search.play import Played
from harness.search.schedule import Leave, Schedule, Visit
from tests.made_up.rows import request_row

LEAVES = Visit(answer=200, leave=Leave())
STAYS = Visit(answer=8)


def row(visit: Visit, *, tokens: int = 8, max_tokens: int | None = None) -> RequestRow:
    outcome = Outcome.COMPLETED if visit.leave is None else Outcome.ABANDONED
    times = list(range(1, tokens + 1))
    one = request_row("r", sent_ns=0, ended_ns=900, outcome=outcome, token_times_ns=times)
    one.max_tokens = max_tokens or visit.answer
    return one


def played(*visits: Visit) -> Played:
    return Played(Schedule(seed=1, visits=visits), [row(one) for one in visits], [row(STAYS)])


@pytest.mark.parametrize(
    ("moved", "wrong"),
    [
        (Counts(1, 2, 24), None),
        (Counts(0, 2, 24), "0 requests are counted as aborted, though 1 clients left, 1 in the"),
        (Counts(2, 2, 24), "2 requests are counted as aborted"),
        (Counts(1, 3, 24), "3 answers are counted as whole, though 1 of 3 were left"),
        (Counts(1, 2, 23), "23 tokens are counted as generated, and clients read 24"),
        (Counts(), None),
    ],
)
def test_counters_have_counted_what_happened(moved: Counts, wrong: str | None) -> None:
    said = wrong_counts(moved, played(LEAVES, STAYS))
    assert said is wrong is None or (said or "").startswith(wrong or "-")


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_leave_at_the_last_token_may_be_counted_either_way(aborted: int) -> None:
    last = Visit(answer=9, leave=Leave())
    assert wrong_counts(Counts(aborted, 3 - aborted, 24), played(last, STAYS)) is None


@pytest.mark.parametrize(
    ("visit", "tokens", "is_sure"),
    [
        (LEAVES, 8, True),
        (LEAVES, 0, False),
        (LEAVES, 190, False),
        (STAYS, 8, False),
        (Visit(answer=200, leave=Leave(way=Way.STOP_READING)), 8, False),
        (Visit(answer=200, leave=Leave(), delivery=Delivery.UNARY), 8, False),
    ],
)
def test_which_leave_is_surely_in_the_middle(visit: Visit, tokens: int, is_sure: bool) -> None:
    one = row(visit, tokens=tokens, max_tokens=200)
    if visit is STAYS:
        one.abandoned_ns = None
    assert left_in_the_middle(visit, one) is is_sure


def gauges_of(readings: Iterator[float], *, settle_s: float = 0.0) -> Gauges:
    bench: Any = SimpleNamespace(
        pages=SimpleNamespace(counters=lambda: {"running": next(readings), "waiting": 0.0}),
        pause=lambda _: None,
        settle_s=settle_s,
    )
    return Gauges(cast(Bench, bench))


def test_a_gauge_that_is_written_late_is_waited_for_as_long_as_on_the_idle_server() -> None:
    gauges = gauges_of(iter([1, 1, 0, 1, 1, 0]))
    gauges.learn()
    gauges.late_s = 60.0
    assert gauges.broken() is None


@pytest.mark.parametrize("reading", [1.0, -1.0])
def test_a_gauge_that_does_not_come_to_rest_is_broken(reading: float) -> None:
    gauges = gauges_of(iter([0.0, *[reading] * 9]))
    gauges.learn()
    gauges.late_s = 0.0
    found = gauges.broken()
    assert found is not None
    assert f"was 0 and reads {reading:g} at rest" in found.said
