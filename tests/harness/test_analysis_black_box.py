"""Cancellation seen from outside: made-up servers whose every delay is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from harness.analysis.facts import run_facts
from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.littles_law import Balance, as_figure, delay_of_aborts, held_for_nobody
from tests.harness.told import metric, summary_of
from tests.made_up.servers import busy_server

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


@pytest.mark.parametrize("delay", [0.0, 30.0, 200.0])
@pytest.mark.parametrize("every", [20.0, 110.0])
def test_the_delay_of_a_busy_server_is_recovered(
    make_run: MakeRun, delay: float, every: float
) -> None:
    run = make_run()
    busy_server(run, delay=delay, every=every)
    frames = run.frames()
    facts = run_facts(frames)
    for balance, method in ((held_for_nobody, "gauge"), (delay_of_aborts, "counter")):
        found = metric(as_figure(balance(frames, facts), method))
        estimate = found.others["estimate"]
        assert estimate == pytest.approx(delay / 1e3, abs=0.005 + 0.1 * delay / 1e3)
        if delay:
            assert found.mean_ci95 is not None
            assert found.mean_ci95[0] <= delay / 1e3 <= found.mean_ci95[1]
        else:
            assert (found.mean, found.bound) == (None, "upper")
            assert found.upper95 == pytest.approx(0.0, abs=0.005)


def test_the_interval_is_right_as_often_as_it_says(make_run: MakeRun) -> None:
    """The same run, its scrapes in 40 other phases: 95 % of the intervals should hold the truth."""
    run = make_run()
    busy_server(run, delay=60.0, every=1.0)
    frames = run.frames()
    hits = 0
    for phase in range(40):
        times = np.sort(frames.server_metrics["t_ns"].unique())[phase * 7 :: 300]
        thin = frames.server_metrics[frames.server_metrics["t_ns"].isin(times)]
        facts = run_facts(frames)
        some = type(frames)(**{**vars_of(frames), "server_metrics": thin})
        limits = metric(as_figure(held_for_nobody(some, facts), "gauge")).mean_ci95
        assert limits is not None
        hits += limits[0] <= 0.060 <= limits[1]
    assert hits >= 34


def vars_of(frames: Any) -> dict[str, Any]:
    return {name: getattr(frames, name) for name in type(frames).__dataclass_fields__}


def test_an_old_page_biases_the_gauge_no_more_than_it_says(make_run: MakeRun) -> None:
    run = make_run()
    busy_server(run, delay=50.0, every=40.0, lag=25.0)
    assert run.manifest.target is not None
    for source in run.manifest.target.spec["metrics"].values():
        source["lag_s"] = 0.025
    frames = run.frames()
    facts = run_facts(frames)
    for balance, method in ((held_for_nobody, "gauge"), (delay_of_aborts, "counter")):
        found = metric(as_figure(balance(frames, facts), method))
        assert found.mean_ci95 is not None
        low, high = found.others["bias_low"], found.others["bias_high"]
        assert found.mean_ci95[0] - high <= 0.050 <= found.mean_ci95[1] - low


def test_a_counter_that_does_not_add_up_tells_no_delay(make_run: MakeRun) -> None:
    run = make_run()
    busy_server(run, delay=50.0, every=40.0)
    run.manifest.idle.after["aborted"] += 1
    frames = run.frames()
    found = delay_of_aborts(frames, run_facts(frames))
    assert isinstance(found, NotMeasurable)
    assert "which of them it means is not known" in found.reason


def test_scrapes_that_met_nothing_do_not_show_that_there_was_nothing(make_run: MakeRun) -> None:
    run = make_run()
    busy_server(run, delay=1.0, every=20_000.0)
    frames = run.frames()
    facts = run_facts(frames)
    found = metric(as_figure(held_for_nobody(frames, facts), "gauge"))
    assert found.mean is None
    assert found.upper95 is not None
    assert found.upper95 > 0.01  # ten times what it was


def test_why_no_method_could_tell_is_said_of_each(make_run: MakeRun) -> None:
    run = make_run()
    run.another_engine()
    run.metrics(running="exact", generated_tokens="exact")
    run.abandon("a", t0=100, tokens=[50, 80])
    reason = summary_of(run.frames())["not_measurable"]["cancel_latency_s"]
    assert "gave no lifecycle log" in reason
    assert "running requests were not scraped during the load" in reason
    assert "shows no counter of aborted requests that moves" in reason
    assert reason.count("running requests were not scraped") == 1


def test_a_latency_below_zero_is_never_shown(make_run: MakeRun) -> None:
    """The page is 40 ms old, and nobody said so."""
    run = make_run()
    busy_server(run, delay=10.0, every=20.0, coming_late=60.0)
    frames = run.frames()
    facts = run_facts(frames)
    found = as_figure(held_for_nobody(frames, facts), "gauge")
    assert isinstance(found, NotMeasurable)
    assert found.reason.startswith("not enough data: by gauge")
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["running"]["lag_s"] = 0.060
    frames = run.frames()
    known = metric(as_figure(held_for_nobody(frames, run_facts(frames)), "gauge"))
    assert (known.mean, known.bound) == (None, "upper")
    assert known.upper95 is not None
    assert 0.010 < known.upper95 < 0.150
    said = [one["text"] for one in summary_of(frames)["validity"]]
    assert any("not enough data for a mean by gauge (more would not do" in text for text in said)


def test_totals_too_far_below_zero_give_no_limit_however_wide_their_interval(
    make_run: MakeRun,
) -> None:
    def figure(grain: float) -> Figure:
        """The mean is -2 s, and its interval reaches far beyond 0."""
        edges, sums, counts = np.arange(2), np.array([-30.0, 10.0]), np.array([5, 5])
        span_s = grain * 10 / 3.689  # no request was met: Garwood's limit of Poisson's mean
        balance = Balance(edges_ns=edges, sums=sums, counts=counts, bias=(-0.1, 0.1), span_s=span_s)
        return as_figure(balance, "gauge")

    assert isinstance(figure(grain=1.0), NotMeasurable)
    assert metric(figure(grain=2.0)).upper95 is not None


def test_how_many_would_be_enough_is_said(make_run: MakeRun) -> None:
    run = make_run()
    busy_server(run, delay=4.0, every=900.0)
    frames = run.frames()
    found = metric(as_figure(held_for_nobody(frames, run_facts(frames)), "gauge"))
    if found.others["estimate"] > 0:
        assert found.needs["mean"] > found.n
    assert found.mean is None
