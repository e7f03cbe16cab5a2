"""Abort in every state of a request: nothing of it is left.

Each case brings a request called "target" into its state beside one that survives, ends it, and
checks the books: no block held, none lost, counted once, and the survivor runs on to its end.
"""

import pytest

from reference_engine.core.request import FinishReason, Request, Status
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from tests.reference_engine.conftest import WORD, end, make_request, make_scheduler, run_step

NUM_BLOCKS = 8


def pressed_scheduler() -> Scheduler:
    """Room for the survivor and the beginning of the target."""
    return make_scheduler(num_blocks=NUM_BLOCKS, block_size=4, max_model_len=32)


def add_both(scheduler: Scheduler, *, max_tokens: int = 18) -> Request:
    scheduler.add(make_request("survivor", num_prompt=4, max_tokens=20))
    target = make_request("target", num_prompt=14, max_tokens=max_tokens)
    scheduler.add(target)
    return target


def compute(plan: StepPlan) -> dict[str, int]:
    return {request.request_id: WORD for request in plan.sampling}


def waiting(scheduler: Scheduler) -> Request:
    target = add_both(scheduler)
    assert target.status is Status.WAITING
    return target


def mid_chunk(scheduler: Scheduler) -> Request:
    target = add_both(scheduler)
    run_step(scheduler)
    assert 0 < target.num_computed_tokens < target.num_prompt_tokens
    return target


def running(scheduler: Scheduler) -> Request:
    target = add_both(scheduler)
    for _ in range(2):
        run_step(scheduler)
    assert (target.status, target.num_owed_tokens) == (Status.RUNNING, 1)
    return target


def preempted(scheduler: Scheduler) -> Request:
    target = add_both(scheduler)
    while target.status is not Status.PREEMPTED:
        run_step(scheduler)
    return target


BETWEEN_STEPS = {case.__name__: case for case in (waiting, mid_chunk, running, preempted)}


def check_the_books(scheduler: Scheduler, target: Request) -> None:
    """After the end of the target: its blocks are free, it is counted, the other is untouched."""
    scheduler.check_integrity()
    assert (target.status, target.block_table) == (Status.FINISHED, [])
    assert "target" not in scheduler.requests
    assert scheduler.counters.finished == {"abort": 1}
    assert target not in scheduler.running
    assert target not in list(scheduler.waiting)
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.kv_cache.pool.num_free == NUM_BLOCKS
    assert scheduler.kv_cache.pool.num_held == 0
    assert scheduler.counters.finished == {"abort": 1, "length": 1}


@pytest.mark.parametrize("state", list(BETWEEN_STEPS))
def test_between_two_steps(state: str) -> None:
    scheduler = pressed_scheduler()
    target = BETWEEN_STEPS[state](scheduler)
    held = len(target.block_table)
    assert end(scheduler, "target") == held
    check_the_books(scheduler, target)


@pytest.mark.parametrize("state", ["waiting", "mid_chunk", "running"])
def test_in_the_step_in_flight(state: str) -> None:
    scheduler = pressed_scheduler()
    target = BETWEEN_STEPS[state](scheduler)
    generated = scheduler.counters.generated_tokens
    num_before = target.num_generated
    plan = scheduler.schedule()
    sampled = compute(plan)
    end(scheduler, "target")
    scheduler.check_integrity()
    grown = scheduler.update(plan, sampled)
    assert target not in grown, "its result is dropped"
    assert target.num_generated == num_before
    assert scheduler.counters.generated_tokens - generated == len(sampled), "and counted"
    check_the_books(scheduler, target)


def test_when_it_is_preempted_by_the_step_in_flight() -> None:
    scheduler = pressed_scheduler()
    target = add_both(scheduler)
    while not (plan := scheduler.schedule()).preempted:
        scheduler.update(plan, compute(plan))
    assert plan.preempted == [target]
    sampled = compute(plan)
    end(scheduler, "target")
    scheduler.update(plan, sampled)
    check_the_books(scheduler, target)


def test_finishing_in_this_very_step() -> None:
    """The step's token is its last; the abort comes before it can be ended as finished."""
    scheduler = pressed_scheduler()
    target = add_both(scheduler, max_tokens=2)
    run_step(scheduler)
    run_step(scheduler)
    plan = scheduler.schedule()
    grown = scheduler.update(plan, compute(plan))
    assert target in grown
    assert end(scheduler, "target") is not None
    assert end(scheduler, "target", FinishReason.LENGTH) is None, "one way out, once"
    assert target.finish_reason is FinishReason.ABORT
    check_the_books(scheduler, target)


def test_twice() -> None:
    scheduler = pressed_scheduler()
    target = running(scheduler)
    assert end(scheduler, "target") is not None
    assert end(scheduler, "target") is None
    check_the_books(scheduler, target)


@pytest.mark.parametrize("name", ["finished", "unknown", "surviv"])
def test_a_request_that_is_not_there(name: str) -> None:
    scheduler = pressed_scheduler()
    scheduler.add(make_request("survivor"))
    scheduler.add(make_request("finished", max_tokens=1))
    run_step(scheduler)
    assert list(scheduler.requests) == ["survivor"]
    free = scheduler.kv_cache.pool.num_free
    assert end(scheduler, name) is None
    scheduler.check_integrity()
    assert scheduler.kv_cache.pool.num_free == free
    assert scheduler.counters.finished == {"length": 1}


def test_an_abort_after_the_step_that_finished_it() -> None:
    scheduler = pressed_scheduler()
    target = add_both(scheduler, max_tokens=1)
    while target.status is not Status.FINISHED:
        run_step(scheduler)
    assert end(scheduler, "target") is None
    scheduler.check_integrity()
    assert scheduler.counters.finished == {"length": 1}
