"""What the users felt, how busy the engine was, what the counters say: by hand."""

from collections.abc import Callable

import pytest

from harness.analysis.capacity import capacity_figures, series_figures, series_of
from harness.analysis.counters import count_figures, wasted_by_counter
from harness.analysis.facts import run_facts
from harness.analysis.figure import Figures
from harness.analysis.latency import latency_figures
from harness.analysis.leaks import leak_figures
from harness.analysis.tokens import token_counting, tokens_per_event, tokens_read
from harness.records import Role, TokenCounting
from tests.harness.told import metric, ms, reason
from tests.made_up.run import RunBuilder

MakeRun = Callable[[], RunBuilder]


def latency_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    return latency_figures(frames.requests, run_facts(frames))


def capacity_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    facts = run_facts(frames)
    return capacity_figures(frames, facts) | series_figures(series_of(frames, facts), facts)


def counters_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    facts = run_facts(frames)
    waste = wasted_by_counter(frames.requests, facts)
    return leak_figures(facts) | count_figures(frames.lifecycle, facts) | {"waste": waste}


def test_times_of_those_who_stayed(run: RunBuilder) -> None:
    run.request("a", sent=10, tokens=[30, 40, 60], outcome="completed", end=61)
    run.request("b", sent=10, tokens=[50, 60], outcome="completed", end=61)
    run.requests[1].intended_start_ns -= 4_000_000
    figures = latency_of(run)
    assert metric(figures["ttft_s"]).mean == ms(30)
    assert metric(figures["itl_s"]).mean == ms(40 / 3)
    assert metric(figures["tpot_s"]).mean == ms((15 + 10) / 2)
    assert metric(figures["e2e_s"]).mean == ms(50)
    assert metric(figures["goodput_rps"]).mean == pytest.approx(2.0)
    assert metric(figures["start_delay_s"]).max == ms(4)


def test_times_between_tokens_are_of_one_of_several_answers(run: RunBuilder) -> None:
    run.request("a", sent=10, tokens=[30, 31, 50, 51], outcome="completed", end=61, n=2)
    figures = latency_of(run)
    assert metric(figures["itl_s"]).mean == metric(figures["itl_s"]).max == ms(20)
    assert metric(figures["tpot_s"]).mean == ms(21)


def test_a_wait_that_brought_no_token_is_censored(run: RunBuilder) -> None:
    run.request("a", sent=10, tokens=[30], outcome="completed", end=31)
    run.request("cut", sent=10, tokens=[], outcome="cut_off", end=90)
    run.request("slow", sent=10, tokens=[], outcome="timed_out", end=110)
    run.request("busy", sent=10, tokens=[], outcome="rejected", end=11)
    run.abandon("left", t0=70, tokens=[])
    figures = latency_of(run)
    ttft = metric(figures["ttft_s"])
    assert (ttft.n, ttft.n_censored, ttft.p50, ttft.mean) == (3, 2, None, None)
    assert ttft.lower_bounds["p50"] == ms(100)
    everybody = metric(ttft.others["all_users"])
    assert (everybody.n, everybody.n_censored) == (4, 3)


def test_an_answer_that_was_complete_and_empty_has_no_first_token(run: RunBuilder) -> None:
    run.abandon("left", t0=70, tokens=[20, 60])
    run.request("empty", sent=10, tokens=[], outcome="completed", end=31)
    why = "no request that was to be read to its end had a token, or waited for one"
    assert reason(latency_of(run)["ttft_s"]) == why
    run.request("read", sent=10, tokens=[30], outcome="completed", end=31)
    ttft = metric(latency_of(run)["ttft_s"])
    assert (ttft.n, ttft.n_censored, ttft.max) == (1, 0, ms(20))


def test_those_who_left_are_not_survivors(run: RunBuilder) -> None:
    run.abandon("left", t0=70, tokens=[20, 60])
    run.request("late", sent=900, tokens=[990, 1010], outcome="completed", end=1011)
    figures = latency_of(run)
    assert metric(figures["itl_s"]).p50 == ms(20)
    assert metric(figures["goodput_rps"]).mean == 0.0  # completed after the load's end


