"""The server's own account: which numbers cannot be, and gauges that are late."""

from collections.abc import Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.bench import Bench
from harness.records import Delivery, Outcome, RequestRow, Way
from harness.search.accounts import Counts, Gauges, Pace, is_cut_short, wrong_counts
from harness.search.play import Played
from harness.search.schedule import Feature, Leave, Schedule, Visit
from tests.made_up.rows import request_row

LEAVES = Visit(answer=200, leave=Leave())
STAYS = Visit(answer=8)
PACE = Pace(step_s=0.01, settle_s=0.4)


def row(visit: Visit, *, tokens: int = 8) -> RequestRow:
    outcome = Outcome.COMPLETED if visit.leave is None else Outcome.ABANDONED
    times = list(range(1, tokens + 1))
    one = request_row("r", sent_ns=0, ended_ns=900, outcome=outcome, token_times_ns=times)
    one.max_tokens = visit.answer
    return one


def played(*visits: Visit) -> Played:
    return Played(Schedule(seed=1, visits=visits), [row(one) for one in visits], [row(STAYS)])


@pytest.mark.parametrize(
    ("moved", "wrong"),
    [
        (Counts(1, 2, 24), None),
        (Counts(0, 2, 24), "the server counts 0 requests as aborted, though 1 client left, 1 in"),
        (Counts(2, 2, 24), "the server counts 2 requests as aborted"),
        (Counts(1, 3, 24), "the server counts 3 answers as whole, though of 3 clients left 1"),
        (Counts(1, 2, 21), None),
        (Counts(1, 2, 20), "the server counts 20 tokens as generated, and clients read 24"),
        (Counts(), None),
    ],
)
def test_counters_have_counted_what_happened(moved: Counts, wrong: str | None) -> None:
    said = wrong_counts(moved, played(LEAVES, STAYS), PACE)
    assert said is wrong is None or (said or "").startswith(wrong or "-")


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_leave_at_the_last_token_may_be_counted_either_way(aborted: int) -> None:
    last = Visit(answer=9, leave=Leave())
    assert wrong_counts(Counts(aborted, 3 - aborted, 24), played(last, STAYS), PACE) is None


def test_what_leaves_before_its_first_token_is_not_whole_and_perhaps_not_aborted() -> None:
    early = Played(Schedule(seed=1, visits=(LEAVES,)), [row(LEAVES, tokens=0)], [])
    assert wrong_counts(Counts(0, 0), early, PACE) is None
    assert wrong_counts(Counts(0, 1), early, PACE) is not None


@pytest.mark.parametrize("special", [{"n": 2}, {"features": (Feature.CHAT, Feature.STOP)}])
def test_an_answer_that_may_have_ended_by_itself_may_be_counted_as_whole(
    special: dict[str, Any],
) -> None:
    visit = Visit(answer=200, leave=Leave(), **special)
    assert wrong_counts(Counts(aborted=0, well=visit.n + 1), played(visit), PACE) is None


def test_what_stays_and_does_not_end_in_time_may_be_counted_as_aborted() -> None:
    late, lost = row(STAYS), Visit(answer=8)
    late.outcome = Outcome.TIMED_OUT
    some = Played(Schedule(seed=1, visits=(STAYS, lost)), [late, None], [late, None, row(STAYS)])
    assert wrong_counts(Counts(4), some, PACE) is None
    assert wrong_counts(Counts(5), some, PACE) is not None


@pytest.mark.parametrize(
    ("visit", "tokens", "after_steps", "is_short"),
    [
        (LEAVES, 8, 9, True),
        (LEAVES, 100, 101, True),
        (LEAVES, 121, 122, False),
        (LEAVES, 190, 200, False),
        (Visit(answer=200, leave=Leave(way=Way.STOP_READING)), 8, 9, False),
        (Visit(answer=200, leave=Leave(), delivery=Delivery.UNARY), 0, 20, True),
        (Visit(answer=200, leave=Leave(), delivery=Delivery.UNARY), 0, 190, False),
    ],
)
def test_which_answer_is_surely_cut_short(
    visit: Visit,
    tokens: int,
    after_steps: int,
    is_short: bool,
) -> None:
    """A server at twice its pace makes 80 tokens in its settle time."""
    one = row(visit, tokens=tokens)
    one.abandoned_ns = int(after_steps * PACE.step_s * 1e9)
    assert is_cut_short(visit, one, PACE) is is_short


def gauges_of(readings: Iterator[float]) -> Gauges:
    now_s = 0.0

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    bench: Any = SimpleNamespace(
        pages=SimpleNamespace(counters=lambda: {"running": next(readings), "waiting": 0.0}),
        pause=pause,
        settle_s=0.0,
        short=lambda tokens: tokens,
        whole=lambda _: None,
    )
    return Gauges(cast(Bench, bench), clock_s=lambda: now_s)


def test_a_gauge_that_is_written_late_is_waited_for_as_long_as_on_the_idle_server() -> None:
    gauges = gauges_of(iter([0, 1, 0, 0, 0, 1, 1, 0]))
    gauges.learn()
    assert gauges.broken() is None


def test_how_late_a_gauge_is_is_looked_at_three_times_and_the_longest_counts() -> None:
    gauges = gauges_of(iter([0, 0, 1, 1, 1, 0, 0]))
    gauges.learn()
    assert gauges.late_s == pytest.approx(0.3)


def test_a_gauge_that_never_reads_0_is_not_looked_at_again() -> None:
    gauges = gauges_of(repeat(1.0))
    gauges.learn()
    assert gauges.late_s == pytest.approx(45.0, abs=0.2)
    assert gauges.broken() is None


@pytest.mark.parametrize("reading", [1.0, -1.0])
def test_a_gauge_that_does_not_come_to_rest_is_broken(reading: float) -> None:
    gauges = gauges_of(iter([*[0.0] * 4, *[reading] * 9]))
    gauges.learn()
    found = gauges.broken()
    assert found is not None
    assert f"was 0 and reads {reading:g} at rest" in found.said
