"""Counts for each request and in total, and their agreement."""

import pytest

from reference_engine.core.request import Request
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from tests.reference_engine.conftest import end, make_request, make_scheduler, run_step


def preempt(scheduler: Scheduler, request: Request) -> None:
    scheduler._preempt(request, StepPlan(step=0))


def test_a_request_that_is_preempted_twice_pays_for_what_is_computed_again() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False, max_num_batched_tokens=5)
    request = make_request("a", num_prompt=6, max_tokens=20)
    scheduler.add(request)
    for _ in range(8):
        run_step(scheduler)
    assert request.num_computed_tokens == 12
    preempt(scheduler, request)
    for _ in range(2):
        run_step(scheduler)
    assert (request.num_computed_tokens, request.num_recomputed_tokens) == (10, 10)
    preempt(scheduler, request)
    while request.num_generated < 10:
        run_step(scheduler)
    assert request.num_preemptions == scheduler.counters.preemptions == 2
    assert request.num_recomputed_tokens == 10 + 12, "10 twice, the last 2 once"
    assert scheduler.counters.recomputed_tokens == 22
    assert scheduler.counters.prompt_tokens == 6, "once, however often it was computed"


def test_an_unread_prompt_is_counted_and_each_step_of_a_slot() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for name in ("left", "read"):
        scheduler.add(make_request(name, num_prompt=30))
    run_step(scheduler)
    run_step(scheduler)
    end(scheduler, "left")
    counters = scheduler.counters
    assert (counters.unread_prompt_tokens, counters.prompt_tokens) == (16, 0)
    assert (counters.steps, counters.slot_steps) == (2, 2), "one prompt at a time"
    while scheduler.requests["read"].num_generated < 2:
        run_step(scheduler)
    scheduler.add(make_request("beside"))
    run_step(scheduler)
    assert counters.slot_steps == counters.steps + 1
    end(scheduler, "read")
    assert counters.unread_prompt_tokens == 16, "that one had a token"


def test_saved_tokens_end_at_the_context() -> None:
    scheduler = make_scheduler(max_model_len=20)
    scheduler.add(make_request("a", num_prompt=4, max_tokens=1000))
    run_step(scheduler)
    end(scheduler, "a")
    assert scheduler.counters.saved_tokens == 15


@pytest.mark.parametrize(("policy", "num_kept"), [("immediate", 0), ("retain", 3)])
def test_the_reclaim_policy_also_holds_for_one_that_was_preempted(
    policy: str, num_kept: int
) -> None:
    """Its prompt of three full blocks is cached when it is cancelled in the queue."""
    scheduler = make_scheduler(reclaim=policy)
    request = make_request("left", num_prompt=12, prompt="same")
    scheduler.add(request)
    run_step(scheduler)
    preempt(scheduler, request)
    assert end(scheduler, "left") == 0, "it held nothing"
    scheduler.check_integrity()
    counters = scheduler.counters
    assert scheduler.kv_cache.pool.num_cached == num_kept
    assert (counters.reclaimed_freed, counters.reclaimed_retained) == (3 - num_kept, num_kept)
    scheduler.add(make_request("next", num_prompt=12, prompt="same"))
    run_step(scheduler)
    assert counters.retained_hits == min(2, num_kept)


def test_a_request_that_never_ran_leaves_nothing_behind() -> None:
    scheduler = make_scheduler(max_num_seqs=1, reclaim="immediate")
    scheduler.add(make_request("first", num_prompt=12, prompt="same", max_tokens=1))
    run_step(scheduler)
    scheduler.add(make_request("running", num_prompt=4))
    scheduler.add(make_request("queued", num_prompt=12, prompt="same"))
    run_step(scheduler)
    end(scheduler, "queued")
    assert scheduler.kv_cache.pool.num_cached == 3, "what it would have found is another's"
