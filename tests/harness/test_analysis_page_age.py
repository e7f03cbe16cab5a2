"""A page that is steps old: what that makes of a delay is put right, where steps were seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from harness.analysis.black_box import Methods, latency_methods, seen_from_outside
from harness.analysis.facts import run_facts
from harness.analysis.figure import NotMeasurable
from harness.analysis.littles_law import delay_of_aborts, held_for_nobody, mean_wait_s
from harness.analysis.open_requests import open_requests
from harness.analysis.scraped import met_step_s, typical_step_s
from tests.made_up.servers import lonely, stepping_server

if TYPE_CHECKING:
    from harness.store.frames import RunFrames
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def by_method(frames: RunFrames) -> Methods:
    return latency_methods([seen_from_outside(frames, run_facts(frames))])


@pytest.mark.parametrize("step", [8.0, 20.0, 55.0])
@pytest.mark.parametrize("stays", [0.1, 0.6])
def test_the_mean_age_of_a_page_is_put_right(make_run: MakeRun, step: float, stays: float) -> None:
    """Half a step is what a cancel takes, and as long do those who come wait."""
    run = make_run()
    known = stepping_server(run, step=step, stays=stays)
    frames = run.frames()
    facts = run_facts(frames)
    for balance in (held_for_nobody, delay_of_aborts):
        found = balance(frames, facts)
        assert not isinstance(found, NotMeasurable)
        assert found.mean == pytest.approx(known, abs=0.25 * step / 1e3)
        assert found.bias[0] + found.mean - found.grain <= known + step / 1e3


def test_nobody_waits_for_a_step_as_long_as_a_prefill_of_many_takes(make_run: MakeRun) -> None:
    run = make_run()
    run.request("reads", sent=0, tokens=[10, 20, 30], outcome="completed", end=31)
    run.request("sees", sent=13, tokens=[200], outcome="completed", end=201)
    run.request("sees no step", sent=50, tokens=[200], outcome="completed", end=201)
    requests = run.frames().requests
    waited_s = mean_wait_s(requests, open_requests(requests), step_s=0.010)
    assert waited_s == pytest.approx((0.007 + 0.010) / 3)


def test_the_page_of_an_empty_server_is_right_at_once(make_run: MakeRun) -> None:
    """Nobody is left to compute a step for, so nothing is to be put right."""
    found = []
    for late in (None, {"coming": 1.0, "ended": 0.0, "left": 1.0}):
        run = make_run()
        lonely(run)
        run.metrics(running="exact", waiting="exact", aborted="exact")
        assert run.manifest.target is not None
        if late is not None:
            run.manifest.target.spec["metrics"]["aborted"]["late_steps"] = late
        for t, aborts in ((90, 0), (110, 0), (130, 0), (150, 1), (170, 1)):
            run.scrape(t, "its_aborted", aborts)
        run.idle({"running": 0, "aborted": 0}, {"running": 0, "aborted": 1})
        frames = run.frames()
        balance = delay_of_aborts(frames, run_facts(frames))
        assert not isinstance(balance, NotMeasurable)
        found.append(balance.mean)
    assert found[0] == found[1] == pytest.approx(0.040)


def test_a_scrape_meets_long_steps_more_often_than_short_ones(make_run: MakeRun) -> None:
    run = make_run()
    run.request("a", sent=0, tokens=[10, 20, 30, 130], outcome="completed", end=130)
    frames = run.frames()
    assert typical_step_s(frames) == pytest.approx(0.010)
    assert met_step_s(frames) == pytest.approx((2 * 0.01**2 + 0.1**2) / 0.12)


def test_the_age_of_a_page_in_steps_is_not_known_where_no_step_was_seen(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.requests.clear()
    run.abandon("a", t0=100, tokens=[])
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["running"]["lag_steps"] = 2.0
    frames = run.frames()
    methods = by_method(frames)
    found = methods["gauge"]
    assert isinstance(found, NotMeasurable)
    assert "its_running can be 2 steps old, and how long a step takes was not seen" in found.reason
