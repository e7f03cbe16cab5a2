"""Abort in every state of a request: nothing of it is left.

Each case brings a request called "target" into its state while another one runs, ends it, and
checks the books: no block held, none lost, counted once, and the other request runs to its end.
"""

from typing import Any

import pytest

from reference_engine.core.request import FinishReason, Request, Status
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from tests.reference_engine.conftest import (
    WORD,
    StepsAhead,
    end,
    make_request,
    make_scheduler,
    run_step,
    run_to_the_end,
)

NUM_BLOCKS = 8  # room for the survivor and the beginning of the target


def with_both(
    *, max_tokens: int = 18, is_taken_over: bool = False, **settings: Any
) -> tuple[Scheduler, Request]:
    scheduler = make_scheduler(num_blocks=NUM_BLOCKS, block_size=4, max_model_len=32, **settings)
    scheduler.add(make_request("survivor", num_prompt=4, max_tokens=20))
    answer = [WORD] if is_taken_over else []
    target = make_request("target", num_prompt=14, max_tokens=max_tokens, answer=answer)
    if is_taken_over:
        scheduler.take_over(target, has_blocks=True)
    else:
        scheduler.add(target)
    return scheduler, target


def brought_to(state: str) -> tuple[Scheduler, Request]:
    has_host_blocks = state in ("swapped", "taken over")
    scheduler, target = with_both(
        preemption="swap" if has_host_blocks else "recompute", is_taken_over=state == "taken over"
    )
    for _ in range({"mid chunk": 1, "running": 2, "handing over": 2}.get(state, 0)):
        run_step(scheduler)
    if state == "handing over":
        scheduler.hand_over(target)
    while state in ("preempted", "swapped") and target.status is not Status.PREEMPTED:
        run_step(scheduler)
    assert bool(target.host_table) == has_host_blocks
    status, is_begun, owed = {
        "waiting": (Status.WAITING, False, 14),
        "mid chunk": (Status.RUNNING, True, 2),
        "running": (Status.RUNNING, True, 1),
        "preempted": (Status.PREEMPTED, False, target.num_tokens),
        "swapped": (Status.PREEMPTED, True, 1),
        "handing over": (Status.HANDING_OVER, True, 1),
        "taken over": (Status.WAITING, True, 1),
    }[state]
    assert (target.status, target.num_computed_tokens > 0) == (status, is_begun)
    assert target.num_owed_tokens == owed
    return scheduler, target


def compute(plan: StepPlan) -> dict[str, int]:
    return {request.request_id: WORD for request in plan.sampling}


def check_the_books(scheduler: Scheduler, target: Request, *, aborts: int = 1) -> None:
    """After the end of the target: its blocks are free, it is counted, the other is untouched."""
    counted = {"abort": 1} if aborts else {}
    if not scheduler.has_work:
        counted["length"] = 1
    scheduler.check_integrity()
    assert (target.status, target.block_table, target.host_table) == (Status.FINISHED, [], [])
    assert scheduler.kv_cache.host.num_held == 0
    assert "target" not in scheduler.requests
    assert scheduler.counters.finished == counted
    assert target not in [*scheduler.running, *scheduler.waiting]
    run_to_the_end(scheduler)
    assert scheduler.kv_cache.pool.num_free == NUM_BLOCKS
    assert scheduler.kv_cache.pool.num_held == 0
    assert scheduler.counters.finished == counted | {"length": 1}


@pytest.mark.parametrize(
    "state",
    ["waiting", "mid chunk", "running", "preempted", "swapped", "handing over", "taken over"],
)
def test_an_abort_between_two_steps_leaves_nothing_and_a_second_one_does_nothing(
    state: str,
) -> None:
    scheduler, target = brought_to(state)
    held = len(target.block_table)
    assert end(scheduler, "target") == held
    assert end(scheduler, "target") is None
    check_the_books(scheduler, target, aborts=state != "handing over")


@pytest.mark.parametrize("state", ["waiting", "mid chunk", "running", "handing over"])
def test_an_abort_in_the_step_in_flight_drops_its_result_and_counts_it(state: str) -> None:
    scheduler, target = brought_to(state)
    generated, num_before = scheduler.counters.generated_tokens, target.num_generated
    plan = scheduler.schedule()
    sampled = compute(plan)
    end(scheduler, "target")
    scheduler.check_integrity()
    assert target not in scheduler.update(plan, sampled)
    assert target.num_generated == num_before
    assert scheduler.counters.generated_tokens - generated == len(sampled)
    check_the_books(scheduler, target, aborts=state != "handing over")


