"""Steps that are out of memory, and a device that fails, in the step loop with a made-up model."""

from collections.abc import Callable

import pytest

from reference_engine.core.request import FinishReason
from reference_engine.core.step import StepPlan
from reference_engine.model.runners import DeviceFailedError, OutOfMemoryError
from reference_engine.protocol import OUT_OF_MEMORY, RequestEvent
from tests.reference_engine.stepped_engine import Bench, abort, add

ENDED = [("removed", OUT_OF_MEMORY), ("blocks_freed", OUT_OF_MEMORY), ("finished", "error")]
A_STEP, AN_EXPORT = (lambda plan: plan is not None), (lambda plan: plan is None)


def run_out_of_memory(bench: Bench, when: Callable[[StepPlan | None], object] = A_STEP) -> None:
    def breaks(plan: StepPlan | None) -> None:
        if when(plan):
            raise OutOfMemoryError("Tried to allocate 2.00 GiB")

    bench.runner.breaks = breaks


def recover(bench: Bench) -> None:
    bench.runner.breaks = lambda _: None


def events_of(bench: Bench, request_id: str) -> list[RequestEvent]:
    events = [event for report in bench.reports for event in report.events]
    return [event for event in events if event.request_id == request_id]


def reasons(bench: Bench, request_id: str) -> list[tuple[str, str | None]]:
    return [(event.event, event.reason) for event in events_of(bench, request_id)]


def endings(bench: Bench) -> dict[str, str]:
    outputs = [output for report in bench.reports for output in report.outputs]
    return {one.request_id: one.ending.finish_reason for one in outputs if one.ending is not None}


def fill_memory_with(bench: Bench, *names: str) -> None:
    """Two requests that fill all eight blocks, and need more of them a little later."""
    bench.step(*(add(name, num_prompt=15, max_tokens=16, word=ord(name)) for name in names))


def test_out_of_memory_is_the_end_of_that_steps_requests_and_of_no_other() -> None:
    bench = Bench()
    bench.step(add("a"), add("b"), add("waits"))
    run_out_of_memory(bench)
    report = bench.step()
    for name in "ab":
        assert reasons(bench, name)[-3:] == ENDED
        assert {event.step for event in events_of(bench, name)[-3:]} == {2}
        assert [event.num_blocks for event in events_of(bench, name)[-3:]] == [2, 2, 0]
    for output in report.outputs:
        assert (output.token_id, output.num_generated) == (None, 1)
        assert output.ending is not None
        assert output.ending.stop_reason == OUT_OF_MEMORY
    assert report.counters.finished == {"error": 2}
    assert (report.num_running, report.num_waiting, report.free_blocks) == (0, 1, 8)
    assert bench.said == [
        "step 2 was out of memory and has ended 2 of its requests: Tried to allocate 2.00 GiB; "
        "lower --max-num-batched-tokens, --max-num-seqs or --num-blocks"
    ]
    bench.check_integrity()
    recover(bench)
    bench.step(add("later"))
    while bench.scheduler.has_work:
        bench.step()
        bench.check_integrity()
    assert endings(bench) == {"a": "error", "b": "error", "waits": "length", "later": "length"}
    assert not any(name in bench.requests_of("frontend-0") for name in "ab")


def test_a_step_that_was_out_of_memory_has_its_number_its_time_and_no_tokens() -> None:
    bench = Bench()
    bench.step(add("a", num_prompt=6), add("waits"))
    run_out_of_memory(bench)
    failed = bench.step(add("b")).step
    recover(bench)
    following = bench.step(add("c")).step
    assert failed is not None
    assert following is not None
    assert (failed.step, following.step) == (2, 3)
    assert (failed.scheduled, failed.sampled) == ({"a": 1, "waits": 1}, {})
    assert failed.started_ns < failed.ended_ns < following.started_ns
    removed = [event.t_ns for event in events_of(bench, "a") if event.event == "removed"]
    assert removed[0] > failed.ended_ns
    counters = bench.reports[-1].counters
    records = [report.step for report in bench.reports if report.step is not None]
    assert counters.slot_steps == sum(len(one.scheduled) for one in records)
    assert counters.generated_tokens == sum(len(one.sampled) for one in records)


