"""Figures seen from outside: methods, pooled runs, old pages, runs without logs."""

import json
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from harness.analysis.black_box import figures_from_outside
from harness.analysis.cancellations import cancellations
from harness.analysis.figure import Figure, NotMeasurable, reading
from harness.analysis.littles_law import Balance, as_figure, held_after_leaving
from harness.analysis.open_requests import open_requests
from harness.analysis.run_facts import run_facts
from harness.analysis.summary import summarise
from harness.compare.pool import _over_rounds, analyse_round, arm_figures
from harness.store.finite import finite
from harness.store.manifest import ClockCheck
from tests.harness.analysis.scenes import figures_of, four_steps, leave_in_decode, seen
from tests.harness.told import known, metric, ms, reason, remarks, summary_of
from tests.made_up.run import RunBuilder
from tests.made_up.servers import busy_server, lonely, stepping_server


def total(run: RunBuilder) -> Balance | NotMeasurable:
    frames = run.frames()
    return held_after_leaving(frames, run_facts(frames))


def by_gauge(run: RunBuilder) -> Figure:
    return as_figure(total(run), "gauge")


@pytest.mark.parametrize(("delay", "every"), [(0.0, 20.0), (30.0, 110.0), (200.0, 20.0)])
def test_the_delay_of_a_busy_server_is_recovered(
    run: RunBuilder, delay: float, every: float
) -> None:
    busy_server(run, delay=delay, every=every)
    found = metric(by_gauge(run))
    estimate = found.others["estimate"]
    assert estimate == pytest.approx(delay / 1e3, abs=0.005 + 0.1 * delay / 1e3)
    if delay:
        low, high = known(found.mean_ci95)
        assert low <= delay / 1e3 <= high
    else:
        assert (found.mean, found.bound) == (None, "upper")
        assert found.upper95 == pytest.approx(0.0, abs=0.005)


def test_the_interval_is_right_as_often_as_it_says(run: RunBuilder) -> None:
    """A run with its scrapes in 40 phases: 95 % of the intervals should hold the truth."""
    busy_server(run, delay=60.0, every=1.0)
    frames = run.frames()
    facts = run_facts(frames)
    hits = 0
    for phase in range(40):
        times = np.sort(frames.server_metrics["t_ns"].unique())[phase * 7 :: 300]
        thin = frames.server_metrics[frames.server_metrics["t_ns"].isin(times)]
        some = replace(frames, server_metrics=thin)
        found = metric(as_figure(held_after_leaving(some, facts), "gauge"))
        low, high = known(found.mean_ci95)
        hits += low <= 0.060 <= high
    assert hits >= 34


def test_an_old_page_biases_the_gauge_no_more_than_it_says(run: RunBuilder) -> None:
    busy_server(run, delay=50.0, every=40.0, lag=25.0)
    for source in run.target.spec["metrics"].values():
        source["lag_s"] = 0.025
    found = metric(by_gauge(run))
    low, high = known(found.mean_ci95)
    assert low - found.others["bias_high"] <= 0.050 <= high - found.others["bias_low"]


def test_scrapes_that_met_nothing_do_not_show_that_there_was_nothing(run: RunBuilder) -> None:
    busy_server(run, delay=1.0, every=20_000.0)
    found = metric(by_gauge(run))
    assert found.mean is None
    assert known(found.upper95) > 0.01  # ten times what it was


def test_why_no_method_could_tell_is_said_of_each(run: RunBuilder) -> None:
    run.another_engine()
    run.metrics(running="exact", generated_tokens="exact")
    run.abandon("a", t0=100, tokens=[50, 80])
    reason = summary_of(run.frames())["not_measurable"]["cancel_latency_s"]
    assert "gave no lifecycle log" in reason
    assert "running requests were not scraped during the load" in reason
    assert reason.count("running requests were not scraped") == 1


