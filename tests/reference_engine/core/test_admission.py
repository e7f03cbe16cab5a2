"""Admission and preemption: the chosen requests, their numbers of tokens, and who waits."""

from typing import Any

import pytest

from reference_engine.config import EngineConfig
from reference_engine.core.scheduler import Scheduler
from tests.reference_engine.conftest import (
    end,
    make_request,
    make_scheduler,
    names,
    run_step,
    run_to_the_end,
    scheduled,
)


def add(scheduler: Scheduler, name: str, num_prompt: int, *, priority: int = 0) -> None:
    scheduler.add(make_request(name, num_prompt=num_prompt, priority=priority))


LONG_PREFILL = {
    "long_prefill_token_threshold": 5,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
}


@pytest.mark.parametrize(
    ("settings", "prompts", "steps"),
    [
        (  # no request overtakes the second
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            {"first": 40, "second": 40, "third": 4},
            [{"first": 40}, {"first": 1, "second": 40, "third": 4}],
        ),
        (
            {**LONG_PREFILL, "max_num_partial_prefills": 2},
            {"long": 12, "short": 4},
            [{"long": 5, "short": 4}, {"long": 5, "short": 1}, {"long": 2, "short": 1}],
        ),
        (  # the threshold clamps each prompt, and the next gets what is left of the budget
            LONG_PREFILL,
            dict.fromkeys("abcdefg", 12),
            [dict.fromkeys("abcdef", 5) | {"g": 2}, dict.fromkeys("abcdef", 5) | {"g": 2}],
        ),
        (
            {**LONG_PREFILL, "max_num_partial_prefills": 2},
            {"a": 12, "b": 12, "c": 12},
            [{"a": 5, "b": 5}],
        ),
        (  # without a watermark the last block is given away
            {"num_blocks": 16},
            {"large": 32, "small": 1},
            [{"large": 16}, {"large": 16}, {"large": 1, "small": 1}],
        ),
        (  # alone a request may dip into the reserve; then 9 blocks are held, 8 are to stay free
            {"num_blocks": 16, "watermark": 0.5},
            {"large": 32, "small": 1},
            [{"large": 16}, {"large": 16}, {"large": 1}],
        ),
    ],
    ids=["unchunked", "threshold", "clamped", "two prefills", "no watermark", "watermark"],
)
def test_the_settings_decide_how_many_tokens_each_prompt_gets(
    settings: dict[str, Any], prompts: dict[str, int], steps: list[dict[str, int]]
) -> None:
    scheduler = make_scheduler(**settings)
    for name, num_prompt in prompts.items():
        add(scheduler, name, num_prompt)
    assert [scheduled(run_step(scheduler)) for _ in steps] == steps


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
        assert "second" not in scheduled(run_step(scheduler))
    run_to_the_end(scheduler)
    assert scheduler.counters.preemptions == 0


def test_the_most_important_is_admitted_first() -> None:
    scheduler = make_scheduler(scheduling_policy="priority", max_num_seqs=2)
    for name, priority in (("low", 5), ("first", 1), ("second", 1), ("high", -3)):
        add(scheduler, name, 2, priority=priority)
    assert names(run_step(scheduler).admitted) == ["high", "first"]
    assert names(scheduler.waiting) == ["second", "low"]
    end(scheduler, "second")
    assert names(scheduler.waiting) == ["low"]


FEW_BLOCKS: dict[str, Any] = {
    "scheduling_policy": "priority",
    "num_blocks": 4,
    "block_size": 4,
    "max_model_len": 16,
}


def test_a_victim_that_was_scheduled_already_gives_its_budget_back() -> None:
    scheduler = make_scheduler(**FEW_BLOCKS)
    add(scheduler, "low", 5, priority=9)
    run_step(scheduler)
    add(scheduler, "high", 8)
    run_step(scheduler)
    # low, first in the batch, has room in its last block; high has none
    plan = scheduler.schedule()
    assert names(plan.preempted) == ["low"]
    assert scheduled(plan) == {"high": 1}
    assert plan.budget == 15


def test_a_step_that_preempts_admits_no_request() -> None:
    scheduler = make_scheduler(**FEW_BLOCKS | {"num_blocks": 6, "max_model_len": 24})
    for name in ("old", "young"):
        add(scheduler, name, 11)
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(make_request("small", num_prompt=1, priority=-1))
    while not (plan := run_step(scheduler)).preempted:
        assert not plan.admitted, "no block is left"
    assert names(plan.preempted) == ["young"]
    assert scheduler.kv_cache.pool.num_free >= 2, "there would be room"
    assert plan.resumed == plan.admitted == []


@pytest.mark.parametrize(
    ("victim", "requests", "preempted"),
    [
        ("policy", {"early": (7, 0), "late": (7, 0)}, "late"),
        ("policy", {"low": (8, 9), "high": (7, 0)}, "low"),  # itself the one that grows
        ("rebuild-cost", {"dear": (7, 9), "cheap": (7, 0)}, "dear"),
    ],
)
def test_the_least_important_is_preempted_and_among_equals_the_latest(
    victim: str, requests: dict[str, tuple[int, int]], preempted: str
) -> None:
    scheduler = make_scheduler(**FEW_BLOCKS, victim=victim)
    for name, (num_prompt, priority) in requests.items():
        add(scheduler, name, num_prompt, priority=priority)
    run_step(scheduler)
    add(scheduler, "last", 3, priority=9)
    while not (plan := run_step(scheduler)).preempted:
        pass
    assert names(plan.preempted) == [preempted]
    assert names(scheduler.waiting) == [preempted, "last"], "it goes first among its equals"
    assert scheduled(plan) == {name: 1 for name in requests if name != preempted}


@pytest.mark.parametrize(
    ("victim", "others", "preempted"),
    [
        # Twins share the blocks of their prompt, which one of them keeps.
        ("policy", ["alone"], "alone"),
        ("rebuild-cost", ["alone"], "twin"),
        ("policy", ["young"], "young"),
        ("rebuild-cost", ["old", "young"], "young"),
    ],
)
def test_first_come_first_served_preempts_the_youngest_or_the_cheapest_to_rebuild(
    victim: str, others: list[str], preempted: str
) -> None:
    scheduler = make_scheduler(victim=victim, num_blocks=9, block_size=4, max_model_len=36)
    twins = ["first", "twin"] if len(others) == 1 else []
    for name in [*twins, *others]:
        prompt = "same" if name in twins else name
        scheduler.add(make_request(name, num_prompt=9, max_tokens=27, prompt=prompt))
        run_step(scheduler)
    while not (plan := run_step(scheduler)).preempted:
        pass
    assert names(plan.preempted) == [preempted]


def test_the_threshold_that_follows_from_several_partial_prefills() -> None:
    assert EngineConfig(max_num_partial_prefills=2).max_chunk_tokens == 163, "4 % of 4,096"
    assert EngineConfig(max_num_partial_prefills=1).max_chunk_tokens == 512, "the budget"
    derived = EngineConfig(max_num_partial_prefills=2, long_prefill_token_threshold=100)
    assert derived.max_chunk_tokens == 100