def test_of_a_prompt_in_chunks_only_those_before_are_found_by_a_later_request() -> None:
    bench = Bench(max_num_batched_tokens=8)
    assert bench.step(add("a", num_prompt=24)).num_running == 1
    run_out_of_memory(bench)
    bench.step(abort("never existed"))
    recover(bench)
    record = bench.step(add("b", num_prompt=24)).step
    assert record is not None
    assert record.free_blocks == 8 - 4, "two blocks were found, and two are new"
    assert bench.scheduler.requests["b"].num_cached_tokens == 8
    bench.check_integrity()


def test_a_request_that_was_swapped_out_for_such_a_step_computes_its_tokens_again() -> None:
    bench = Bench(preemption="swap")
    fill_memory_with(bench, "a", "b")
    run_out_of_memory(bench, lambda plan: plan is not None and plan.swap_out)
    while "preempted" not in bench.events("b"):
        bench.step()
    assert endings(bench) == {"a": "error"}
    assert bench.reports[-1].host_blocks == 0
    bench.check_integrity()
    while bench.scheduler.has_work:
        bench.step()
        bench.check_integrity()
    assert ("resumed", None) in reasons(bench, "b")
    [ending] = [o.ending for o in bench.reports[-1].outputs if o.ending is not None]
    assert (ending.finish_reason, ending.num_recomputed_tokens) == (FinishReason.LENGTH, 4)
    assert bench.reports[-1].counters.swapped_in_requests == 0


def test_what_such_a_step_was_to_copy_back_is_no_prefix_of_a_later_request() -> None:
    bench = Bench(preemption="swap")
    fill_memory_with(bench, "a", "b")
    run_out_of_memory(bench, lambda plan: plan is not None and plan.swap_in)
    while not bench.events("b").count("resumed"):
        bench.step()
    assert endings(bench) == {"a": "length", "b": "error"}
    assert (bench.reports[-1].host_blocks, bench.reports[-1].free_blocks) == (0, 8)
    bench.check_integrity()
    recover(bench)
    record = bench.step(add("again", num_prompt=15, word=ord("b"))).step
    assert record is not None
    assert record.scheduled == {"again": 15}


def test_a_device_that_is_always_out_of_memory_ends_all_requests_and_the_loop_waits() -> None:
    bench = Bench()
    run_out_of_memory(bench)
    bench.step(*(add(f"{number}") for number in range(6)))
    while bench.engine.patience_s() == 0.0:
        assert len(bench.reports) < 3
        bench.step()
    assert bench.engine.patience_s() is None
    assert set(endings(bench).values()) == {"error"}
    assert bench.reports[-1].counters.steps == 3


def test_blocks_that_cannot_be_handed_over_for_want_of_memory_are_freed() -> None:
    bench = Bench(component="prefill")
    run_out_of_memory(bench, AN_EXPORT)
    report = bench.step(add("a"), add("b"))
    assert not bench.left
    assert endings(bench) == {"a": "error", "b": "error"}
    assert report.outputs[0].token_id is not None, "its first token goes before its end"
    assert report.free_blocks == 8
    assert "handed_over" not in bench.events("a")
    bench.check_integrity()
    recover(bench)
    bench.step(add("c"))
    assert [leaving.request.request_id for leaving in bench.left] == ["c"]


def test_a_device_that_fails_ends_the_loop_after_a_last_report_of_all_requests() -> None:
    bench = Bench()
    bench.step(add("a", max_tokens=8))
    bench.hear(add("b"), add("c"), of="frontend-1")

    def breaks(_: StepPlan | None) -> None:
        raise DeviceFailedError("an illegal memory access was encountered")

    bench.runner.breaks = breaks
    with pytest.raises(DeviceFailedError, match="illegal"):
        bench.step()
    report, ends = bench.reports[-1], ["removed", "blocks_freed", "finished"]
    assert (report.step, report.num_running, report.free_blocks) == (None, 0, 8)
    assert bench.events("a") == ["admitted", "first_token", *ends]
    assert bench.events("b") == ["admitted", *ends]
    assert bench.events("c") == ends, "it was waiting"
    assert ("removed", "device_failed") in reasons(bench, "c")
    numbers = {frontend: len(share.outputs) for frontend, share in bench.shares.items()}
    assert numbers == {"frontend-0": 1, "frontend-1": 2}
