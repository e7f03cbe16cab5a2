"""Blocks: taken, given back, found again by their prefix, shared, evicted, kept after a cancel."""

from itertools import takewhile
from random import Random
from typing import Any

import pytest

from reference_engine.core.block_pool import BlockPool, extend_hashes
from reference_engine.core.request import Request, Sampling
from reference_engine.core.scheduler import Scheduler
from tests.reference_engine.conftest import (
    end,
    make_request,
    make_scheduler,
    run_step,
    run_to_the_end,
    scheduled,
)


def one_after_the_other(scheduler: Scheduler, *requests: Request) -> list[dict[str, int]]:
    """Each request's first step; the request before it has ended by then."""
    steps = []
    for request in requests:
        scheduler.add(request)
        steps.append(scheduled(run_step(scheduler)))
        run_to_the_end(scheduler)
    return steps


def alike(*names: str, num_prompt: int = 12, max_tokens: int = 8) -> list[Request]:
    return [
        make_request(name, num_prompt=num_prompt, prompt="same", max_tokens=max_tokens)
        for name in names
    ]


def test_a_pool_gives_all_or_nothing_and_takes_a_block_back_once() -> None:
    pool = BlockPool(4)
    blocks = pool.try_take(3)
    assert blocks is not None
    assert pool.try_take(2) is None
    assert pool.num_free == 1
    pool.check_integrity([blocks])
    with pytest.raises(AssertionError, match="references differ"):
        pool.check_integrity([])
    assert pool.give_back(blocks) == blocks
    assert pool.num_free == 4
    with pytest.raises(KeyError):
        pool.give_back(blocks)
    pool.check_integrity([])


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    taken = pool.try_take(1)
    assert taken is not None
    pool.index.add(taken[0], b"hash")
    pool.give_back(taken)
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert pool.try_take(2) == [1, 2]
    assert pool.index.longest([b"hash"]) == taken
    assert pool.try_take(1) == taken
    assert pool.index.longest([b"hash"]) == []
    pool.check_integrity([[1, 2], taken])


def test_a_hash_depends_on_all_tokens_before_it_and_a_chain_grows_at_its_end() -> None:
    chain, other = list[bytes](), list[bytes]()
    for num_tokens in range(6):
        extend_hashes(chain, [1, 2, 3, 4, 5][:num_tokens], 2)
        assert len(chain) == num_tokens // 2, "a part of a block has no hash"
    extend_hashes(other, [9, 2, 3, 4], 2)
    assert chain[0] != other[0]
    assert chain[1] != other[1], "same tokens, another beginning"


def test_an_equal_prompt_is_found_but_for_its_last_token() -> None:
    scheduler = make_scheduler()
    requests = [*alike("a", "b", max_tokens=2), make_request("other", num_prompt=12)]
    steps = one_after_the_other(scheduler, *requests)
    assert steps == [{"a": 12}, {"b": 4}, {"other": 12}], "of b two full blocks of three"
    assert requests[1].num_cached_tokens == 8
    counters = scheduler.counters
    assert (counters.prefix_queried_tokens, counters.prefix_hit_tokens) == (36, 8)
    assert counters.prompt_tokens == 36, "found or computed, it was a prompt token"


def answer(scheduler: Scheduler, request: Request, random: Random, stop_after: int | None) -> int:
    """Computes it with drawn tokens, alone, and stops it after some steps, if it has not ended.
    Returns how many of its tokens have been computed, as the steps of the plans say."""
    num_computed, num_steps = 0, 0
    scheduler.add(request)
    while scheduler.has_work and num_steps != stop_after:
        plan = scheduler.schedule()
        num_computed = request.num_computed_tokens + plan.scheduled[request]
        sampled = {one.request_id: random.randrange(300, 303) for one in plan.sampling}
        for ended in scheduler.update(plan, sampled):
            if ended.finish_reason is not None:
                end(scheduler, ended.request_id, ended.finish_reason)
        num_steps += 1
    end(scheduler, request.request_id)
    return num_computed


def reckoned_hits(computed: list[list[int]], prompt: list[int], block_size: int) -> int:
    """By hand: whole blocks of the longest beginning that was ever computed, but for a token."""
    pairs = [zip(tokens, prompt[:-1], strict=False) for tokens in computed]
    alike = [len(list(takewhile(lambda pair: pair[0] == pair[1], one))) for one in pairs]
    return max(alike, default=0) // block_size * block_size


