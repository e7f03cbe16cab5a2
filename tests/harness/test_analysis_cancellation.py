"""Cancellations and waste of runs of a few steps of 10 ms, every number worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from harness.analysis.cancel_figures import (
    cancel_figures,
    latency_by_phase,
    waste_by_abandon_point,
    waste_figures,
)
from harness.analysis.cancellation import cancellations
from harness.analysis.counters import leak_figures
from harness.analysis.facts import run_facts
from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.held import leaks_in_use
from harness.manifest import Clock
from harness.records import Metric, Role
from tests.harness.conftest import at

if TYPE_CHECKING:
    from tests.harness.conftest import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def only_row(run: RunBuilder) -> pd.Series[Any]:
    cancels = cancellations(run.frames())
    assert len(cancels) == 1
    return cancels.iloc[0]


def figures_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    facts, cancels = run_facts(frames), cancellations(frames)
    return cancel_figures(cancels, facts) | waste_figures(cancels, facts)


def metric(figures: Figures, name: str) -> Metric:
    figure = figures[name]
    assert isinstance(figure, Metric), figure
    return figure


def ms(value: float) -> Any:
    return pytest.approx(value / 1e3, abs=1e-9)


def leave_in_decode(run: RunBuilder, name: str = "a", **more: Any) -> None:
    """Read 2 tokens, left at 33 in the step that samples the third, removed at its end."""
    run.abandon(name, t0=33, tokens=[21, 31], planned_abandon=2, **more)
    run.events(name, arrived=1, admitted=10.1, first_token=20)
    run.events(name, disconnected=34, abort_received=35.5, generated=2)
    run.events(name, removed=40.1, blocks_freed=40.2, finished=40.3, generated=3)


def four_steps(run: RunBuilder, *names: str) -> None:
    """A prefill of 5 tokens, two more tokens, and a step of somebody else."""
    run.step(10, 20, sampled=names, **dict.fromkeys(names, 5))
    run.steps(2, 3, *names)
    run.steps(4, 5, "other")


def test_left_in_decode(make_run: MakeRun) -> None:
    run = make_run()
    leave_in_decode(run)
    four_steps(run, "a", "b")
    row = only_row(run)
    assert row["request_id"] == "a"
    assert (row["phase"], row["finish_reason"], row["planned_abandon"]) == ("decode", "abort", 2)
    stages = row[["detect_s", "signal_s", "wait_s", "free_s"]].to_list()
    assert stages == [ms(1), ms(1.5), ms(4.6), ms(0.1)]
    assert row["cancel_latency_s"] == ms(7.2)
    assert row["cancel_latency_steps"] == 1
    assert (row["ghost"], row["censored"]) == (False, False)
    assert row["removed_at_first_boundary"]
    assert (row["generated_tokens"], row["tokens_read"]) == (3, 2)
    waste = row[["wasted_tokens", "wasted_in_flight_tokens", "wasted_after_close_tokens"]].to_list()
    assert waste == [1, 0, 1]
    assert row["slot_seconds"] == ms(7.1)
    assert row["block_seconds"] == ms(2 * 7.2)  # 7 tokens lie in 2 blocks of 4
    assert row["gpu_seconds"] == ms(0.5 * 7)  # half of a step of which 7 ms were left


def test_a_token_sampled_before_leaving_and_not_yet_read_was_in_flight(make_run: MakeRun) -> None:
    run = make_run()
    leave_in_decode(run)
    run.requests[0].tokens_read = 1
    four_steps(run, "a")
    row = only_row(run)
    assert (row["wasted_in_flight_tokens"], row["wasted_after_close_tokens"]) == (1, 1)


def test_left_while_queued(make_run: MakeRun) -> None:
    run = make_run()
    run.abandon("q", t0=22, tokens=[])
    run.events("q", arrived=1, disconnected=22.5, abort_received=23)
    run.events("q", removed=30.1, blocks_freed=30.2, finished=30.3)
    four_steps(run, "other")
    row = only_row(run)
    assert row["phase"] == "waiting"
    assert (row["cancel_latency_s"], row["cancel_latency_steps"]) == (ms(8.2), 1)
    zeros = ["wasted_tokens", "slot_seconds", "block_seconds", "gpu_seconds"]
    assert row[zeros].to_list() == [0, 0, 0, 0]


def test_left_before_the_first_token(make_run: MakeRun) -> None:
    run = make_run()
    run.abandon("a", t0=15, tokens=[])
    run.events("a", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events("a", disconnected=16, abort_received=17, removed=20.1, generated=1)
    run.events("a", blocks_freed=20.2, finished=20.3, generated=1)
    run.step(10, 20, sampled=("a",), a=5, other=5)
    run.steps(2, 3, "other")
    row = only_row(run)
    assert row["phase"] == "prefill"
    assert (row["wasted_tokens"], row["wasted_after_close_tokens"]) == (1, 1)
    assert row["gpu_seconds"] == ms(0.5 * 5)


def test_preempted_and_resumed_after_leaving(make_run: MakeRun) -> None:
    run = make_run()
    run.abandon("p", t0=25, tokens=[21])
    run.events("p", arrived=1, admitted=10.1, first_token=20)
    run.events("p", preempted=30.1, resumed=50.1, disconnected=51, abort_received=52)
    run.events("p", removed=60.1, blocks_freed=60.2, finished=60.3, generated=3)
    run.step(10, 20, sampled=("p",), p=5)
    run.step(20, 30, sampled=("p",), p=1)
    run.steps(3, 4, "other")
    run.step(50, 60, sampled=("p",), p=7)
    run.steps(6, 6, "other")
    row = only_row(run)
    assert row["phase"] == "decode"
    assert (row["wasted_tokens"], row["wasted_after_close_tokens"]) == (2, 2)
    assert row["slot_seconds"] == ms(5.1 + 10)  # not while it was back in the queue
    assert row["block_seconds"] == ms(2 * 5.1 + 2 * 10.2)  # 6 tokens; none; 7 recomputed
    assert row["gpu_seconds"] == ms(5 + 10)
    assert row["cancel_latency_steps"] == 4


def test_left_while_preempted_is_waiting(make_run: MakeRun) -> None:
    run = make_run()
    run.abandon("p", t0=35, tokens=[21])
    run.events("p", arrived=1, admitted=10.1, first_token=20, preempted=30.1)
    run.events("p", disconnected=36, abort_received=37, removed=40.1)
    run.events("p", blocks_freed=40.2, finished=40.3, generated=2)
    run.step(10, 20, sampled=("p",), p=5)
    run.step(20, 30, sampled=("p",), p=1)
    run.steps(3, 4, "other")
    row = only_row(run)
    assert row["phase"] == "waiting"
    assert row[["slot_seconds", "block_seconds", "gpu_seconds"]].to_list() == [0, 0, 0]
    assert (row["wasted_in_flight_tokens"], row["wasted_after_close_tokens"]) == (1, 0)


def test_an_ignored_disconnect_is_a_censored_latency(make_run: MakeRun) -> None:
    run = make_run()
    run.manifest.settle_s = 0.05
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events(
        "g", reason="length", removed=130.1, blocks_freed=130.2, finished=130.3, generated=12
    )
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 12, "g")
    row = only_row(run)
    assert (row["ghost"], row["censored"]) == (True, True)
    assert row["cancel_latency_s"] == ms(50)
    assert row["cancel_latency_steps"] == 5  # those that ended at 40 to 80
    assert (row["wasted_tokens"], row["wasted_after_close_tokens"]) == (10, 10)
    assert row["slot_seconds"] == ms(130.1 - 33)
    figures = figures_of(run)
    latency = metric(figures, "cancel_latency_s")
    assert (latency.n, latency.n_censored, latency.p50) == (1, 1, None)
    assert latency.lower_bounds["p50"] == ms(50)
    detect = metric(figures, "detect_s")
    assert (detect.n, detect.n_censored, detect.p50) == (1, 1, None)
    assert figures["signal_s"] == NotMeasurable("no request got as far as this stage")
    assert metric(figures, "ghost_rate").mean == 1.0


def test_a_lost_abort_waits_for_ever(make_run: MakeRun) -> None:
    run = make_run()
    run.manifest.settle_s = 0.05
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", arrived=1, admitted=10.1, first_token=20, disconnected=34, abort_received=36)
    run.events("g", reason="length", removed=60.1, blocks_freed=60.2, finished=60.3, generated=5)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 5, "g")
    row = only_row(run)
    assert row["ghost"]  # although it was gone within the settle time: nobody stopped it
    (in_decode,) = latency_by_phase(cancellations(run.frames()))
    assert (in_decode["phase"], in_decode["ghosts"]) == ("decode", 1)
    assert row["cancel_latency_s"] == ms(50)
    assert not row["removed_at_first_boundary"]
    figures = figures_of(run)
    assert metric(figures, "signal_s").p50 == ms(2)
    wait = metric(figures, "wait_s")
    assert (wait.n_censored, wait.lower_bounds["p50"]) == (1, ms(50 - 3))
    assert isinstance(figures["free_s"], NotMeasurable)


def test_an_abort_after_the_settle_time_is_a_ghost_with_known_stages(make_run: MakeRun) -> None:
    run = make_run()
    run.manifest.settle_s = 0.005
    leave_in_decode(run)
    four_steps(run, "a")
    row = only_row(run)
    assert (row["ghost"], row["cancel_latency_s"]) == (True, ms(5))
    assert metric(figures_of(run), "wait_s").p50 == ms(4.6)


def test_one_that_never_finished_counts_until_the_observation_ended(make_run: MakeRun) -> None:
    run = make_run()
    run.manifest.settle_s = 0.05
    run.manifest.window.settled_ns = run.manifest.window.load_started_ns + 100_000_000  # type: ignore[operator]
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 9, "g")
    row = only_row(run)
    assert row["ghost"]
    assert (row["generated_tokens"], row["wasted_tokens"]) == (9, 7)
    assert row["slot_seconds"] == ms(100 - 33)
    figures = figures_of(run)
    assert (metric(figures, "wasted_tokens").bound, metric(figures, "wasted_tokens").mean) == (
        "lower",
        7,
    )
    assert metric(figures, "wasted_in_flight_tokens").bound == "point"


def test_one_not_watched_for_the_settle_time_is_no_ghost_yet(make_run: MakeRun) -> None:
    run = make_run()
    run.manifest.status = "target_failed"  # so what was heard last ends the observation: 50 ms
    run.abandon("g", t0=33, tokens=[21])
    run.events("g", arrived=1, admitted=10.1, first_token=20, disconnected=34, generated=1)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 4, "g")
    row = only_row(run)
    assert row["ghost"] is pd.NA
    assert (row["censored"], row["cancel_latency_s"]) == (True, ms(50 - 33))
    assert isinstance(figures_of(run)["ghost_rate"], NotMeasurable)


def test_one_that_came_to_its_natural_end_is_a_ghost_however_short_the_watch(
    make_run: MakeRun,
) -> None:
    run = make_run()
    run.abandon("a", t0=3900, tokens=[20])
    run.events("a", arrived=0, admitted=0, first_token=10, disconnected=3901)
    run.events("a", reason="length", removed=3950, blocks_freed=3950, finished=3950)
    assert only_row(run)["ghost"]


def test_one_that_had_ended_before_its_user_left(make_run: MakeRun) -> None:
    run = make_run()
    run.abandon("a", t0=33, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events("a", reason="stop", removed=30.1, blocks_freed=30.2, finished=30.3, generated=2)
    run.step(10, 20, sampled=("a",), a=5)
    run.steps(2, 3, "a")
    row = only_row(run)
    assert (row["phase"], row["ghost"], row["censored"]) == ("ended", pd.NA, False)
    assert pd.isna(row["cancel_latency_s"])
    assert row["wasted_tokens"] == 1


def test_an_abort_on_its_way_when_the_last_step_began_is_no_ghost(make_run: MakeRun) -> None:
    """Seen leaving at 39.5, and aborts take up to 1.5 ms to the worker here: the step from 40 to 50
    began without it. One that ran on for another step was lost."""
    run = make_run()
    leave_in_decode(run, "heard")
    run.events("heard", abort_sent=34)
    for name, end in (("raced", 50.1), ("lost", 60.1)):
        run.abandon(name, t0=39, tokens=[21, 31])
        run.events(name, arrived=1, admitted=10.1, first_token=20, generated=1)
        run.events(name, disconnected=39.5, abort_sent=39.5, generated=3)
        run.events(name, "length", removed=end, blocks_freed=end, finished=end, generated=4)
    four_steps(run, "heard", "raced", "lost")
    run.steps(6, 7, "other")
    cancels = cancellations(run.frames()).set_index("request_id")
    assert cancels["phase"].to_dict() == {"heard": "decode", "raced": "ended", "lost": "decode"}
    assert not cancels.loc["heard", "ghost"]
    assert cancels.loc["raced", "ghost"] is pd.NA
    assert cancels.loc["lost", "ghost"]


def test_a_connection_that_ends_after_the_answer_is_neither_a_cancel_nor_a_ghost(
    make_run: MakeRun,
) -> None:
    run = make_run()
    run.abandon("a", t0=33, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events("a", reason="length", removed=30.1, blocks_freed=30.2, finished=30.3, generated=2)
    run.events("a", disconnected=34, generated=2)
    four_steps(run, "a")
    row = only_row(run)
    assert (row["phase"], row["ghost"], row["censored"]) == ("ended", pd.NA, False)
    figures = figures_of(run)
    for name in ("cancel_latency_s", "detect_s", "signal_s", "wait_s", "free_s", "ghost_rate"):
        assert isinstance(figures[name], NotMeasurable), name


def test_a_ghost_whose_end_came_before_its_user_was_missed_was_never_noticed(
    make_run: MakeRun,
) -> None:
    """Its connection stalled: noticed long after the answer was over, with nothing to cancel."""
    run = make_run()
    run.manifest.settle_s = 0.05
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events("g", reason="length", removed=60.1, blocks_freed=60.2, finished=60.3, generated=5)
    run.events("g", disconnected=90, generated=5)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 9, "g")
    assert only_row(run)["ghost"]
    figures = figures_of(run)
    detect = metric(figures, "detect_s")
    assert (detect.n, detect.n_censored) == (1, 1)
    assert isinstance(figures["signal_s"], NotMeasurable)


def test_a_share_that_ought_to_be_all_is_bounded_from_below(make_run: MakeRun) -> None:
    run = make_run()
    names = [f"a{i}" for i in range(10)]
    for name in names:
        leave_in_decode(run, name)
    four_steps(run, *names)
    at_once = metric(figures_of(run), "removed_at_first_boundary")
    assert (at_once.mean, at_once.upper95) == (1.0, None)
    assert at_once.lower95 == pytest.approx(0.05 ** (1 / 10))  # all ten of ten, had it been this
    ghosts = metric(figures_of(run), "ghost_rate")
    assert (ghosts.mean, ghosts.lower95) == (0.0, None)
    assert ghosts.upper95 == pytest.approx(1 - 0.05 ** (1 / 10))


def test_a_step_between_hearing_and_removal_is_seen(make_run: MakeRun) -> None:
    run = make_run()
    run.abandon("a", t0=33, tokens=[21, 31])
    run.events("a", arrived=1, admitted=10.1, disconnected=34, abort_received=35)
    run.events("a", removed=50.1, blocks_freed=50.2, finished=50.3, generated=4)
    run.step(10, 20, sampled=("a",), a=5)
    run.steps(2, 5, "a")
    assert not only_row(run)["removed_at_first_boundary"]


def test_a_step_that_ends_at_t0_was_before_and_one_that_ends_at_the_release_counts(
    make_run: MakeRun,
) -> None:
    run = make_run()
    run.abandon("a", t0=30, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, disconnected=31)
    run.events("a", abort_received=32, removed=40, blocks_freed=40, finished=40, generated=3)
    run.step(10, 20, sampled=("a",), a=5)
    run.steps(2, 3, "a")
    row = only_row(run)
    assert row["cancel_latency_steps"] == 1
    assert (row["wasted_in_flight_tokens"], row["wasted_after_close_tokens"]) == (1, 1)


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
    assert metric(figures, "cancel_latency_s").n == 1
    assert metric(figures, "wasted_tokens").n == 1


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
    assert metric(figures, "wait_s").p50 == ms(4.6)
    assert metric(figures, "wasted_tokens").mean == 1
    assert metric(figures, "ghost_rate").mean == 0


def test_without_a_step_log_times_are_known_and_steps_are_not(make_run: MakeRun) -> None:
    run = make_run()
    leave_in_decode(run)
    figures = figures_of(run)
    assert metric(figures, "cancel_latency_s").p50 == ms(7.2)
    assert metric(figures, "wasted_tokens").mean == 1
    assert metric(figures, "slot_seconds_after_abandon").p50 == ms(7.1)
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


def test_breakdowns(make_run: MakeRun) -> None:
    run = make_run()
    leave_in_decode(run, "a")
    leave_in_decode(run, "b")
    run.requests[1].tokens_read = 1
    run.abandon("q", t0=22, tokens=[], planned_abandon=0)
    run.events("q", arrived=1, disconnected=22.5, abort_received=23)
    run.events("q", removed=30.1, blocks_freed=30.2, finished=30.3)
    four_steps(run, "a", "b")
    cancels = cancellations(run.frames())
    assert waste_by_abandon_point(cancels) == [
        {"planned_abandon": 0, "n": 1, "in_flight_mean": 0.0, "after_close_mean": 0.0},
        {"planned_abandon": 2, "n": 2, "in_flight_mean": 0.5, "after_close_mean": 1.0},
    ]
    phases = {one["phase"]: one["cancel_latency_s"] for one in latency_by_phase(cancels)}
    assert {phase: (one.n, one.p50) for phase, one in phases.items()} == {
        "decode": (2, ms(7.2)),
        "waiting": (1, ms(8.2)),
    }


def test_long_prompts_left_in_their_prefill_have_a_latency_of_their_own(make_run: MakeRun) -> None:
    run = make_run()
    four_steps(run, "a", "b")
    leave_in_decode(run, "a", role=Role.LONG_PROMPT)
    run.abandon("b", t0=15, tokens=[], planned_abandon=0, role=Role.LONG_PROMPT)
    run.events("b", arrived=1, admitted=10.1, disconnected=16, abort_received=17)
    run.events("b", removed=20.1, blocks_freed=20.2, finished=20.3)
    figures = figures_of(run)
    assert metric(figures, "cancel_latency_s").n == 2
    latency = metric(figures, "cancel_latency_prefill_s")
    assert (latency.n, latency.p50) == (1, ms(5.2))
    assert latency.of == "long prompts left during their prefill"
    assert metric(figures, "cancel_latency_prefill_steps").p50 == 1


def test_other_users_have_no_such_figure(make_run: MakeRun) -> None:
    run = make_run()
    four_steps(run, "a")
    leave_in_decode(run)
    assert "cancel_latency_prefill_s" not in figures_of(run)


def test_blocks_of_a_cached_prefix_are_held_too(make_run: MakeRun) -> None:
    """Of 13 prompt tokens 8 were cached (2 blocks of 4): 5 are computed, and 4 blocks are held."""
    run = make_run()
    run.metrics(free_blocks="exact", running="exact")
    run.idle({"free_blocks": 100, "running": 0}, {"free_blocks": 96, "running": 1})
    run.abandon("a", t0=33, tokens=[21, 31])
    run.events("a", arrived=1, admitted=10.1, first_token=20)
    run.lifecycle[1].num_blocks = 4
    run.step(10, 20, sampled=("a",), a=5)
    run.steps(2, 3, "a")
    run.manifest.window.settled_ns = at(43)
    row = only_row(run)
    # 5 + 2 tokens of its own need 2 blocks; for 10 ms it held 4.
    assert row["block_seconds"] == pytest.approx(4 * 0.010)
    frames = run.frames()
    facts = run_facts(frames)
    assert leaks_in_use(frames, facts, leak_figures(facts)) == {"slots": 1, "blocks": 4}


def test_a_preempted_request_has_the_prefix_of_its_new_life(make_run: MakeRun) -> None:
    run = make_run()
    run.abandon("a", t0=33, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, preempted=30.1, resumed=40.1)
    run.lifecycle[1].num_blocks = 2  # all of them for its 5 tokens
    run.lifecycle[4].num_blocks = 3  # for 6 tokens: 1 of them was computed, 2 blocks are shared
    run.step(10, 20, sampled=("a",), a=5)
    run.step(40.2, 50, sampled=("a",), a=1)
    run.manifest.window.settled_ns = at(60.2)
    assert only_row(run)["block_seconds"] == pytest.approx(3 * 0.020)
