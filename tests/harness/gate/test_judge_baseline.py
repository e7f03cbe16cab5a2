"""Verdicts against a baseline: what is held to it, and what cannot be compared with it."""

from typing import Any

import pytest

from harness.gate.baseline import limits_against_baseline
from harness.gate.judge import Measured, Verdict
from tests.harness.gate.judging import FAIL, OPEN, PASS, Rounds, judged, of_arms, wasting
from tests.made_up import gated


def build(values: Rounds, *, unit: str = "steps", **more: Any) -> Measured:
    name = "cancel_latency_s" if unit == "s" else "cancel_latency_steps"
    metric = gated.steps()
    metric.unit = unit
    rounds = {name: {"mean": list(values)}}
    one = gated.summary_of_arms({"build": gated.arm({name: metric}, rounds)})
    return gated.measured(one, ["build"], **more)


BEFORE = build([1.0, 1.02, 0.98])

LINE = "build / baseline: cancel_latency_steps.mean <= 1.1"

LINE_S = "build / baseline: cancel_latency_s.mean <= 1.1"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.01, 1.02], PASS),
        ([2.0, 2.1, 1.9], FAIL),
        ([1.0, 1.3, 0.9], OPEN),
        ([2.0, 2.1], OPEN),
    ],
)
def test_the_rounds_are_held_to_those_of_the_baseline(values: Rounds, expected: Verdict) -> None:
    found = judged(build(values), LINE, baseline=BEFORE)
    assert found.checks[1].verdict is expected
    assert found.baseline == "the-run"


def test_a_difference_to_the_baseline() -> None:
    line = "build - baseline: cancel_latency_steps.mean <= 0.5"
    assert judged(build([1.0, 1.1, 0.9]), line, baseline=BEFORE).verdict is PASS
    assert judged(build([2.0, 2.1, 1.9]), line, baseline=BEFORE).verdict is FAIL


ELSEWHERE: dict[str, Any] = {"hardware": {"cpu": "another", "cores": 64, "gpus": ["a GPU"]}}


def test_on_another_machine_steps_are_judged_and_times_are_not() -> None:
    steps = judged(build([2.0, 2.1, 1.9], **ELSEWHERE), LINE, baseline=BEFORE)
    assert steps.verdict is FAIL
    before_s = build([1.0, 1.02, 0.98], unit="s")
    found = judged(build([2.0, 2.1, 1.9], unit="s", **ELSEWHERE), LINE_S, baseline=before_s)
    assert found.verdict is OPEN
    assert "(a processor, 2 cores)" in found.checks[1].reason
    assert "(another, 64 cores, a GPU)" in found.checks[1].to_decide
    assert judged(build([2.0, 2.1, 1.9], unit="s"), LINE_S, baseline=before_s).verdict is FAIL


def test_another_demand_is_not_compared() -> None:
    other = gated.manifest(["build"])["workload"]
    other["run"]["users"] = 99
    found = judged(build([1.0] * 3, workload=other), LINE, baseline=BEFORE)
    assert found.verdict is OPEN
    assert found.checks[1].reason == (
        "not comparable: `run.users` of the baseline: 16; of this run: 99"
    )


def test_a_baseline_of_another_version_is_to_be_saved_again() -> None:
    older = gated.manifest(["build"])["workload"]
    del older["run"]["keep_alive"]
    found = judged(build([1.0] * 3), LINE, baseline=build([1.0] * 3, workload=older))
    assert found.verdict is OPEN
    why = "not comparable: the baseline does not know `run.keep_alive`: save the baseline again"
    assert found.checks[1].reason == why


def test_another_seed_and_more_rounds_are_the_same_demand() -> None:
    other = gated.manifest(["build"])["workload"]
    other["run"] |= {"seed": 99, "rounds": 9}
    assert judged(build([1.0] * 3, workload=other), LINE, baseline=BEFORE).verdict is PASS


def test_without_a_baseline_its_limits_are_open() -> None:
    found = judged(build([1.0] * 3), LINE)
    assert (found.verdict, found.checks[1].reason) == (OPEN, "there is no baseline")


def showing(*figures: str, values: Rounds = (1.0, 1.02, 0.98), **more: Any) -> Measured:
    """A build with these figures, in each of three rounds."""
    metrics, rounds = {}, {}
    for figure in figures:
        name, _, key = figure.partition(".")
        metrics[name] = gated.steps()
        metrics[name].unit = "s" if name.endswith("_s") else "steps"
        rounds[name] = {key: list(values)}
    one = gated.summary_of_arms({"build": gated.arm(metrics, rounds)})
    return gated.measured(one, ["build"], **more)


def test_without_a_limit_all_is_compared_that_the_baseline_has() -> None:
    blind = showing("slot_recovery_s.p50", "ttft_s.p50", "e2e_s.p50")
    limits, left_out = limits_against_baseline(blind, blind, 0.1)
    assert [one.text for one in limits] == [
        "build / baseline: slot_recovery_s.p50 <= 1.1",
        "build / baseline: ttft_s.p50 <= 1.1",
    ]
    assert left_out == []
    assert judged(blind, *limits, baseline=blind).verdict is PASS


@pytest.mark.parametrize("values", [(1.0, 1.0), (1.0, None, 1.0), (0.0, 1.0, 1.0), (-1.0, 1, 1)])
def test_what_has_no_ratio_in_the_baseline_is_not_compared(values: Rounds) -> None:
    limits, _ = limits_against_baseline(BEFORE, showing("ttft_s.p50", values=values), 0.1)
    assert "ttft_s" not in [one.metric for one in limits]


def test_a_baseline_that_has_nothing_of_an_arm_is_no_pass() -> None:
    for before in (showing("e2e_s.p50"), of_arms(wasting("other", [3.0] * 3, "usage"))):
        limits, _ = limits_against_baseline(BEFORE, before, 0.1)
        assert judged(BEFORE, *limits, baseline=before).verdict is OPEN


def test_times_of_another_machine_are_left_out_unless_there_is_nothing_else() -> None:
    here = showing("cancel_latency_steps.mean", "ttft_s.p50")
    elsewhere = showing("cancel_latency_steps.mean", "ttft_s.p50", **ELSEWHERE)
    limits, left_out = limits_against_baseline(elsewhere, here, 0.1)
    assert [one.metric for one in limits] == ["cancel_latency_steps"]
    assert left_out == ["build: ttft_s.p50"]
    assert judged(elsewhere, *limits, baseline=here).verdict is PASS
    times = showing("ttft_s.p50", **ELSEWHERE), showing("ttft_s.p50")
    limits, left_out = limits_against_baseline(*times, 0.1)
    assert ([one.metric for one in limits], left_out) == (["ttft_s"], [])
