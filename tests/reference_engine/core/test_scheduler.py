"""Scheduling decisions, one rule a test; a step is made up, no model is needed."""

from collections import deque

import pytest

from reference_engine.core.request import FinishReason, IllegalTransitionError, Status
from reference_engine.core.step import StepPlan
from tests.reference_engine.conftest import (
    end,
    make_request,
    make_scheduler,
    names,
    run_step,
    scheduled,
)


def test_a_prompt_is_computed_whole_and_then_one_token_a_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=5, max_tokens=3))
    assert [scheduled(run_step(scheduler)) for _ in range(3)] == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert not scheduler.has_work
    counters = scheduler.counters
    assert (counters.generated_tokens, counters.prompt_tokens) == (3, 5)
    assert counters.finished == {"length": 1}


def test_a_long_prompt_is_chunked_beside_a_running_request() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", num_prompt=4))
    run_step(scheduler)
    scheduler.add(make_request("b", num_prompt=18))
    steps = [scheduled(run_step(scheduler)) for _ in range(3)]
    assert steps == [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 4}]
    assert scheduler.requests["b"].num_generated == 1, "the last chunk samples"


def test_slots_go_first_come_first_served_and_a_freed_one_in_the_very_next_step() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, num_prompt=2))
    assert names(run_step(scheduler).admitted) == ["a", "b"]
    assert names(scheduler.waiting) == ["c"]
    end(scheduler, "a")
    assert names(run_step(scheduler).admitted) == ["c"]


def test_end_of_sequence_stops_unless_it_is_to_be_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b", ignore_eos=True))
    run_step(scheduler, token=2)
    assert list(scheduler.requests) == ["b"]
    assert scheduler.counters.finished == {"stop": 1}


def test_the_context_is_a_limit_too() -> None:
    scheduler = make_scheduler(max_model_len=8)
    scheduler.add(make_request("a", num_prompt=6, max_tokens=100))
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.counters.finished == {"length": 1}


def test_out_of_blocks_preempts_the_youngest_which_recomputes_later() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    old, young = (make_request(name, num_prompt=7, max_tokens=6) for name in ("old", "young"))
    late = make_request("late", num_prompt=2)
    scheduler.add(old)
    scheduler.add(young)
    run_step(scheduler)
    scheduler.add(late)
    run_step(scheduler)  # both have 8 computed tokens in two full blocks: nothing is left
    plan = run_step(scheduler)
    assert (plan.preempted, plan.admitted) == ([young], [])
    assert (young.status, young.block_table) == (Status.PREEMPTED, [])
    assert (young.num_computed_tokens, young.num_generated) == (0, 2)
    assert list(scheduler.waiting) == [young, late], "to the front of the queue"
    counters = scheduler.counters
    assert (counters.preemptions, counters.recomputed_tokens) == (1, 0), "nothing again yet"
    while old in scheduler.running:
        run_step(scheduler)
    plan = run_step(scheduler)
    assert plan.resumed == [young]
    assert scheduled(plan) == {"young": 5, "late": 2}, "its first prompt block was still cached"
    assert counters.recomputed_tokens == young.num_recomputed_tokens == 4
    assert (counters.resumed_queried_tokens, counters.resumed_hit_tokens) == (9, 4)
    while young in scheduler.running:
        run_step(scheduler)
    assert young.num_generated == 6


@pytest.mark.parametrize(
    ("swap_space_blocks", "num_copied"),
    [(3, 2), (1, 0)],
    ids=["swapped", "no room on the host"],
)
def test_a_victim_with_a_copy_on_the_host_goes_on_where_it_was(
    swap_space_blocks: int, num_copied: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=4,
        block_size=4,
        max_model_len=16,
        preemption="swap",
        swap_space_blocks=swap_space_blocks,
    )
    old, young = (make_request(name, num_prompt=7, max_tokens=6) for name in ("old", "young"))
    scheduler.add(old)
    scheduler.add(young)
    while not (plan := run_step(scheduler)).preempted:
        pass
    assert (plan.preempted, len(plan.swap_out)) == ([young], num_copied)
    assert young.num_computed_tokens == num_copied * 4
    assert scheduler.kv_cache.host.num_held == num_copied
    while old in scheduler.running:
        run_step(scheduler)
    plan = run_step(scheduler)
    assert (plan.resumed, plan.swapped) == ([young], [young] if num_copied else [])
    assert scheduled(plan) == {"young": 1 if num_copied else 5}, "its first block was still cached"
    assert len(plan.swap_in) == (1 if num_copied else 0), "and is not copied"
    assert scheduler.counters.recomputed_tokens == (0 if num_copied else 4)
    assert scheduler.kv_cache.host.num_held == 0
    while young in scheduler.running:
        run_step(scheduler)
    assert young.num_generated == 6


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_that_alone_finds_no_block_preempts_itself(preemption: str) -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=16, preemption=preemption)
    scheduler.add(make_request("leaky", num_prompt=4))
    run_step(scheduler)
    scheduler.finish("leaky", FinishReason.ABORT)  # and its block is not given back
    scheduler.check_integrity()
    late = make_request("late", num_prompt=12, max_tokens=4)
    scheduler.add(late)
    run_step(scheduler)
    plan = run_step(scheduler)
    assert (plan.preempted, plan.scheduled) == ([late], {})
    assert plan.is_empty == (preemption == "recompute"), "the copies are to be made"


def test_all_decodes_but_the_last_are_plain() -> None:
    scheduler = make_scheduler()
    request = make_request("a", num_prompt=4, max_tokens=8)
    scheduler.add(request)
    for num_computed, plain_until in ((4, 0), (5, 8), (9, 10), (10, 10)):
        while request.num_computed_tokens < num_computed:
            run_step(scheduler)
        assert request.plain_decode_until == plain_until
    run_step(scheduler)
    assert not scheduler.has_work, "12 tokens, of which the last is never computed"


@pytest.mark.parametrize("chunk", [8, 64])
def test_a_step_planned_ahead_counts_its_prompts_and_reports_first_and_last_tokens(
    chunk: int,
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=chunk)
    request = make_request("a", num_prompt=20, max_tokens=6)
    scheduler.add(request)
    in_flight, reported = deque[StepPlan](), list[int]()
    while scheduler.has_work:
        plan = scheduler.schedule()
        if not plan.is_empty:
            in_flight.append(plan)
        if len(in_flight) > 1 or plan.is_empty:
            over = in_flight.popleft()
            sampled = {one.request_id: 5 for one in over.sampling}
            grown = scheduler.update(over, sampled, with_plain=False)
            reported += [one.num_generated for one in grown]
        if request.finish_reason is FinishReason.LENGTH:
            end(scheduler, "a", FinishReason.LENGTH)
    assert (scheduler.counters.prompt_tokens, request.num_prefilled_tokens) == (20, 20)
    assert reported == [1, 6]


def test_an_illegal_transition_raises_and_changes_nothing() -> None:
    request = make_request("a")
    with pytest.raises(IllegalTransitionError, match="waiting -> preempted"):
        request.move_to(Status.PREEMPTED)
    assert request.status is Status.WAITING