@pytest.mark.parametrize("is_freed_at_once", [False, True])
@pytest.mark.parametrize("state", ["waiting", "mid chunk", "running", "preempted", "swapped"])
def test_an_abort_with_a_step_in_flight_and_the_next_one_to_be_planned_leaves_nothing(
    state: str, is_freed_at_once: bool
) -> None:
    """The step in flight computes for the request, or has just taken its blocks away."""
    preemption = "swap" if state == "swapped" else "recompute"
    scheduler, target = with_both(preemption=preemption)
    steps = StepsAhead(scheduler)
    for _ in range({"waiting": 0, "mid chunk": 1, "running": 3}.get(state, 0)):
        plan = steps.step()
        assert target in plan.scheduled
    while state in ("preempted", "swapped") and target.status is not Status.PREEMPTED:
        plan = steps.step()
    num_known = target.num_generated
    assert scheduler.finish("target", FinishReason.ABORT) is target
    if is_freed_at_once:
        scheduler.free(target)
    assert target not in steps.step().scheduled
    if not is_freed_at_once:
        scheduler.free(target)
    steps.run_to_the_end()
    assert target.num_generated == num_known
    assert scheduler.counters.generated_tokens == 20 + num_known + (state == "running")
    check_the_books(scheduler, target)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_abort_of_a_request_that_the_step_in_flight_preempted_leaves_nothing(
    preemption: str,
) -> None:
    scheduler, target = with_both(preemption=preemption)
    while not (plan := scheduler.schedule()).preempted:
        scheduler.update(plan, compute(plan))
    assert plan.preempted == [target]
    assert plan.swapped == ([target] if preemption == "swap" else [])
    sampled = compute(plan)
    end(scheduler, "target")
    scheduler.update(plan, sampled)
    check_the_books(scheduler, target)


def test_a_request_that_was_handed_over_leaves_nothing_and_an_abort_then_does_nothing() -> None:
    scheduler, target = brought_to("handing over")
    scheduler.schedule()
    scheduler.check_integrity()
    assert scheduler.finish("target", None) is target
    assert scheduler.free(target) == len("0123")
    assert end(scheduler, "target") is None
    assert (scheduler.counters.handed_over_requests, scheduler.counters.finished) == (1, {})
    scheduler.check_integrity()


@pytest.mark.parametrize("state", ["swapped", "taken over"])
def test_an_abort_in_the_very_step_that_copies_a_request_back_leaves_nothing(state: str) -> None:
    scheduler, target = brought_to(state)
    while not (plan := scheduler.schedule()).swap_in:
        for request in scheduler.update(plan, compute(plan)):
            if request.finish_reason is not None:
                end(scheduler, request.request_id, request.finish_reason)
    assert plan.swapped == ([target] if state == "swapped" else [])
    assert target in (plan.resumed if state == "swapped" else plan.admitted)
    end(scheduler, "target")
    scheduler.update(plan, compute(plan))
    run_to_the_end(scheduler)
    assert (scheduler.kv_cache.host.num_held, scheduler.kv_cache.pool.num_held) == (0, 0)
    assert not scheduler.has_work


def test_an_abort_before_the_last_token_is_ended_wins_over_the_natural_end() -> None:
    scheduler, target = with_both(max_tokens=2)
    run_step(scheduler)
    run_step(scheduler)
    plan = scheduler.schedule()
    assert target in scheduler.update(plan, compute(plan))
    assert end(scheduler, "target") is not None
    assert end(scheduler, "target", FinishReason.LENGTH) is None, "one way out, once"
    assert target.finish_reason is FinishReason.ABORT
    check_the_books(scheduler, target)


@pytest.mark.parametrize("name", ["finished", "unknown", "surviv"])
def test_an_abort_of_a_request_that_is_not_there_changes_nothing(name: str) -> None:
    scheduler, _ = with_both()
    end(scheduler, "target")
    scheduler.add(make_request("finished", max_tokens=1))
    run_step(scheduler)
    assert list(scheduler.requests) == ["survivor"]
    free = scheduler.kv_cache.pool.num_free
    assert end(scheduler, name) is None
    scheduler.check_integrity()
    assert scheduler.kv_cache.pool.num_free == free
    assert scheduler.counters.finished == {"abort": 1, "length": 1}
