"""Cancellations and waste of runs of a few steps of 10 ms, every number worked out by hand."""

import pytest

from harness.analysis.leaks import leak_figures, leaks_in_use
from harness.analysis.run_facts import run_facts
from tests.harness.analysis.scenes import four_steps, leave_in_decode, only_row
from tests.harness.told import ms
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder


def test_left_in_decode(run: RunBuilder) -> None:
    leave_in_decode(run)
    run.events("a", abort_sent=34.2)
    four_steps(run, "a", "b")
    row = only_row(run)
    assert row["request_id"] == "a"
    assert (row["phase"], row["finish_reason"], row["planned_abandon"]) == ("decode", "abort", 2)
    stages = row[["detect_s", "signal_s", "wait_s", "free_s"]].to_list()
    assert stages == [ms(1), ms(1.5), ms(4.6), ms(0.1)]
    assert row[["set_s", "removal_s"]].to_list() == [ms(0.2), ms(0.1)]
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


def test_a_step_counts_if_it_ends_after_t0_and_no_later_than_the_release(run: RunBuilder) -> None:
    run.abandon("a", t0=30, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, disconnected=31)
    run.events("a", abort_received=32, removed=40, blocks_freed=40, finished=40, generated=3)
    run.step(10, 20, sampled=("a",), a=5)
    run.steps(2, 3, "a")
    row = only_row(run)
    assert row["cancel_latency_steps"] == 1
    assert (row["wasted_in_flight_tokens"], row["wasted_after_close_tokens"]) == (1, 1)


def test_blocks_of_a_cached_prefix_are_held_too(run: RunBuilder) -> None:
    """8 of 13 prompt tokens were cached (2 blocks of 4): 5 are computed, and 4 blocks are held."""
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
    assert leaks_in_use(frames, facts, leak_figures(frames, facts)) == {"slots": 1, "blocks": 4}


def test_a_preempted_request_has_the_prefix_of_its_new_life(run: RunBuilder) -> None:
    run.abandon("a", t0=33, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, preempted=30.1, resumed=40.1)
    run.lifecycle[1].num_blocks = 2  # all of them for its 5 tokens
    run.lifecycle[4].num_blocks = 3  # for 6 tokens: 1 of them was computed, 2 blocks are shared
    run.step(10, 20, sampled=("a",), a=5)
    run.step(40.2, 50, sampled=("a",), a=1)
    run.manifest.window.settled_ns = at(60.2)
    assert only_row(run)["block_seconds"] == pytest.approx(3 * 0.020)
