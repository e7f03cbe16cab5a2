"""What a log does not tell is in no figure, and the rest is known all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.analysis.cancellation import cancellations
from harness.analysis.figure import NotMeasurable
from harness.store.manifest import Clock
from tests.harness.few_steps import figures_of, four_steps, leave_in_decode
from tests.harness.told import metric, ms

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def test_a_request_that_the_log_does_not_know_is_in_no_figure(make_run: MakeRun) -> None:
    run = make_run()
    leave_in_decode(run, "a")
    run.abandon("lost", t0=33, tokens=[21])
    run.abandon("lost too", t0=33, tokens=[21])
    four_steps(run, "a")
    cancels = cancellations(run.frames())
    lost = cancels[cancels["request_id"] != "a"]
    unknown = ["cancel_latency_s", "cancel_latency_steps", "ghost", "phase", "generated_tokens"]
    unknown += ["wasted_tokens", "slot_seconds", "block_seconds", "gpu_seconds", "detect_s"]
    assert lost[unknown].isna().all(axis=None)
    assert not lost["censored"].any()
    figures = figures_of(run)
    assert metric(figures["cancel_latency_s"]).n == 1
    assert metric(figures["wasted_tokens"]).n == 1


def test_a_server_without_lifecycle(make_run: MakeRun) -> None:
    run = make_run()
    run.another_engine()
    run.abandon("a", t0=33, tokens=[21, 31])
    cancels = cancellations(run.frames())
    assert cancels["cancel_latency_s"].isna().all()
    assert cancels["wasted_tokens"].isna().all()
    figures = figures_of(run)
    assert all(isinstance(figure, NotMeasurable) for figure in figures.values())
    latency = figures["cancel_latency_s"]
    assert isinstance(latency, NotMeasurable)
    assert "llamacpp gave no lifecycle log" in latency.reason


def test_on_two_clocks_only_differences_of_one_are_taken(make_run: MakeRun) -> None:
    run = make_run()
    run.manifest.clock = Clock(comparable=False)
    leave_in_decode(run)
    four_steps(run, "a")
    figures = figures_of(run)
    for name in (
        "detect_s",
        "cancel_latency_s",
        "cancel_latency_steps",
        "wasted_after_close_tokens",
        "slot_seconds_after_abandon",
    ):
        figure = figures[name]
        assert isinstance(figure, NotMeasurable)
        assert "clock" in figure.reason
    assert metric(figures["wait_s"]).p50 == ms(4.6)
    assert metric(figures["wasted_tokens"]).mean == 1
    assert metric(figures["ghost_rate"]).mean == 0


def test_without_a_step_log_times_are_known_and_steps_are_not(make_run: MakeRun) -> None:
    run = make_run()
    leave_in_decode(run)
    figures = figures_of(run)
    assert metric(figures["cancel_latency_s"]).p50 == ms(7.2)
    assert metric(figures["wasted_tokens"]).mean == 1
    assert metric(figures["slot_seconds_after_abandon"]).p50 == ms(7.1)
    for name in ("cancel_latency_steps", "removed_at_first_boundary", "gpu_seconds_after_abandon"):
        figure = figures[name]
        assert isinstance(figure, NotMeasurable)
        assert "step log" in figure.reason


def test_nobody_left(make_run: MakeRun) -> None:
    run = make_run()
    run.request("s", sent=0, tokens=[21], outcome="completed", end=22)
    four_steps(run, "s")
    assert cancellations(run.frames()).empty
    assert set(figures_of(run).values()) == {NotMeasurable("no request was abandoned")}


def test_an_empty_run(make_run: MakeRun) -> None:
    run = make_run()
    cancels = cancellations(run.frames())
    assert cancels.empty
    assert {"cancel_latency_s", "wasted_tokens", "ghost"} <= set(cancels.columns)
