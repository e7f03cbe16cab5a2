"""Admission: which requests, with how many tokens, and which wait although a slot is free."""

from typing import Any

import pytest

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.core.request import Status
from reference_engine.core.scheduler import Scheduler
from tests.reference_engine.conftest import end, make_request, make_scheduler, run_step, scheduled


def add(scheduler: Scheduler, name: str, num_prompt: int, *, priority: int = 0) -> None:
    scheduler.add(make_request(name, num_prompt=num_prompt, priority=priority))


def test_without_chunking_a_prompt_larger_than_what_is_left_waits() -> None:
    scheduler = make_scheduler(
        enable_chunked_prefill=False, max_num_batched_tokens=64, max_num_seqs=8
    )
    add(scheduler, "first", 40)
    add(scheduler, "second", 40)
    add(scheduler, "third", 4)
    assert scheduled(run_step(scheduler)) == {"first": 40}, "no request overtakes the second"
    assert scheduled(run_step(scheduler)) == {"first": 1, "second": 40, "third": 4}


def test_a_threshold_bounds_each_prompt_in_a_step() -> None:
    scheduler = make_scheduler(
        long_prefill_token_threshold=5, max_num_batched_tokens=32, max_num_partial_prefills=2
    )
    add(scheduler, "long", 12)
    add(scheduler, "short", 4)
    assert scheduled(run_step(scheduler)) == {"long": 5, "short": 4}
    assert scheduled(run_step(scheduler)) == {"long": 5, "short": 1}
    assert scheduled(run_step(scheduler)) == {"long": 2, "short": 1}


def test_the_threshold_that_follows_from_several_partial_prefills() -> None:
    assert EngineConfig(max_num_partial_prefills=2).max_chunk_tokens == 163, "4 % of 4,096"
    assert EngineConfig(max_num_partial_prefills=1).max_chunk_tokens == 512, "the budget"
    derived = EngineConfig(max_num_partial_prefills=2, long_prefill_token_threshold=100)
    assert derived.max_chunk_tokens == 100


@pytest.mark.parametrize(("most", "expected"), [(1, {"a": 5}), (2, {"a": 5, "b": 5})])
def test_so_many_prompts_are_in_progress_at_once(most: int, expected: dict[str, int]) -> None:
    scheduler = make_scheduler(
        long_prefill_token_threshold=5, max_num_batched_tokens=32, max_num_partial_prefills=most
    )
    for name in "abc":
        add(scheduler, name, 12)
    assert scheduled(run_step(scheduler)) == expected


def test_the_watermark_keeps_blocks_for_running_requests() -> None:
    scheduler = make_scheduler(num_blocks=16, watermark=0.5)
    add(scheduler, "large", 32)
    assert scheduled(run_step(scheduler)) == {"large": 16}, "alone it may dip into the reserve"
    add(scheduler, "small", 1)
    run_step(scheduler)
    plan = run_step(scheduler)
    assert scheduled(plan) == {"large": 1}, "9 of 16 blocks are held: 8 are to stay free"
    end(scheduler, "large")
    assert scheduled(run_step(scheduler)) == {"small": 1}


def test_without_a_watermark_the_last_block_is_given_away() -> None:
    scheduler = make_scheduler(num_blocks=16)
    add(scheduler, "large", 32)
    add(scheduler, "small", 1)
    run_step(scheduler)
    assert scheduled(run_step(scheduler)) == {"large": 16}
    assert scheduled(run_step(scheduler)) == {"large": 1, "small": 1}


@pytest.mark.parametrize(
    ("whole", "expected"), [(True, {"held": 1}), (False, {"held": 1, "long": 8})]
)
def test_a_prompt_must_fit_whole_or_just_its_first_chunk(
    whole: bool, expected: dict[str, int]
) -> None:
    scheduler = make_scheduler(
        num_blocks=16, reserve_full_isl=whole, long_prefill_token_threshold=8
    )
    add(scheduler, "held", 8)
    run_step(scheduler)
    add(scheduler, "long", 56)
    assert scheduled(run_step(scheduler)) == expected


def test_the_most_important_is_admitted_first() -> None:
    scheduler = make_scheduler(scheduling_policy="priority", max_num_seqs=2)
    for name, priority in (("low", 5), ("first", 1), ("second", 1), ("high", -3)):
        add(scheduler, name, 2, priority=priority)
    plan = run_step(scheduler)
    assert [request.request_id for request in plan.admitted] == ["high", "first"]
    assert [request.request_id for request in scheduler.waiting] == ["second", "low"]
    end(scheduler, "second")
    assert [request.request_id for request in scheduler.waiting] == ["low"]


def test_under_priority_the_least_important_is_preempted_wherever_it_stands() -> None:
    scheduler = make_scheduler(
        scheduling_policy="priority", num_blocks=4, block_size=4, max_model_len=16
    )
    low = make_request("low", num_prompt=5, priority=9)
    scheduler.add(low)
    run_step(scheduler)
    add(scheduler, "high", 8)
    run_step(scheduler)
    plan = scheduler.schedule()  # low has room in its last block, high has none
    assert plan.preempted == [low], "the first in the batch, and scheduled in this step already"
    assert scheduled(plan) == {"high": 1}
    assert plan.budget == 15, "what low had been given is there again"
    assert low.status is Status.PREEMPTED