@pytest.mark.parametrize("seed", range(30))
def test_a_next_turn_finds_what_a_reckoning_by_hand_finds(seed: int) -> None:
    """Of a history of turns: whole answers, stopped ones, prompts left in their prefill, answers
    that the user cuts before the next turn, and turns that begin anew at an earlier one."""
    random = Random(seed)
    scheduler = make_scheduler(num_blocks=512, max_model_len=512, block_size=random.choice([4, 8]))
    histories, computed = [list[int]()], list[list[int]]()
    for turn in range(8):
        question = [random.randrange(300, 303) for _ in range(random.randrange(1, 40))]
        prompt = random.choice(histories[-3:]) + question
        sampling = Sampling(max_tokens=random.randrange(1, 30))
        request = Request(f"turn-{turn}", prompt, sampling)
        expected = reckoned_hits(computed, prompt, scheduler.kv_cache.block_size)
        stop_after = random.choice([None, random.randrange(1, 20)])
        num_computed = answer(scheduler, request, random, stop_after)
        assert request.num_cached_tokens == expected
        computed.append(request.token_ids[:num_computed])
        kept = random.randrange(len(prompt), request.num_tokens + 1)
        histories.append(request.token_ids[: random.choice([kept, request.num_tokens])])
    assert sum(map(len, computed)) < 512 * scheduler.kv_cache.block_size, "none was evicted"


def test_blocks_are_shared_while_both_run_and_counted_once() -> None:
    scheduler = make_scheduler()
    first, second = alike("a", "b", num_prompt=10)
    for request in (first, second):
        scheduler.add(request)
        run_step(scheduler)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2:] != first.block_table[2:]
    assert scheduler.kv_cache.pool.num_held == 4
    end(scheduler, "a")
    scheduler.check_integrity()
    assert scheduler.kv_cache.pool.num_held == 3, "b still holds what they shared"
    assert (scheduler.counters.reclaimed_freed, scheduler.counters.reclaimed_retained) == (1, 0)


def test_switched_off_nothing_is_found_or_kept() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    assert one_after_the_other(scheduler, *alike("a", "b"))[1] == {"b": 12}
    assert scheduler.kv_cache.pool.num_cached == 0
    assert scheduler.counters.prefix_queried_tokens == 0


def test_two_that_compute_the_same_prompt_at_once_leave_one_copy() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    for request in alike("a", "b", max_tokens=1):
        scheduler.add(request)
    assert scheduled(run_step(scheduler)) == {"a": 12, "b": 12}
    pool = scheduler.kv_cache.pool
    assert (pool.num_cached, pool.num_free) == (3, 64)


def test_the_end_of_the_longest_unused_prefix_is_evicted_first() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=32)
    old, new = (make_request(name, num_prompt=12, max_tokens=1) for name in ("old", "new"))
    one_after_the_other(scheduler, old, new)
    assert scheduler.kv_cache.pool.num_cached == 6
    one_after_the_other(scheduler, make_request("big", num_prompt=11, max_tokens=2))
    for prompt in ("old", "new"):  # of the old one the last block went
        again = make_request(f"again-{prompt}", num_prompt=12, prompt=prompt)
        assert len(scheduler.kv_cache.find_prefix(again)) == 2


def test_a_prefix_is_not_evicted_to_make_room_for_its_own_request() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    (first,), (again,) = alike("a", num_prompt=9, max_tokens=1), alike("b", num_prompt=9)
    one_after_the_other(scheduler, first)
    assert scheduler.kv_cache.pool.num_cached == 2
    one_after_the_other(scheduler, again)
    assert again.num_generated == 7, "to the end of the context"


@pytest.mark.parametrize(
    ("settings", "reclaimed", "num_cached"),
    [
        ({}, {"freed": 1, "retained": 3, "forced": 0}, 3),
        ({"reclaim": "immediate"}, {"freed": 4, "retained": 0, "forced": 0}, 0),
        (
            {"num_blocks": 16, "force_reclaim_above": 0.2},
            {"freed": 1, "retained": 0, "forced": 3},
            0,
        ),
    ],
    ids=["retained", "immediate", "pressed"],
)
def test_the_policy_decides_what_becomes_of_a_cancelled_prompt(
    settings: dict[str, Any], reclaimed: dict[str, int], num_cached: int
) -> None:
    """It is cancelled in its fourth block, which holds answer tokens."""
    scheduler = make_scheduler(**settings)
    scheduler.add(*alike("left", max_tokens=9))
    for _ in range(3):
        run_step(scheduler)
    assert end(scheduler, "left") == 4, "retained is as good as free"
    scheduler.check_integrity()
    counters, pool = scheduler.counters, scheduler.kv_cache.pool
    assert {kind: getattr(counters, f"reclaimed_{kind}") for kind in reclaimed} == reclaimed
    assert (counters.saved_tokens, pool.num_cached) == (6, num_cached)
    one_after_the_other(scheduler, *alike("next", "after", max_tokens=1))
    assert counters.retained_hits == min(2, num_cached), "each retained block is counted once"
    assert pool.num_cached == 3, "the policy is for cancelled requests"


def test_immediate_reclaim_leaves_what_others_share() -> None:
    scheduler = make_scheduler(reclaim="immediate")
    for request in alike("stays", "leaves"):
        scheduler.add(request)
        run_step(scheduler)
    end(scheduler, "leaves")
    scheduler.check_integrity()
    assert len(scheduler.kv_cache.find_prefix(*alike("again"))) == 2
