"""What is seen from outside, of one run and of several: sums are added up, and no limit becomes
another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from harness.analysis.black_box import figures_from_outside
from harness.analysis.facts import run_facts
from harness.analysis.figure import Figure, NotMeasurable, reading
from harness.analysis.littles_law import (
    Balance,
    as_figure,
    delay_of_aborts,
    pooled,
    step_boundaries,
)
from harness.analysis.open_requests import open_requests
from harness.analysis.pool import _over_rounds, analyse_round, arm_figures
from harness.analysis.scraped import lag_ns
from tests.harness.from_outside import lonely_run, seen
from tests.harness.told import metric, reason
from tests.made_up.rows import at
from tests.made_up.servers import alone_one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def balance(sums: list[float], count: int = 10, **more: Any) -> Balance:
    """Blocks in each of which so many left."""
    n = len(sums)
    counts = np.full(n, count)
    return Balance(edges_ns=np.arange(n), sums=np.array(sums), counts=counts, **more)


# Cancel latency.


def test_rounds_are_pooled_by_their_sums(make_run: MakeRun) -> None:
    """A round of few weighs little."""
    few, many = balance([0.5, 0.6, 0.4]), balance([1.0, 1.2, 0.8], count=100)
    one = seen(lonely_run(make_run))
    rounds = [replace(one, totals={"gauge": found}) for found in (few, many)]
    found = metric(figures_from_outside(rounds)["cancel_latency_s"]["gauge"])
    assert found.mean == pytest.approx((1.5 + 3.0) / (3 * 10 + 3 * 100))
    assert (found.n, found.p50, found.p99) == (330, None, None)


def test_at_most_stays_at_most_over_rounds(make_run: MakeRun) -> None:
    rounds = [analyse_round(lonely_run(make_run).frames(), round_number=i, arm="a") for i in (1, 2)]
    single = metric(rounds[0].figures["cancel_latency_s"])
    found = metric(arm_figures(rounds)["cancel_latency_s"])
    assert (single.bound, found.bound) == ("upper", "upper")
    assert (found.n, found.mean, found.p50) == (2, None, None)
    assert found.upper95 is not None
    assert single.upper95 is not None
    assert 0 < found.upper95 < single.upper95


def test_a_method_counts_if_all_rounds_have_it(make_run: MakeRun) -> None:
    one = seen(lonely_run(make_run))
    known, missing = balance([0.1, 0.2]), NotMeasurable("it moved too little")
    rounds = [
        replace(one, totals={"counter": known, "gauge": known}),
        replace(one, totals={"counter": missing, "gauge": known}),
    ]
    methods = figures_from_outside(rounds)["cancel_latency_s"]
    assert reason(methods["counter"]) == "it moved too little"
    assert metric(methods["gauge"]).n == 40


def test_a_round_in_which_nobody_left_says_nothing(make_run: MakeRun) -> None:
    one = seen(lonely_run(make_run))
    empty = replace(one, num_left=0, totals={"gauge": NotMeasurable("nobody left")})
    assert figures_from_outside([one, empty]) == figures_from_outside([one])
    assert figures_from_outside([empty])["cancel_latency_s"] == {}


def test_old_pages_are_in_the_interval_of_a_mean() -> None:
    plain = metric(as_figure(balance([1.0, 1.2, 0.8]), "counter"))
    old = metric(as_figure(balance([1.0, 1.2, 0.8], bias=(-0.05, 0.02)), "counter"))
    assert plain.mean_ci95 is not None
    assert plain.mean_ci95[0] > 0
    low, high = plain.mean_ci95
    assert old.mean_ci95 == pytest.approx((low - 0.02, high + 0.05))
    older = metric(as_figure(balance([1.0, 1.2, 0.8], bias=(-0.05, 9.0)), "counter"))
    assert older.mean_ci95 is not None
    assert older.mean_ci95[0] == 0


def test_what_goes_on_for_ever_makes_the_mean_a_lower_bound() -> None:
    going_on = balance([1.0, 1.2, 0.8], goes_on=True)
    assert metric(as_figure(going_on, "gauge")).bound == "lower"
    over = balance([1.0, 1.2, 0.8])
    assert metric(as_figure(pooled([over, going_on]), "gauge")).bound == "lower"
    assert metric(as_figure(over, "gauge")).bound == "point"


def test_requests_that_are_there_for_ever_make_the_figure_of_a_run_a_lower_bound(
    make_run: MakeRun,
) -> None:
    run = lonely_run(make_run)
    run.manifest.idle.after |= {"running": 1.0}
    found = metric(figures_from_outside([seen(run)])["cancel_latency_s"]["gauge"])
    assert found.bound == "lower"


def left_unseen(run: RunBuilder, left: int, unseen: int) -> RunBuilder:
    """One leaves every 100 ms and is counted as aborted 20 ms later; then some more leave
    at about 506 ms, before the server saw them."""
    alone_one_by_one(run, 0)
    run.metrics(running="exact", waiting="exact", aborted="exact")
    for i in range(left):
        sent, end = 100.0 * i, 100.0 * i + 50
        run.request(str(i), sent=sent, tokens=[sent + 20], outcome="abandoned", end=end)
    for i in range(unseen):
        run.request(f"unseen {i}", sent=504, tokens=[], outcome="abandoned", end=506 + i)
    run.manifest.window.load_ended_ns = at(100.0 * left)
    for t in np.arange(5.0, 100.0 * left, 10.0):
        run.scrape(t, "its_aborted", float(max(0, (t + 30) // 100)))
    run.idle({"aborted": 0.0}, {"aborted": float(left)})
    return run


def test_who_left_before_the_server_saw_them_is_not_waited_for(make_run: MakeRun) -> None:
    run = left_unseen(make_run(), left=30, unseen=2)
    frames = run.frames()
    found = delay_of_aborts(frames, run_facts(frames))
    assert isinstance(found, Balance)
    assert found.n == 30
    assert found.mean == pytest.approx(0.020, abs=0.005)


def test_who_is_still_there_is_waited_for_to_the_end(make_run: MakeRun) -> None:
    run = left_unseen(make_run(), left=30, unseen=2)
    run.idle({"running": 0.0, "aborted": 0.0}, {"running": 2.0, "aborted": 30.0})
    frames = run.frames()
    found = delay_of_aborts(frames, run_facts(frames))
    assert isinstance(found, Balance)
    assert (found.n, found.goes_on) == (32, True)
    assert found.mean == pytest.approx((30 * 0.020 + 3.494 + 3.493) / 32, abs=0.005)


def test_a_counter_that_misses_many_tells_nothing(make_run: MakeRun) -> None:
    run = left_unseen(make_run(), left=10, unseen=2)
    frames = run.frames()
    found = delay_of_aborts(frames, run_facts(frames))
    assert isinstance(found, NotMeasurable)
    assert "which of them it means is not known" in found.reason


def test_who_timed_out_has_left_and_who_was_refused_was_never_there(make_run: MakeRun) -> None:
    run = make_run()
    for outcome in ("abandoned", "timed_out", "cut_off", "completed", "rejected"):
        run.request(outcome, sent=0, tokens=[], outcome=outcome, end=50)
    held = open_requests(run.frames().requests)
    assert (held.n_left, len(held.started_ns)) == (3, 4)


def test_who_never_had_a_connection_was_never_there(make_run: MakeRun) -> None:
    run = make_run()
    run.request("a", sent=0, tokens=[], outcome="abandoned", end=50, wire_close="fin")
    for outcome in ("abandoned", "timed_out", "cut_off"):
        run.request(outcome, sent=0, tokens=[], outcome=outcome, end=50, wire_close="unopened")
    held = open_requests(run.frames().requests)
    assert (held.n_left, len(held.started_ns)) == (1, 1)


def test_a_page_is_as_old_as_half_of_its_scrape(make_run: MakeRun) -> None:
    run = lonely_run(make_run)
    for sample in run.server_metrics:
        sample.duration_ns = 8_000_000
    frames = run.frames()
    assert lag_ns(frames, run_facts(frames), "running") == 4_000_000


def test_tokens_no_further_apart_than_half_a_gap_are_of_one_step(make_run: MakeRun) -> None:
    run = make_run()
    run.request("a", sent=0, tokens=[10, 20, 30], outcome="completed", end=30)
    run.request("b", sent=0, tokens=[14, 26], outcome="completed", end=30)
    ends = step_boundaries(run.frames().requests)
    assert [int(t - at(0)) / 1e6 for t in ends] == [10, 20, 26]


# Readings, one a round.


def test_a_lower_bound_in_one_round_makes_one_of_all() -> None:
    rounds: list[Figure] = [
        reading(4.0, unit="slots", method="gauge"),
        reading(6.0, unit="slots", method="gauge", bound="lower"),
    ]
    found = metric(_over_rounds(rounds))
    assert (found.mean, found.bound, found.max, found.p50) == (5.0, "lower", 6.0, None)
    assert metric(_over_rounds(rounds[:1])).bound == "point"


def test_readings_by_different_methods_are_not_mixed() -> None:
    rounds: list[Figure] = [
        reading(4.0, unit="slots", method="gauge"),
        reading(6.0, unit="slots", method="exact"),
    ]
    assert reason(_over_rounds(rounds)) == "the rounds have it by different methods"


def test_a_limit_in_one_round_is_no_value() -> None:
    limit = metric(as_figure(balance([-0.1, 0.1], met=3.0, span_s=0.1), "gauge"))
    rounds: list[Figure] = [reading(4.0, unit="s", method="gauge"), limit]
    assert reason(_over_rounds(rounds)) == "a round tells no more than what it does not exceed"


def test_one_scrape_that_met_all_who_left_together_is_not_enough_for_a_mean() -> None:
    """24 of 34 left at once, and one scrape that stood for half a second met them all."""
    sums = [0.01, 0.01, 0.01, 12.0]
    alike = as_figure(balance(sums, met=24.0, span_s=0.05), "gauge")
    at_once = as_figure(balance(sums, met=24.0, span_s=0.05, squares=(24 * 0.5) ** 2), "gauge")
    assert metric(alike).others["grain"] < metric(at_once).others["grain"]
    assert (metric(at_once).mean, metric(at_once).bound) == (None, "upper")
    assert metric(at_once).needs["mean"] > 40
