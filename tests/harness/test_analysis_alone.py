"""Who stood alone when they left: how long they were held lies between two scrapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from harness.analysis.attributed import Alone, alone_by_gauge, alone_by_rest, described
from harness.analysis.facts import run_facts
from harness.analysis.figure import NotMeasurable
from harness.records import Metric
from tests.made_up.servers import lonely

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def alone(found: Alone | NotMeasurable) -> Metric:
    assert isinstance(found, Alone), found
    return described([found], "gauge")


@pytest.mark.parametrize("lag", [0.0, 0.015])
def test_one_that_stands_alone_is_known_between_two_limits(make_run: MakeRun, lag: float) -> None:
    run = make_run()
    lonely(run)
    assert run.manifest.target is not None
    for source in run.manifest.target.spec["metrics"].values():
        source["lag_s"] = lag
    frames = run.frames()
    for method in (alone_by_gauge, alone_by_rest):
        found = alone(method(frames, run_facts(frames)))
        assert (found.bound, found.n) == ("upper", 1)
        assert found.p50 == pytest.approx(0.050)
        assert found.others["at_least"].p50 == pytest.approx(0.030 - lag)


def test_a_counter_that_moves_when_a_request_ends_does_not_tell_by_its_rest(
    make_run: MakeRun,
) -> None:
    run = make_run()
    lonely(run)
    run.metrics(running="exact", waiting="exact", generated_tokens="exact_when_idle")
    frames = run.frames()
    assert isinstance(alone_by_rest(frames, run_facts(frames)), NotMeasurable)
    trust: dict[str, Any] = {"generated_tokens": "exact_when_idle", "decode_calls": "exact"}
    run.metrics(running="exact", waiting="exact", **trust)
    for t, calls in ((90, 3), (110, 4), (130, 5), (150, 5), (170, 5)):
        run.scrape(t, "its_decode_calls", calls)
    frames = run.frames()
    assert alone(alone_by_rest(frames, run_facts(frames))).p50 == pytest.approx(0.030)


def test_nobody_else_may_begin_or_end_before_the_scrape_that_shows_it(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.request("b", sent=120, tokens=[160], outcome="completed", end=400)
    frames = run.frames()
    found = alone(alone_by_gauge(frames, run_facts(frames)))
    # Of what came until 120 ms only one scrape is left, which still showed it.
    assert found.n_censored == 1
    assert found.lower_bounds["p50"] == pytest.approx(0.010)


def test_one_that_never_goes_is_censored(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    for sample in run.server_metrics:
        if sample.name == "its_running":
            sample.value = 1.0
    frames = run.frames()
    assert alone(alone_by_gauge(frames, run_facts(frames))).n_censored == 1