def test_a_latency_below_zero_is_never_shown(run: RunBuilder) -> None:
    """The page is 40 ms old, and nobody said so."""
    busy_server(run, delay=10.0, every=20.0, coming_late=60.0)
    found = by_gauge(run)
    assert isinstance(found, NotMeasurable)
    assert found.reason.startswith("not enough data: by gauge")
    run.target.spec["metrics"]["running"]["lag_s"] = 0.060
    limited = metric(by_gauge(run))
    assert (limited.mean, limited.bound) == (None, "upper")
    assert 0.010 < known(limited.upper95) < 0.150
    assert remarks(run, "too few for a mean by gauge (more would not do")


def test_totals_too_far_below_zero_give_no_limit_however_wide_their_interval() -> None:
    def figure(grain: float) -> Figure:
        """The mean is -2 s, and its interval reaches far beyond 0."""
        edges, sums, counts = np.arange(2), np.array([-30.0, 10.0]), np.array([5, 5])
        span_s = grain * 10 / 3.689  # no request was met: Garwood's limit of Poisson's mean
        balance = Balance(edges_ns=edges, sums=sums, counts=counts, bias=(-0.1, 0.1), span_s=span_s)
        return as_figure(balance, "gauge")

    assert isinstance(figure(grain=1.0), NotMeasurable)
    assert metric(figure(grain=2.0)).upper95 is not None


def balance(sums: list[float], count: int = 10, **more: Any) -> Balance:
    """Blocks of time in each of which `count` requests left."""
    n = len(sums)
    counts = np.full(n, count)
    return Balance(edges_ns=np.arange(n), sums=np.array(sums), counts=counts, **more)


@pytest.mark.parametrize("value", [1e300, math.inf, math.nan])
def test_absurd_readings_cost_no_more_than_their_own_figures(run: RunBuilder, value: float) -> None:
    lonely(run)
    for sample in run.server_metrics[::3]:
        sample.value = value
    found = finite(summarise(run.frames()))
    assert json.dumps(msgspec.to_builtins(found), allow_nan=False)
    latency = found.metrics.get("cancel_latency_s")
    assert latency is None or (latency.mean or 0) < 1


def test_at_most_stays_at_most_over_rounds(run: RunBuilder) -> None:
    one = analyse_round(lonely(run).frames(), round_number=1, arm="a")
    single = metric(one.figures["cancel_latency_s"])
    found = metric(arm_figures([one, replace(one, round=2)])["cancel_latency_s"])
    assert (single.bound, found.bound) == ("upper", "upper")
    assert (found.n, found.mean, found.p50) == (2, None, None)
    assert 0 < known(found.upper95) < known(single.upper95)


def test_a_method_counts_if_all_rounds_have_it(run: RunBuilder) -> None:
    one = seen(lonely(run))
    there, missing = balance([0.1, 0.2]), NotMeasurable("it moved too little")
    rounds = [replace(one, total=of) for of in (there, missing)]
    assert reason(figures_from_outside(rounds)["cancel_latency_s"]["gauge"]) == missing.reason
    rounds = [replace(one, total=there)] * 2
    assert metric(figures_from_outside(rounds)["cancel_latency_s"]["gauge"]).n == 40


def test_a_round_in_which_nobody_left_says_nothing(run: RunBuilder) -> None:
    one = seen(lonely(run))
    empty = replace(one, num_left=0, total=NotMeasurable("nobody left"))
    assert figures_from_outside([one, empty]) == figures_from_outside([one])
    assert figures_from_outside([empty])["cancel_latency_s"] == {}


def test_one_scrape_that_met_all_who_left_together_is_not_enough_for_a_mean() -> None:
    """24 of 34 left at once, and one scrape that stood for half a second met them all."""
    sums = [0.01, 0.01, 0.01, 12.0]
    alike = as_figure(balance(sums, met=24.0, span_s=0.05), "gauge")
    at_once = as_figure(balance(sums, met=24.0, span_s=0.05, squares=(24 * 0.5) ** 2), "gauge")
    assert metric(alike).others["grain"] < metric(at_once).others["grain"]
    assert (metric(at_once).mean, metric(at_once).bound) == (None, "upper")
    assert metric(at_once).needs["mean"] > 40


