"""The step loop that plans the next step while one is computed: what a step in flight changes.

The step is computed when the loop waits for it, so what comes meanwhile comes in its middle.
"""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from reference_engine.config import StepCost
from reference_engine.core.step import StepPlan
from reference_engine.faults import Faults
from reference_engine.model.runners import OutOfMemoryError, SimulatedRunner
from reference_engine.model.tokenizer import EOS_TOKEN_ID, FIRST_WORD, WordTokenizer
from reference_engine.protocol import Output, StepReport
from tests.reference_engine.stepped_engine import Bench, abort, add

AHEAD: dict[str, Any] = {"async_scheduling": True}


def outputs_of(bench: Bench, name: str) -> list[Output]:
    outputs = [output for report in bench.reports for output in report.outputs]
    return [output for output in outputs if output.request_id == name]


def events_of(report: StepReport) -> list[tuple[str, str, int]]:
    return [(event.request_id, event.event, event.step) for event in report.events]


def run_to_the_end(bench: Bench) -> None:
    while bench.engine.patience_s() == 0.0:
        bench.step()
        bench.check_integrity()


def test_a_step_is_reported_when_the_next_one_is_planned_and_a_length_costs_no_step() -> None:
    bench = Bench(**AHEAD)
    assert bench.step(add("a", max_tokens=3)).step is None, "it is computed"
    run_to_the_end(bench)
    steps = [report.step for report in bench.reports if report.step is not None]
    assert [(one.step, one.scheduled) for one in steps] == [
        (1, {"a": 6}),
        (2, {"a": 1}),
        (3, {"a": 1}),
    ]
    assert all(one.ended_ns == next_one.started_ns for one, next_one in pairwise(steps))
    assert [one.num_generated for one in outputs_of(bench, "a")] == [1, 2, 3, 3]
    assert bench.events("a") == ["admitted", "first_token", "removed", "blocks_freed", "finished"]
    assert bench.reports[-1].counters.generated_tokens == 3
    assert bench.reports[-1].free_blocks == 8


def test_an_abort_in_a_step_costs_the_planned_step_too_and_the_slot_is_refilled_after_it() -> None:
    bench = Bench(max_num_seqs=1, **AHEAD)
    bench.step(add("a"), add("b", word=6))
    bench.step()
    bench.runner.meanwhile = lambda: bench.hear(abort("a"))
    bench.step()  # step 2 is over, and step 3 has begun
    bench.runner.meanwhile = lambda: None
    report = bench.step()
    assert report.step is not None
    assert (report.step.step, report.step.sampled) == (3, {"a": 1})
    assert events_of(report) == [
        ("a", "abort_received", 4),
        ("a", "removed", 4),
        ("a", "finished", 4),
        ("a", "blocks_freed", 4),  # after step 3, which wrote to them
        ("b", "admitted", 4),
    ]
    removed, freed = report.events[1], report.events[3]
    assert removed.t_ns < report.step.ended_ns < freed.t_ns
    assert (removed.num_generated, freed.num_generated, freed.num_blocks) == (2, 3, 2)
    assert report.counters.generated_tokens == 3, "one of them is dropped"
    assert outputs_of(bench, "a")[-1].num_generated == 2
    run_to_the_end(bench)
    assert bench.reports[-1].counters.finished == {"abort": 1, "length": 1}


def end_of_sequence(bench: Bench) -> None:
    bench.runner.say_next(EOS_TOKEN_ID)


