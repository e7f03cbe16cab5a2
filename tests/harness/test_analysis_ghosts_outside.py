"""Ghosts seen from outside, of one run and of several: who may be none only limits them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from harness.analysis.black_box import figures_from_outside
from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.ghosts import Ghosts
from harness.analysis.stats import rate_upper95
from harness.records import Metric
from tests.harness.from_outside import lonely_run, seen
from tests.harness.told import metric, reason, summary_of
from tests.made_up.rows import at
from tests.made_up.servers import alone_one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def ghost_rate(make_run: MakeRun, *found: Ghosts) -> Metric:
    one = seen(lonely_run(make_run))
    runs = [replace(one, ghosts={"counter": ghosts}) for ghosts in found]
    return metric(figures_from_outside(runs)["ghost_rate"]["counter"])


def test_ghosts_of_rounds_are_added_up(make_run: MakeRun) -> None:
    """Three rounds of none in ten are none in thirty."""
    found = ghost_rate(make_run, *[Ghosts(n=10, low=0, high=0)] * 3)
    assert (found.n, found.mean, found.bound) == (30, 0.0, "point")
    assert found.upper95 == pytest.approx(rate_upper95(0, 30))


def test_a_lower_bound_of_ghosts_has_no_upper_limit(make_run: MakeRun) -> None:
    found = ghost_rate(make_run, Ghosts(n=10, low=2, high=None), Ghosts(n=10, low=0, high=0))
    assert (found.mean, found.bound, found.upper95) == (0.1, "lower", None)


def test_ghosts_that_may_be_none_are_only_limited(make_run: MakeRun) -> None:
    found = ghost_rate(make_run, Ghosts(n=10, low=0, high=3))
    assert (found.mean, found.bound) == (None, "upper")
    assert found.upper95 == pytest.approx(rate_upper95(3, 10))


def counting(run: RunBuilder, *, left: int, aborted: float, max_tokens: int) -> RunBuilder:
    """Requests that were left, one a second, and a counter of aborts that moved so far."""
    alone_one_by_one(run, left)
    run.metrics(running="exact", waiting="exact", aborted="exact")
    run.manifest.window.load_ended_ns, run.manifest.window.settled_ns = at(9_000), at(12_000)
    for i, row in enumerate(run.requests):
        row.max_tokens = max_tokens
        assert row.request_id == str(i)
    run.idle(
        {"running": 0, "waiting": 0, "aborted": 0},
        {"running": 0, "waiting": 0, "aborted": aborted},
    )
    return run


def ghosts_of(run: RunBuilder) -> dict[str, Figure]:
    return figures_from_outside([seen(run)])["ghost_rate"]


def test_who_was_not_aborted_and_ended_by_himself_is_a_ghost_by_the_counter(
    make_run: MakeRun,
) -> None:
    """Twenty tokens of 30 ms are over long before the settle time is: the gauge sees nothing."""
    run = counting(make_run(), left=8, aborted=0.0, max_tokens=20)
    found = ghosts_of(run)
    assert reason(found["gauge"]).startswith(
        "no ghost was there after the settle time, but only 0 of 8 who left had twice that time"
    )
    assert (metric(found["counter"]).mean, metric(found["counter"]).bound) == (1.0, "point")
    assert summary_of(run.frames())["metrics"]["ghost_rate"]["mean"] == 1.0


def test_a_counter_that_stands_still_makes_no_ghosts(make_run: MakeRun) -> None:
    """All would still be there, and nobody is."""
    found = ghosts_of(counting(make_run(), left=8, aborted=0.0, max_tokens=100_000))
    assert "which what else is known does not explain" in reason(found["counter"])
    gauge = metric(found["gauge"])
    assert (gauge.mean, gauge.bound, gauge.upper95) == (0.0, "lower", None)


@pytest.mark.parametrize("aborted", [16.0, 9.0])
def test_a_counter_that_counts_too_much_tells_of_no_ghosts(
    make_run: MakeRun, aborted: float
) -> None:
    found = ghosts_of(counting(make_run(), left=8, aborted=aborted, max_tokens=100_000))
    assert isinstance(found["counter"], NotMeasurable)


def test_a_counter_that_still_moves_tells_of_no_ghosts(make_run: MakeRun) -> None:
    run = counting(make_run(), left=8, aborted=7.0, max_tokens=20)
    assert metric(ghosts_of(run)["counter"]).mean == 1 / 8
    run.manifest.idle.later = {"running": 0, "waiting": 0, "aborted": 8.0}
    assert reason(ghosts_of(run)["counter"]) == "its_aborted still moved after the settle time"


def test_all_aborted_is_known_to_be_none(make_run: MakeRun) -> None:
    found = ghosts_of(counting(make_run(), left=8, aborted=8.0, max_tokens=100_000))
    assert list(found) == ["counter", "gauge"]
    assert metric(found["counter"]).upper95 == pytest.approx(rate_upper95(0, 8))


def test_who_left_before_an_answer_or_at_its_end_may_be_no_ghost(make_run: MakeRun) -> None:
    run = counting(make_run(), left=8, aborted=6.0, max_tokens=20)
    run.requests[0].first_token_ns = None
    run.requests[1].max_tokens = 6
    found = ghosts_of(run)
    assert list(found) == ["counter", "gauge"] or isinstance(found["gauge"], NotMeasurable)
    assert (metric(found["counter"]).mean, metric(found["counter"]).bound) == (None, "upper")
