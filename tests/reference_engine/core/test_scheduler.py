"""Scheduling decisions, one rule a test; a step is made up, no model is needed."""

import pytest

from reference_engine.core.request import FinishReason, IllegalTransitionError, Status
from reference_engine.core.step import StepPlan
from tests.reference_engine.conftest import end, make_request, make_scheduler, run_step, scheduled


def test_a_prompt_is_computed_whole_and_then_one_token_a_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=5, max_tokens=3))
    assert scheduled(run_step(scheduler)) == {"a": 5}
    assert scheduled(run_step(scheduler)) == {"a": 1}
    assert scheduled(run_step(scheduler)) == {"a": 1}
    assert not scheduler.has_work
    assert scheduler.counters.generated_tokens == 3
    assert scheduler.counters.prompt_tokens == 5
    assert scheduler.counters.finished == {"length": 1}


def test_a_long_prompt_is_chunked_beside_a_running_request() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", num_prompt=4))
    run_step(scheduler)
    scheduler.add(make_request("b", num_prompt=18))
    assert scheduled(run_step(scheduler)) == {"a": 1, "b": 7}
    assert scheduled(run_step(scheduler)) == {"a": 1, "b": 7}
    plan = run_step(scheduler)
    assert scheduled(plan) == {"a": 1, "b": 4}
    assert scheduler.requests["b"].num_generated == 1, "the last chunk samples"


def test_slots_are_given_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, num_prompt=2))
    plan = run_step(scheduler)
    assert [request.request_id for request in plan.admitted] == ["a", "b"]
    assert [request.request_id for request in scheduler.waiting] == ["c"]


def test_a_freed_slot_is_filled_in_the_very_next_schedule() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    run_step(scheduler)
    end(scheduler, "a")
    assert [request.request_id for request in run_step(scheduler).admitted] == ["b"]


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
    old = make_request("old", num_prompt=7, max_tokens=6)
    young = make_request("young", num_prompt=7, max_tokens=6)
    late = make_request("late", num_prompt=2)
    for request in (old, young):
        scheduler.add(request)
    run_step(scheduler)
    scheduler.add(late)
    run_step(scheduler)  # both have 8 computed tokens in two full blocks: nothing is left
    plan = run_step(scheduler)
    assert plan.preempted == [young]
    assert plan.admitted == []
    assert young.status is Status.PREEMPTED
    assert young.block_table == []
    assert (young.num_computed_tokens, young.num_generated) == (0, 2)
    assert list(scheduler.waiting) == [young, late], "to the front of the queue"
    assert scheduler.counters.preemptions == 1
    assert scheduler.counters.recomputed_tokens == 0, "nothing is computed again yet"
    while old in scheduler.running:
        run_step(scheduler)
    plan = run_step(scheduler)
    assert plan.resumed == [young]
    expected = {"young": 5, "late": 2}
    assert scheduled(plan) == expected, "all but the first prompt block, which was still cached"
    assert scheduler.counters.recomputed_tokens == young.num_recomputed_tokens == 4
    assert scheduler.counters.resumed_queried_tokens == 9
    assert scheduler.counters.resumed_hit_tokens == 4
    while young in scheduler.running:
        run_step(scheduler)
    assert young.num_generated == 6


def test_a_request_taken_out_of_a_plan_is_in_no_part_of_it() -> None:
    out, stays = make_request("out", num_prompt=9), make_request("stays", num_prompt=9)
    plan = StepPlan(step=1, budget=2, scheduled={out: 5, stays: 3}, partial=[out, stays])
    plan.take_out(out)
    assert (plan.budget, plan.scheduled, plan.partial) == (7, {stays: 3}, [stays])


def test_a_request_that_alone_finds_no_block_preempts_itself() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    victim = make_request("victim", num_prompt=15, max_tokens=1)
    scheduler.add(victim)
    run_step(scheduler)
    assert not scheduler.has_work
    leaky = make_request("leaky", num_prompt=4)
    scheduler.add(leaky)
    run_step(scheduler)
    scheduler.finish("leaky", FinishReason.ABORT)  # and its block is not given back
    scheduler.check_integrity()
    late = make_request("late", num_prompt=12, max_tokens=4)
    scheduler.add(late)
    run_step(scheduler)
    plan = run_step(scheduler)
    assert plan.preempted == [late]
    assert plan.scheduled == {}


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


def test_ids_match_whole() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    scheduler.add(make_request("ab"))
    run_step(scheduler)
    end(scheduler, "a")
    assert list(scheduler.requests) == ["ab"]


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(make_request("a"))


def test_an_illegal_transition_raises_and_changes_nothing() -> None:
    request = make_request("a")
    with pytest.raises(IllegalTransitionError, match="waiting -> preempted"):
        request.move_to(Status.PREEMPTED)
    assert request.status is Status.WAITING
