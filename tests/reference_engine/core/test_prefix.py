"""The prefix cache: blocks that are found again, shared, evicted, and retained after a cancel."""

import pytest

from reference_engine.core.block_pool import BlockPool
from reference_engine.core.prefix import chain_hashes
from reference_engine.core.request import Request
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from tests.reference_engine.conftest import end, make_request, make_scheduler, run_step, scheduled


def one_after_the_other(scheduler: Scheduler, *requests: Request) -> list[StepPlan]:
    """Each request's first step; the request before it has ended by then."""
    plans = []
    for request in requests:
        scheduler.add(request)
        plans.append(run_step(scheduler))
        while scheduler.has_work:
            run_step(scheduler)
    return plans


def test_a_hash_depends_on_all_tokens_before_it() -> None:
    first, second = chain_hashes([1, 2, 3, 4], 2)
    assert chain_hashes([1, 2, 3, 4, 5], 2) == [first, second], "a part of a block has no hash"
    other_first, other_second = chain_hashes([9, 2, 3, 4], 2)
    assert other_first != first
    assert other_second != second, "same tokens, another beginning"
    assert chain_hashes([1], 2) == []


def test_an_equal_prompt_is_found_but_for_its_last_token() -> None:
    scheduler = make_scheduler()
    requests = [make_request(name, num_prompt=12, prompt="same", max_tokens=2) for name in "ab"]
    first, second = one_after_the_other(scheduler, *requests)
    assert scheduled(first) == {"a": 12}
    assert scheduled(second) == {"b": 4}, (
        "two of three full blocks; a token must be left to compute"
    )
    assert requests[1].num_cached_tokens == 8
    assert scheduler.counters.prefix_queried_tokens == 24
    assert scheduler.counters.prefix_hit_tokens == 8
    assert scheduler.counters.prompt_tokens == 24, "found or computed, it was a prompt token"


def test_blocks_are_shared_while_both_run_and_counted_once() -> None:
    scheduler = make_scheduler()
    first = make_request("a", num_prompt=10, prompt="same")
    second = make_request("b", num_prompt=10, prompt="same")
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    run_step(scheduler)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2:] != first.block_table[2:]
    assert scheduler.kv_cache.pool.num_held == 4
    end(scheduler, "a")
    scheduler.check_integrity()
    assert scheduler.kv_cache.pool.num_held == 3, "b still holds what they shared"
    assert (scheduler.counters.reclaimed_freed, scheduler.counters.reclaimed_retained) == (1, 0)


def test_another_prompt_finds_nothing() -> None:
    scheduler = make_scheduler()
    plans = one_after_the_other(
        scheduler, make_request("a", num_prompt=12), make_request("b", num_prompt=12)
    )
    assert scheduled(plans[1]) == {"b": 12}


def test_switched_off_nothing_is_found_or_kept() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    requests = [make_request(name, num_prompt=12, prompt="same") for name in "ab"]
    assert scheduled(one_after_the_other(scheduler, *requests)[1]) == {"b": 12}
    assert scheduler.kv_cache.pool.num_cached == 0
    assert scheduler.counters.prefix_queried_tokens == 0


def test_two_that_compute_the_same_prompt_at_once_leave_one_copy() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    for name in "ab":
        scheduler.add(make_request(name, num_prompt=12, prompt="same", max_tokens=1))
    assert scheduled(run_step(scheduler)) == {"a": 12, "b": 12}
    assert scheduler.kv_cache.pool.num_cached == 3
    assert scheduler.kv_cache.pool.num_free == 64


def test_the_end_of_the_longest_unused_prefix_is_evicted_first() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=32)
    old, new = (make_request(name, num_prompt=12, max_tokens=1) for name in ("old", "new"))
    one_after_the_other(scheduler, old, new)
    assert scheduler.kv_cache.pool.num_cached == 6
    one_after_the_other(scheduler, make_request("big", num_prompt=11, max_tokens=2))
    again_old = make_request("again-old", num_prompt=12, prompt="old")
    again_new = make_request("again-new", num_prompt=12, prompt="new")
    assert len(scheduler.kv_cache.find_prefix(again_old)) == 2, "its last block went"
    assert len(scheduler.kv_cache.find_prefix(again_new)) == 2


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


def cancelled_prompt(scheduler: Scheduler) -> None:
    """A request of 12 prompt tokens is cancelled in its fourth block, which holds answer tokens."""
    scheduler.add(make_request("left", num_prompt=12, prompt="same", max_tokens=9))
    for _ in range(3):
        run_step(scheduler)
    end(scheduler, "left")
    scheduler.check_integrity()


def test_retained_the_prompt_of_a_cancelled_request_is_hit_later() -> None:
    scheduler = make_scheduler()
    cancelled_prompt(scheduler)
    counters = scheduler.counters
    assert (counters.reclaimed_freed, counters.reclaimed_retained) == (1, 3)
    assert counters.saved_tokens == 6
    assert scheduler.kv_cache.pool.num_free == 64, "retained is as good as free"
    for name in ("next", "after"):
        scheduler.add(make_request(name, num_prompt=12, prompt="same", max_tokens=1))
        run_step(scheduler)
    assert counters.retained_hits == 2, "each retained block is counted once"


def test_reclaimed_at_once_nothing_is_left_to_hit() -> None:
    scheduler = make_scheduler(reclaim="immediate")
    cancelled_prompt(scheduler)
    counters = scheduler.counters
    assert (counters.reclaimed_freed, counters.reclaimed_retained) == (4, 0)
    assert scheduler.kv_cache.pool.num_cached == 0
    finished = make_request("finished", num_prompt=12, prompt="same", max_tokens=1)
    one_after_the_other(scheduler, finished)
    assert scheduler.kv_cache.pool.num_cached == 3, "the policy is for cancelled requests"


def test_under_pressure_nothing_is_retained() -> None:
    scheduler = make_scheduler(num_blocks=16, force_reclaim_above=0.2)
    cancelled_prompt(scheduler)
    counters = scheduler.counters
    assert (counters.reclaimed_freed, counters.reclaimed_forced) == (1, 3)
    assert counters.reclaimed_retained == 0
    assert scheduler.kv_cache.pool.num_cached == 0


def test_immediate_reclaim_leaves_what_others_share() -> None:
    scheduler = make_scheduler(reclaim="immediate")
    for name in ("stays", "leaves"):
        scheduler.add(make_request(name, num_prompt=12, prompt="same"))
        run_step(scheduler)
    end(scheduler, "leaves")
    scheduler.check_integrity()
    again = make_request("again", num_prompt=12, prompt="same")
    assert len(scheduler.kv_cache.find_prefix(again)) == 2


def test_a_prefix_is_not_evicted_to_make_room_for_its_own_request() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    first = make_request("first", num_prompt=9, prompt="same", max_tokens=1)
    one_after_the_other(scheduler, first)
    assert scheduler.kv_cache.pool.num_cached == 2
    again = make_request("again", num_prompt=9, prompt="same", max_tokens=7)
    one_after_the_other(scheduler, again)
    assert again.num_generated == 7
    scheduler.check_integrity()


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8])
def test_a_prompt_of_whole_blocks_and_one_of_parts(num_prompt: int) -> None:
    scheduler = make_scheduler()
    requests = [make_request(n, num_prompt=num_prompt, prompt="p", max_tokens=6) for n in "ab"]
    one_after_the_other(scheduler, *requests)
    assert requests[1].num_cached_tokens == (num_prompt - 1) // 4 * 4
    assert requests[1].num_generated == 6