@pytest.mark.parametrize(
    ("stop", "prepare"),
    [((), end_of_sequence), ((WordTokenizer(2048).text_of(FIRST_WORD + 1),), lambda _: None)],
    ids=["end of sequence", "stop string"],
)
def test_an_end_that_no_plan_foresees_drops_the_token_of_the_planned_step(
    stop: tuple[str, ...], prepare: Callable[[Bench], None]
) -> None:
    bench = Bench(**AHEAD)
    bench.step(add("a", stop=stop, ignore_eos=False))
    bench.step()
    prepare(bench)
    report = bench.step()
    assert report.outputs[-1].finish_reason == "stop"
    assert bench.events("a")[-2:] == ["removed", "finished"]
    assert bench.engine.patience_s() == 0.0, "a step is in flight"
    report = bench.step()
    assert report.step is not None
    assert report.step.sampled == {"a": 1}
    assert bench.events("a")[-1] == "blocks_freed"
    assert [one.num_generated for one in outputs_of(bench, "a")] == [1, 2, 2]
    assert (report.counters.generated_tokens, report.free_blocks) == (3, 8)
    assert bench.engine.patience_s() is None


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_that_is_preempted_while_it_is_computed_keeps_its_token(preemption: str) -> None:
    bench = Bench(preemption=preemption, **AHEAD)
    bench.step(*(add(name, num_prompt=15, max_tokens=16, word=ord(name)) for name in "ab"))
    while "preempted" not in bench.events("b"):
        bench.step()
    num_known = bench.scheduler.requests["b"].num_generated
    assert outputs_of(bench, "b")[-1].num_generated == num_known
    assert bench.reports[-1].step is not None
    assert "b" in bench.reports[-1].step.sampled, "it was in flight"
    run_to_the_end(bench)
    assert [one.num_generated for one in outputs_of(bench, "b")] == [*range(1, 17), 16]
    steps = [report.step.scheduled for report in bench.reports if report.step is not None]
    again = [one["b"] for one in steps if "b" in one][-(16 - num_known)]
    assert again == 1 or preemption == "recompute", "what was in flight was copied, too"
    assert bench.reports[-1].free_blocks == 8


def test_out_of_memory_ends_the_requests_of_both_steps_and_of_no_other() -> None:
    bench = Bench(**AHEAD)

    def breaks(_: StepPlan | None) -> None:
        raise OutOfMemoryError("Tried to allocate 2.00 GiB")

    bench.step(add("a"))
    bench.hear(add("b"), add("waits"))
    bench.runner.breaks = breaks
    report = bench.step()
    ends = {one.request_id: one.finish_reason for one in report.outputs}
    assert ends == {"a": "error", "b": "error"}
    assert report.step is not None
    assert (report.step.step, report.step.sampled) == (1, {})
    bench.check_integrity()
    bench.runner.breaks = lambda _: None
    run_to_the_end(bench)
    steps = [report.step.step for report in bench.reports if report.step is not None]
    assert steps == list(range(1, len(steps) + 1)), "a plan that was dropped leaves no gap"
    assert bench.reports[-1].counters.finished == {"error": 2, "length": 1}


def answers(seed: int, faults: Faults, **settings: Any) -> dict[str, list[int]]:
    """The tokens of requests that come and are cancelled at random, in a pool that is too small."""
    bench, random = Bench(faults, max_num_seqs=3, **settings), Random(seed)
    runner = SimulatedRunner(StepCost(), sleep=lambda _: None)
    bench.engine._runner = runner
    for number in range(60):
        name, size = f"r{number}", random.randrange(1, 20)
        bench.hear(
            add(name, num_prompt=size, max_tokens=12, word=random.randrange(300, 303), seed=number)
        )
        if number % 5 == 0:
            bench.hear(abort(f"r{number // 2}"))
        for _ in range(random.randrange(4)):
            bench.step()
            bench.check_integrity()
    run_to_the_end(bench)
    assert bench.reports[-1].free_blocks == 8
    assert bench.reports[-1].counters.preemptions > 3
    names = {one.request_id for report in bench.reports for one in report.outputs}
    tokens = {name: [one.token_id for one in outputs_of(bench, name)] for name in names}
    return {name: [one for one in tokens[name] if one is not None] for name in names}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(3))
def test_the_answers_are_those_of_the_engine_that_plans_step_by_step(
    seed: int, preemption: str
) -> None:
    settings = {"preemption": preemption, "reserve_full_isl": False}
    ahead = answers(seed, Faults(), **settings, **AHEAD)
    in_turn = answers(seed, Faults(), **settings)
    assert sum(map(len, ahead.values())) > 400
    for name in ahead.keys() & in_turn.keys():  # one that was cancelled may have fewer
        num_both = min(len(ahead[name]), len(in_turn[name]))
        assert ahead[name][:num_both] == in_turn[name][:num_both]
    whole = [name for name, tokens in in_turn.items() if len(tokens) == 12]
    assert all(ahead[name] == in_turn[name] for name in whole if len(ahead[name]) == 12)
    assert len(whole) > 30