def test_one_who_was_to_leave_is_no_survivor_even_if_the_run_ended_first(run: RunBuilder) -> None:
    run.request("stays", sent=10, tokens=[30, 40], outcome="completed", end=41)
    run.request("cut", sent=0, tokens=[], outcome="cut_off", end=500, planned_abandon=4)
    run.request("over", sent=0, tokens=[1, 2], outcome="completed", end=3, planned_abandon=4)
    figures = latency_of(run)
    assert (metric(figures["ttft_s"]).n, metric(figures["ttft_s"]).p99) == (1, ms(20))
    assert metric(figures["itl_s"]).p50 == metric(figures["tpot_s"]).p50 == ms(10)
    assert metric(figures["e2e_s"]).n == 1
    assert metric(figures["goodput_rps"]).mean == pytest.approx(2.0)  # but both were served
    assert metric(metric(figures["ttft_s"]).others["all_users"]).n == 3


def test_an_event_with_two_tokens_counts_twice_in_tpot(run: RunBuilder) -> None:
    run.request("a", sent=0, tokens=[10, 40], outcome="completed", end=41, completion_tokens=4)
    figures = latency_of(run)
    assert metric(figures["tpot_s"]).p50 == ms(10)
    assert metric(figures["itl_s"]).p50 == ms(30)


def test_fillers_and_probes_are_not_users(run: RunBuilder) -> None:
    run.request("f", sent=0, tokens=[10, 40], outcome="completed", end=41, role=Role.FILLER)
    figures = latency_of(run)
    gaps = metric(figures.pop("itl_s"))
    assert (gaps.p50, gaps.of) == (ms(30), "fillers")
    assert {reason(figure) for figure in figures.values()} == {
        "this workload has no ordinary users, only fillers and probes"
    }


def test_utilisation_and_throughput_of_the_load_window(run: RunBuilder) -> None:
    run.step(-50, 50, sampled=("a", "b"), a=1, b=1)  # half of it before the load
    run.step(100, 300, sampled=("a", "b"), a=1, b=1)
    run.step(300, 500, sampled=("a",), a=1)
    run.step(900, 1100, sampled=("a",), a=1)  # ends after the load
    figures = capacity_of(run)
    busy = 2 * 50 + 2 * 200 + 1 * 200 + 1 * 100
    assert metric(figures["slot_utilisation"]).mean == pytest.approx(busy / (2 * 1000))
    assert metric(figures["throughput_tps"]).mean == pytest.approx(5.0)
    step = metric(figures["step_s"])
    assert (step.n, step.p50, step.mean) == (4, ms(200), ms(175))


def test_another_engines_utilisation_is_what_its_gauge_showed(run: RunBuilder) -> None:
    run.request("a", sent=10, tokens=[30, 40, 60], outcome="completed", end=61)
    run.metrics(running="exact")
    for t, value in ((-5, 9), (100, 1), (200, 2), (1100, 9)):
        run.scrape(t, "its_running", value)
    figures = capacity_of(run)
    used = metric(figures["slot_utilisation"])
    assert (used.mean, used.method, used.n) == (0.75, "gauge", 2)
    read = metric(figures["throughput_tps"])
    assert read.mean == pytest.approx(3.0)
    assert (read.bound, read.method) == ("lower", "client")
    assert "no step log" in reason(figures["step_s"])


def test_pages_of_several_urls_are_one_reading(run: RunBuilder) -> None:
    """Each shows half of what runs, and is read a little later than the one before."""
    run.metrics(running="exact")
    for t in (100, 200, 350):
        for late, url in ((0, "a"), (2, "b")):
            run.scrape(t + late, "its_running", 1.0, f'{{"metrics_url": "{url}"}}')
    figures = capacity_of(run)
    used, interval = metric(figures["slot_utilisation"]), metric(figures["scrape_interval_s"])
    assert (used.mean, used.n) == (1.0, 3)
    assert (interval.n, interval.mean) == (2, ms(125))


def test_only_series_with_the_targets_labels_count(run: RunBuilder) -> None:
    run.metrics(running="exact")
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["running"]["labels"] = {"state": "running"}
    for state in ("running", "swapped"):
        run.scrape(100, "its_running", 1.0, f'{{"state": "{state}"}}')
    assert metric(capacity_of(run)["slot_utilisation"]).mean == 0.5