def test_a_step_that_preempts_admits_no_request() -> None:
    scheduler = make_scheduler(
        scheduling_policy="priority", num_blocks=6, block_size=4, max_model_len=24
    )
    for name in ("old", "young"):
        add(scheduler, name, 11)
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(make_request("small", num_prompt=1, priority=-1))
    while not (plan := run_step(scheduler)).preempted:
        assert not plan.admitted, "no block is left"
    assert [request.request_id for request in plan.preempted] == ["young"]
    assert scheduler.kv_cache.pool.num_free >= 2, "there would be room"
    assert plan.resumed == plan.admitted == []


def test_rebuild_cost_keeps_to_the_priorities() -> None:
    scheduler = make_scheduler(
        scheduling_policy="priority",
        victim="rebuild-cost",
        num_blocks=4,
        block_size=4,
        max_model_len=16,
    )
    add(scheduler, "dear", 7, priority=9)
    add(scheduler, "cheap", 7)
    run_step(scheduler)
    run_step(scheduler)
    plan = run_step(scheduler)
    assert [request.request_id for request in plan.preempted] == ["dear"]


def test_prompts_in_progress_have_the_blocks_that_they_still_need() -> None:
    """Two prompts, of which one fits at a time: the second must not be begun."""
    scheduler = make_scheduler(
        num_blocks=16,
        max_num_batched_tokens=32,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=2,
    )
    for name in ("first", "second"):
        add(scheduler, name, 40)
    for _ in range(5):
        plan = run_step(scheduler)
        assert "second" not in scheduled(plan)
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.counters.preemptions == 0


def test_among_equals_the_latest_is_preempted_and_goes_first() -> None:
    scheduler = make_scheduler(
        scheduling_policy="priority", num_blocks=4, block_size=4, max_model_len=16
    )
    add(scheduler, "early", 7)
    add(scheduler, "late", 7)
    run_step(scheduler)
    add(scheduler, "later", 3)
    run_step(scheduler)
    plan = run_step(scheduler)
    assert [request.request_id for request in plan.preempted] == ["late"]
    assert [request.request_id for request in scheduler.waiting] == ["late", "later"]


def test_a_growing_request_that_is_last_in_rank_is_preempted() -> None:
    scheduler = make_scheduler(
        scheduling_policy="priority", num_blocks=4, block_size=4, max_model_len=16
    )
    add(scheduler, "low", 8, priority=9)
    add(scheduler, "high", 7)
    run_step(scheduler)
    plan = run_step(scheduler)
    assert [request.request_id for request in plan.preempted] == ["low"]
    assert scheduled(plan) == {"high": 1}, "requests behind it still get their step"


def rebuilt(victim_policy: str, request_prompts: dict[str, str]) -> str:
    """The request that is preempted first when all grow until the blocks are gone."""
    scheduler = make_scheduler(
        victim=victim_policy, num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=3
    )
    for name, prompt in request_prompts.items():
        scheduler.add(make_request(name, num_prompt=8, prompt=prompt, max_tokens=20))
    while not (plan := run_step(scheduler)).preempted:
        pass
    return plan.preempted[0].request_id


@pytest.mark.parametrize(("policy", "expected"), [("policy", "young"), ("rebuild-cost", "young")])
def test_with_nothing_to_choose_between_the_youngest_goes(policy: str, expected: str) -> None:
    assert rebuilt(policy, {"old": "x", "young": "y"}) == expected


def test_the_cheapest_to_rebuild_is_preempted() -> None:
    """The expensive one's prompt fills part of a block: the cache could give nothing back."""
    for policy, expected in (("policy", "dear"), ("rebuild-cost", "cheap")):
        scheduler = make_scheduler(
            victim=policy, num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=3
        )
        cheap = make_request("cheap", num_prompt=13, max_tokens=19)
        dear = make_request("dear", num_prompt=3, max_tokens=29)
        scheduler.add(cheap)
        scheduler.add(dear)
        while not (plan := run_step(scheduler)).preempted:
            pass
        assert [request.request_id for request in plan.preempted] == [expected], policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_chunked_prefill": False}, "without chunked prefill"),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 4096,
                "max_num_partial_prefills": 2,
            },
            "need chunked prefill",
        ),
        ({"watermark": 1.0}, "watermark"),
        ({"watermark": float("nan")}, "watermark"),
        ({"watermark": -0.1}, "watermark"),
        ({"force_reclaim_above": 1.5}, "force_reclaim_above"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills"),
    ],
)
def test_settings_that_cannot_work_say_so(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        EngineConfig(**settings)


def test_a_watermark_above_everything_does_not_lock_the_engine() -> None:
    scheduler = make_scheduler(num_blocks=16, watermark=0.99)
    for name in "abc":
        add(scheduler, name, 8)
    for _ in range(40):
        run_step(scheduler)
    assert not scheduler.has_work, "one after the other"
    assert scheduler.counters.preemptions == 0