@pytest.mark.parametrize(("step", "stays"), [(8.0, 0.6), (20.0, 0.1), (55.0, 0.6)])
def test_the_mean_age_of_a_page_is_put_right(run: RunBuilder, step: float, stays: float) -> None:
    """A cancel takes half a step, and a request that comes waits as long."""
    true_s = stepping_server(run, step=step, stays=stays)
    found = total(run)
    assert isinstance(found, Balance)
    assert found.mean == pytest.approx(true_s, abs=0.25 * step / 1e3)
    assert found.bias[0] + found.mean - found.grain <= true_s + step / 1e3


def test_the_age_of_a_page_in_steps_is_not_known_where_no_step_was_seen(run: RunBuilder) -> None:
    lonely(run).requests.clear()
    run.abandon("a", t0=100, tokens=[])
    run.target.spec["metrics"]["running"]["lag_steps"] = 2.0
    found = figures_from_outside([seen(run)])["cancel_latency_s"]["gauge"]
    why = "its_running can be 2 steps old, and how long a step takes was not seen"
    assert why in reason(found)


def test_a_request_that_the_log_does_not_know_is_in_no_figure(run: RunBuilder) -> None:
    leave_in_decode(run, "a")
    run.abandon("lost", t0=33, tokens=[21])
    four_steps(run, "a")
    cancels = cancellations(run.frames()).set_index("request_id")
    lost = cancels.drop(index="a")
    unknown = ["cancel_latency_s", "cancel_latency_steps", "ghost", "phase", "generated_tokens"]
    unknown += ["wasted_tokens", "slot_seconds", "block_seconds", "gpu_seconds", "detect_s"]
    assert lost[unknown].isna().all(axis=None)
    assert not lost["censored"].any()
    figures = figures_of(run)
    assert metric(figures["cancel_latency_s"]).n == 1
    assert metric(figures["wasted_tokens"]).n == 1


def test_on_two_clocks_only_differences_of_one_are_taken(run: RunBuilder) -> None:
    run.manifest.clock = ClockCheck(comparable=False)
    leave_in_decode(run)
    four_steps(run, "a")
    figures = figures_of(run)
    unknown = ["detect_s", "cancel_latency_s", "cancel_latency_steps"]
    unknown += ["wasted_after_close_tokens", "slot_seconds_after_abandon"]
    assert all("clock" in reason(figures[name]) for name in unknown)
    assert metric(figures["wait_s"]).p50 == ms(4.6)
    assert metric(figures["wasted_tokens"]).mean == 1
    assert metric(figures["ghost_rate"]).mean == 0


def test_a_request_without_a_connection_or_refused_was_never_there(run: RunBuilder) -> None:
    for outcome in ("abandoned", "timed_out", "cut_off", "completed", "rejected"):
        run.request(outcome, sent=0, tokens=[], outcome=outcome, end=50)
    for outcome in ("abandoned", "timed_out", "cut_off"):
        more = {"outcome": outcome, "wire_close": "unopened"}
        run.request(f"unopened {outcome}", sent=0, tokens=[], end=50, **more)
    held = open_requests(run.frames().requests)
    assert (held.n_left, len(held.started_ns)) == (3, 4)


@pytest.mark.parametrize(
    ("rounds", "found"),
    [
        ([("gauge", "point")], (4.0, "point")),
        ([("gauge", "point"), ("gauge", "lower")], (5.0, "lower")),
        ([("gauge", "point"), ("exact", "point")], "the rounds have it by different methods"),
        ([("gauge", "point"), ("gauge", "upper")], "a round has only an upper limit"),
    ],
)
def test_readings_of_rounds_become_one(
    rounds: list[tuple[str, str]], found: tuple[float, str] | str
) -> None:
    made: list[Figure] = [
        reading("leaked_slots", 4.0 + 2 * place, method=method, bound=bound)
        if bound != "upper"
        else as_figure(balance([-0.1, 0.1], met=3.0, span_s=0.1), method)
        for place, (method, bound) in enumerate(rounds)
    ]
    over_rounds = _over_rounds(made)
    if isinstance(found, str):
        assert reason(over_rounds) == found
    else:
        assert (metric(over_rounds).mean, metric(over_rounds).bound) == found