def test_a_gauge_that_never_moves_is_no_utilisation(run: RunBuilder) -> None:
    run.metrics(running="stuck")
    run.scrape(100, "its_running", 0.0)
    assert "never moves" in reason(capacity_of(run)["slot_utilisation"])


def test_slots_that_are_not_told_are_not_guessed(run: RunBuilder) -> None:
    run.another_engine()
    assert "batch slots" in reason(capacity_of(run)["slot_utilisation"])


def test_the_measurement_floor(make_run: MakeRun) -> None:
    run = make_run()
    for t, value in ((0, 0.1), (100, 0.3)):
        run.lag(t, value)
    for t in (0, 50, 110):
        run.scrape(t, "x", 1)
        run.scrape(t, "y", 1)
    figures = capacity_of(run)
    assert metric(figures["client_lag_s"]).max == ms(0.3)
    interval = metric(figures["scrape_interval_s"])
    assert (interval.n, interval.mean) == (2, ms(55))
    assert reason(capacity_of(make_run())["scrape_interval_s"]) == ("the run did not scrape")


def test_the_lifecycle_counts_preemptions_exactly(run: RunBuilder) -> None:
    run.metrics(preemptions="exact")
    run.idle({"preemptions": 0}, {"preemptions": 1})
    run.events("p", arrived=1, admitted=2, preempted=3, resumed=4)
    preemptions = metric(counters_of(run)["preemptions"])
    assert (preemptions.mean, preemptions.method) == (1, "exact")
    assert preemptions.others["counter"].mean == 1


@pytest.mark.parametrize(
    ("trust", "running", "bound"),
    [
        ("exact_when_idle", 0, "point"),
        ("exact_when_idle", 1, "lower"),  # it is late while something runs
        ("lower", 0, "lower"),
        ("stuck", 0, None),
    ],
)
def test_waste_by_counter(run: RunBuilder, trust: str, running: float, bound: str | None) -> None:
    run.another_engine()
    run.metrics(generated_tokens=trust, running="exact")
    run.idle({"generated_tokens": 10, "running": 0}, {"generated_tokens": 120, "running": running})
    run.request("done", sent=0, tokens=[10] * 60, outcome="completed", end=100)
    run.abandon("left", t0=70, tokens=[20, 60])
    run.request("cut", sent=0, tokens=[10] * 8, outcome="cut_off", end=100)
    found = counters_of(run)["waste"]
    if bound is None:
        assert "never moves" in reason(found)
        return
    waste = metric(found)
    assert (waste.mean, waste.n, waste.bound, waste.method) == (20, 2, bound, "counter")
    assert waste.others == {"total_tokens": 40, "generated_tokens": 110, "cut_off": 1}


def test_tokens_are_not_events(run: RunBuilder) -> None:
    run.request("full", sent=0, tokens=[10] * 4, outcome="completed", end=99, completion_tokens=6)
    run.abandon("left", t0=70, tokens=[20, 60])
    for row in run.requests:
        row.token_counting = TokenCounting.EVENTS
    requests = run.frames().requests
    alone = requests[1:]
    assert tokens_read(alone).tolist() == [2.0]
    assert token_counting(alone) == "events"
    assert tokens_per_event(requests) == 1.5
    assert tokens_read(requests).tolist() == [6.0, 3.0]
    assert token_counting(requests) == "events_calibrated"


def test_bystanders_and_long_prompts_are_never_mixed(run: RunBuilder) -> None:
    run.request("b", sent=0, tokens=[10, 14, 20], outcome="cut_off", end=30, role=Role.BYSTANDER)
    long = {"role": Role.LONG_PROMPT}
    run.request("read", sent=0, tokens=[500, 900], outcome="completed", end=901, **long)
    run.abandon("left", t0=300, tokens=[], planned_abandon=0, **long)
    figures = latency_of(run)
    assert metric(figures["ttft_s"]).of == "long prompts that were read"
    assert (metric(figures["ttft_s"]).n, metric(figures["ttft_s"]).max) == (1, ms(500))
    assert metric(figures["itl_s"]).of == "bystanders"
    assert (metric(figures["itl_s"]).n, metric(figures["itl_s"]).max) == (2, ms(6))
    assert metric(figures["goodput_rps"]).mean == 0.0
    assert metric(figures["start_delay_s"]).n == 3
