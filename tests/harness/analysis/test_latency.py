"""Latencies of users, load of the engine, counters: censoring and edges."""

from typing import Any

import pytest

from harness.analysis.capacity import capacity_figures, series_figures, series_of
from harness.analysis.counters import wasted_by_counter
from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.latency import (
    canary_figures,
    canary_remarks,
    known_answers,
    latency_figures,
)
from harness.analysis.run_facts import run_facts
from harness.analysis.tokens import tokens_read
from harness.records import Role, TokenCounting
from tests.harness.told import metric, ms, reason
from tests.made_up.run import RunBuilder


def latency_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    return latency_figures(frames.requests, run_facts(frames))


def capacity_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    facts = run_facts(frames)
    return capacity_figures(frames, facts) | series_figures(series_of(frames, facts), facts)


def test_a_wait_that_brought_no_token_is_censored(run: RunBuilder) -> None:
    run.request("a", sent=10, tokens=[30], outcome="completed", end=31)
    run.request("cut", sent=10, tokens=[], outcome="cut_off", end=90)
    run.request("slow", sent=10, tokens=[], outcome="timed_out", end=110)
    run.request("busy", sent=10, tokens=[], outcome="rejected", end=11)
    run.abandon("left", t0=70, tokens=[])
    ttft = metric(latency_of(run)["ttft_s"])
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


def test_one_who_was_to_leave_is_no_survivor_even_if_the_run_ended_first(run: RunBuilder) -> None:
    run.request("stays", sent=10, tokens=[30, 40], outcome="completed", end=41)
    run.request("cut", sent=0, tokens=[], outcome="cut_off", end=500, planned_abandon=4)
    run.request("over", sent=0, tokens=[1, 2], outcome="completed", end=3, planned_abandon=4)
    run.request("late", sent=0, tokens=[1], outcome="completed", end=1011, planned_abandon=4)
    figures = latency_of(run)
    assert (metric(figures["ttft_s"]).n, metric(figures["ttft_s"]).p99) == (1, ms(20))
    assert metric(figures["itl_s"]).p50 == metric(figures["tpot_s"]).p50 == ms(10)
    assert metric(figures["e2e_s"]).n == 1
    # Two were served within the load, which ended at 1,000.
    assert metric(figures["goodput_rps"]).mean == pytest.approx(2.0)
    assert metric(metric(figures["ttft_s"]).others["all_users"]).n == 4


def test_the_time_a_token_is_of_tokens_that_were_shown(run: RunBuilder) -> None:
    """Not of hidden reasoning, nor of an answer that came whole."""
    whole: dict[str, Any] = {"token_counting": TokenCounting.EVENTS, "completion_tokens": 8}
    run.request("whole", sent=0, tokens=[10], outcome="completed", end=41, **whole)
    assert reason(latency_of(run)["tpot_s"]) == "no survivor had tokens at two moments"
    hides: dict[str, Any] = {"token_counting": TokenCounting.CALIBRATED, "completion_tokens": 500}
    hides |= {"tokens_per_event": 1.0, "tokens_error": 0.0}
    run.request("thinks", sent=0, tokens=[10, 20, 30], outcome="completed", end=41, **hides)
    tpot = metric(latency_of(run)["tpot_s"])
    assert (tpot.n, tpot.mean) == (1, ms(10))


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
    run.target.spec["metrics"]["running"]["labels"] = {"state": "running"}
    for state in ("running", "swapped"):
        run.scrape(100, "its_running", 1.0, f'{{"state": "{state}"}}')
    assert metric(capacity_of(run)["slot_utilisation"]).mean == 0.5


def test_a_utilisation_that_is_not_told_is_not_guessed(run: RunBuilder) -> None:
    run.metrics(running="stuck")
    run.scrape(100, "its_running", 0.0)
    assert "never moves" in reason(capacity_of(run)["slot_utilisation"])
    run.another_engine()
    assert "batch slots" in reason(capacity_of(run)["slot_utilisation"])


@pytest.mark.parametrize(
    ("trust", "running", "bound"),
    [
        ("exact_when_idle", 0, "point"),
        ("exact_when_idle", 1, "lower"),  # it is late while something runs
        ("lower", 0, "lower"),
        ("exact", 0, "point"),
        ("exact", 1, "lower"),  # a ghost: it will be computed for
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
    frames = run.frames()
    found = wasted_by_counter(frames.requests, run_facts(frames))
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
    assert tokens_read(requests[1:]).tolist() == [2.0]  # with no usage to calibrate by
    assert tokens_read(requests).tolist() == [6.0, 3.0]


def test_urgent_requests_have_figures_of_their_own_where_priorities_differ(run: RunBuilder) -> None:
    run.request("a", sent=0, tokens=[30, 40], outcome="completed", end=41)
    run.request("b", sent=0, tokens=[50, 60], outcome="completed", end=61, priority=0)
    assert "ttft_urgent_s" not in latency_of(run)
    run.request("c", sent=0, tokens=[10, 20], outcome="completed", end=21, priority=-1)
    run.abandon("left", t0=70, tokens=[5, 6], priority=-1)
    found = latency_of(run)
    urgent, whole = metric(found["ttft_urgent_s"]), metric(found["e2e_urgent_s"])
    assert (urgent.n, urgent.mean, whole.n, whole.mean) == (1, ms(10), 1, ms(20))


# Canaries.


def sing(run: RunBuilder, name: str, answer: str, *, sent: float, user: int = 0) -> None:
    tokens = [sent + 10, sent + 15]
    more = {"role": Role.CANARY, "user": user, "answer": answer}
    run.request(name, sent=sent, tokens=tokens, outcome="completed", end=sent + 20, **more)


def test_an_answer_that_differs_from_the_known_one_is_counted(run: RunBuilder) -> None:
    sing(run, "late", "wrong", sent=300)  # the order of rows is not the order of asking
    sing(run, "alone", "right", sent=0)
    sing(run, "then", "right", sent=100)
    sing(run, "other", "its own", sent=50, user=1)
    sing(run, "other-then", "its own", sent=200, user=1)
    found = canary_figures(run.frames().requests)
    mismatch = metric(found["canary_mismatch_rate"])
    assert mismatch.n == 3
    assert mismatch.mean == pytest.approx(1 / 3)


def test_an_answer_that_was_cut_off_is_none(run: RunBuilder) -> None:
    sing(run, "alone", "right", sent=0)
    run.request("b", sent=50, tokens=[60], outcome="cut_off", end=70, role=Role.CANARY, answer="ri")
    found = canary_figures(run.frames().requests)
    assert found["canary_mismatch_rate"] == NotMeasurable("no canary had a second answer")


def test_the_known_answers_of_all_arms_must_be_alike(run: RunBuilder) -> None:
    sing(run, "alone", "right", sent=0)
    sing(run, "then", "wrong", sent=50)
    known = known_answers(run.frames().requests)
    assert known == {0: "right"}
    (alike,) = canary_remarks({"0": known, "50": known})
    assert alike.level == "info"
    (torn,) = canary_remarks({"0": known, "50": {0: "left"}})
    assert torn.level == "invalid"
    assert torn.text.endswith(": 0")
    assert canary_remarks({"0": {}, "50": {}}) == []
