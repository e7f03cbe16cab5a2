"""Cancellations and waste of runs of a few steps of 10 ms, every number worked out by hand."""

import pytest

from harness.analysis.cancel import latency_by, waste_by_abandon_point
from harness.analysis.cancellation import cancellations
from harness.analysis.facts import run_facts
from harness.analysis.leaks import leak_figures, leaks_in_use
from harness.records import Role
from tests.harness.analysis.few_steps import figures_of, four_steps, leave_in_decode, only_row
from tests.harness.told import metric, ms
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder


def test_left_in_decode(run: RunBuilder) -> None:
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


def test_a_token_sampled_before_leaving_and_not_yet_read_was_in_flight(run: RunBuilder) -> None:
    leave_in_decode(run)
    run.requests[0].tokens_read = 1
    four_steps(run, "a")
    row = only_row(run)
    assert (row["wasted_in_flight_tokens"], row["wasted_after_close_tokens"]) == (1, 1)


def test_left_while_queued(run: RunBuilder) -> None:
    run.abandon("q", t0=22, tokens=[])
    run.events("q", arrived=1, disconnected=22.5, abort_received=23)
    run.events("q", removed=30.1, blocks_freed=30.2, finished=30.3)
    four_steps(run, "other")
    row = only_row(run)
    assert row["phase"] == "waiting"
    assert (row["cancel_latency_s"], row["cancel_latency_steps"]) == (ms(8.2), 1)
    zeros = ["wasted_tokens", "slot_seconds", "block_seconds", "gpu_seconds"]
    assert row[zeros].to_list() == [0, 0, 0, 0]


def test_left_before_the_first_token(run: RunBuilder) -> None:
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


def test_preempted_and_resumed_after_leaving(run: RunBuilder) -> None:
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


def test_left_while_preempted_is_waiting(run: RunBuilder) -> None:
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


def test_a_step_between_hearing_and_removal_is_seen(run: RunBuilder) -> None:
    run.abandon("a", t0=33, tokens=[21, 31])
    run.events("a", arrived=1, admitted=10.1, disconnected=34, abort_received=35)
    run.events("a", removed=50.1, blocks_freed=50.2, finished=50.3, generated=4)
    run.step(10, 20, sampled=("a",), a=5)
    run.steps(2, 5, "a")
    assert not only_row(run)["removed_at_first_boundary"]


def test_a_step_counts_if_it_ends_after_t0_and_no_later_than_the_release(
    run: RunBuilder,
) -> None:
    run.abandon("a", t0=30, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, disconnected=31)
    run.events("a", abort_received=32, removed=40, blocks_freed=40, finished=40, generated=3)
    run.step(10, 20, sampled=("a",), a=5)
    run.steps(2, 3, "a")
    row = only_row(run)
    assert row["cancel_latency_steps"] == 1
    assert (row["wasted_in_flight_tokens"], row["wasted_after_close_tokens"]) == (1, 1)


def test_breakdowns(run: RunBuilder) -> None:
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
    phases = {one["phase"]: one["cancel_latency_s"] for one in latency_by("phase", cancels)}
    assert {phase: (one.n, one.p50) for phase, one in phases.items()} == {
        "decode": (2, ms(7.2)),
        "waiting": (1, ms(8.2)),
    }


def test_long_prompts_left_in_their_prefill_have_a_latency_of_their_own(run: RunBuilder) -> None:
    four_steps(run, "a", "b")
    leave_in_decode(run, "a", role=Role.LONG_PROMPT)
    run.abandon("b", t0=15, tokens=[], planned_abandon=0, role=Role.LONG_PROMPT)
    run.events("b", arrived=1, admitted=10.1, disconnected=16, abort_received=17)
    run.events("b", removed=20.1, blocks_freed=20.2, finished=20.3)
    figures = figures_of(run)
    assert metric(figures["cancel_latency_s"]).n == 2
    latency = metric(figures["cancel_latency_prefill_s"])
    assert (latency.n, latency.p50) == (1, ms(5.2))
    assert latency.of == "long prompts left during their prefill"
    assert metric(figures["cancel_latency_prefill_steps"]).p50 == 1


def test_other_users_have_no_such_figure(run: RunBuilder) -> None:
    four_steps(run, "a")
    leave_in_decode(run)
    assert "cancel_latency_prefill_s" not in figures_of(run)


def test_blocks_of_a_cached_prefix_are_held_too(run: RunBuilder) -> None:
    """Of 13 prompt tokens 8 were cached (2 blocks of 4): 5 are computed, and 4 blocks are held."""
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


def test_a_preempted_request_has_the_prefix_of_its_new_life(run: RunBuilder) -> None:
    run.abandon("a", t0=33, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, preempted=30.1, resumed=40.1)
    run.lifecycle[1].num_blocks = 2  # all of them for its 5 tokens
    run.lifecycle[4].num_blocks = 3  # for 6 tokens: 1 of them was computed, 2 blocks are shared
    run.step(10, 20, sampled=("a",), a=5)
    run.step(40.2, 50, sampled=("a",), a=1)
    run.manifest.window.settled_ns = at(60.2)
    assert only_row(run)["block_seconds"] == pytest.approx(3 * 0.020)
