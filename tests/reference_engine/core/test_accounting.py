"""Counts for each request and in total, and their agreement."""

from reference_engine.core.request import FinishReason, Phase, Request, Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from reference_engine.faults import Faults
from reference_engine.protocol import AddRequest, Ending
from tests.reference_engine.conftest import end, make_request, make_scheduler, run_step
from tests.reference_engine.worker.test_engine import Bench, abort


def preempt(scheduler: Scheduler, request: Request) -> None:
    scheduler._preempt(request, StepPlan(step=0))


def test_a_request_that_is_preempted_twice_pays_for_what_is_computed_again() -> None:
    scheduler = make_scheduler(
        enable_prefix_caching=False, max_num_batched_tokens=5, max_model_len=64
    )
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


def test_slot_steps_count_the_requests_of_each_step() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, max_tokens=2))
    run_step(scheduler)
    run_step(scheduler)
    assert (scheduler.counters.steps, scheduler.counters.slot_steps) == (2, 6)


def test_an_unread_prompt_is_counted() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("left", num_prompt=30))
    scheduler.add(make_request("read", num_prompt=30))
    run_step(scheduler)
    run_step(scheduler)
    end(scheduler, "left")
    assert scheduler.counters.unread_prompt_tokens == 16
    assert scheduler.counters.prompt_tokens == 0
    while scheduler.requests["read"].num_generated == 0:
        run_step(scheduler)
    end(scheduler, "read")
    assert scheduler.counters.unread_prompt_tokens == 16, "that one had a token"


def test_saved_tokens_end_at_the_context() -> None:
    scheduler = make_scheduler(max_model_len=20)
    scheduler.add(make_request("a", num_prompt=4, max_tokens=1000))
    run_step(scheduler)
    end(scheduler, "a")
    assert scheduler.counters.saved_tokens == 15


def aborted_while_preempted(reclaim: str) -> Scheduler:
    """A prompt of three full blocks, all cached when its request is cancelled in the queue."""
    scheduler = make_scheduler(reclaim=reclaim)
    request = make_request("left", num_prompt=12, prompt="same")
    scheduler.add(request)
    run_step(scheduler)
    preempt(scheduler, request)
    assert end(scheduler, "left") == 0, "it held nothing"
    scheduler.check_integrity()
    return scheduler


def test_the_reclaim_policy_also_holds_for_one_that_was_preempted() -> None:
    scheduler = aborted_while_preempted("immediate")
    assert scheduler.kv_cache.pool.num_cached == 0
    assert scheduler.counters.reclaimed_freed == 3

    scheduler = aborted_while_preempted("retain")
    assert scheduler.counters.reclaimed_retained == 3
    scheduler.add(make_request("next", num_prompt=12, prompt="same"))
    run_step(scheduler)
    assert scheduler.counters.retained_hits == 2


def test_a_request_that_never_ran_leaves_nothing_behind() -> None:
    scheduler = make_scheduler(max_num_seqs=1, reclaim="immediate")
    scheduler.add(make_request("first", num_prompt=12, prompt="same", max_tokens=1))
    run_step(scheduler)
    scheduler.add(make_request("running", num_prompt=4))
    scheduler.add(make_request("queued", num_prompt=12, prompt="same"))
    run_step(scheduler)
    end(scheduler, "queued")
    assert scheduler.kv_cache.pool.num_cached == 3, "what it would have found is another's"


def growing(name: str) -> AddRequest:
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    prompt = [5 + ord(name)] * 15
    return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def test_the_log_and_the_account_of_one_that_was_preempted_and_resumed() -> None:
    bench = Bench(Faults())
    bench.step(growing("a"), growing("b"))
    report = bench.step()
    while "preempted" not in bench.events("b"):
        report = bench.step()
    assert report.step is not None
    assert (report.step.num_running, report.step.num_waiting) == (1, 1)
    assert report.step.free_blocks == 8 - 5
    bench.step(abort("a"))
    assert bench.events("b")[:4] == ["admitted", "first_token", "preempted", "resumed"]
    report = bench.step()
    assert report.cached_blocks == 3, "the prompt of the one that was aborted"
    report = bench.step(abort("b"))
    ending = report.outputs[-1].ending
    assert ending == Ending(
        finish_reason=FinishReason.ABORT,
        phase=Phase.DECODE,
        num_cached_tokens=12,
        num_preemptions=1,
        num_recomputed_tokens=4,
    )


def test_the_fault_lose_abort_loses_some() -> None:
    bench = Bench(Faults(lose_abort=0.5), max_num_seqs=2)
    kept = 0
    for _ in range(40):
        bench.step(growing("a"))
        bench.step(abort("a"))
        kept += bench.scheduler.has_work
        bench.set_faults(Faults())
        bench.step(abort("a"))
        assert not bench.scheduler.has_work
        bench.set_faults(Faults(lose_abort=0.5))
    assert 10 <= kept <= 30
