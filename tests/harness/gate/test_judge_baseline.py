"""Verdicts against a baseline: what is held to it, and what cannot be compared with it."""

from typing import Any

import pytest

from harness.gate.baseline import limits_against_baseline
from harness.gate.judge import GateVerdict, Measured
from tests.harness.gate.judging import FAIL, OPEN, PASS, Rounds, judged, of_arms, wasting
from tests.made_up import gated


def showing(*figures: str, values: Rounds = (1.0, 1.02, 0.98), **more: Any) -> Measured:
    """A build with these figures, which had these values in each round."""
    metrics, rounds = {}, {}
    for figure in figures:
        name, _, key = figure.partition(".")
        metrics[name] = gated.steps()
        metrics[name].unit = "s" if name.endswith("_s") else "steps"
        rounds[name] = {key: list(values)}
    one = gated.summary_of_arms({"build": gated.arm(metrics, rounds)})
    return gated.measured(one, ["build"], **more)


def build(values: Rounds, *, unit: str = "steps", **more: Any) -> Measured:
    return showing(f"cancel_latency_{unit}.mean", values=values, **more)


BEFORE = build([1.0, 1.02, 0.98])
LINE = "build / baseline: cancel_latency_steps.mean <= 1.1"
LINE_S = "build / baseline: cancel_latency_s.mean <= 1.1"
DIFFERENCE = "build - baseline: cancel_latency_steps.mean <= 0.5"


@pytest.mark.parametrize(
    ("line", "values", "expected"),
    [
        (LINE, [1.0, 1.01, 1.02], PASS),
        (LINE, [2.0, 2.1, 1.9], FAIL),
        (LINE, [1.0, 1.3, 0.9], OPEN),
        (LINE, [2.0, 2.1], OPEN),
        (DIFFERENCE, [1.0, 1.1, 0.9], PASS),
        (DIFFERENCE, [2.0, 2.1, 1.9], FAIL),
    ],
)
def test_rounds_are_held_to_those_of_the_baseline(
    line: str, values: Rounds, expected: GateVerdict
) -> None:
    found = judged(build(values), line, baseline=BEFORE)
    assert found.checks[1].verdict is expected
    assert found.baseline == "the-run"
    without = judged(build(values), line)
    assert (without.verdict, without.checks[1].reason) == (OPEN, "there is no baseline")


ELSEWHERE: dict[str, Any] = {"hardware": {"cpu": "another", "cores": 64, "gpus": ["a GPU"]}}


def test_on_another_machine_steps_are_judged_and_times_are_not() -> None:
    values = [2.0, 2.1, 1.9]
    assert judged(build(values, **ELSEWHERE), LINE, baseline=BEFORE).verdict is FAIL
    before_s = build([1.0, 1.02, 0.98], unit="s")
    found = judged(build(values, unit="s", **ELSEWHERE), LINE_S, baseline=before_s)
    assert found.verdict is OPEN
    assert "(a processor, 2 cores)" in found.checks[1].reason
    assert "(another, 64 cores, a GPU)" in found.checks[1].to_decide
    assert judged(build(values, unit="s"), LINE_S, baseline=before_s).verdict is FAIL


def demanding(**run: Any) -> dict[str, Any]:
    """A workload with other keys of [run]; without a key if that is None."""
    workload = gated.manifest(["build"])["workload"]
    settings = {key: value for key, value in (workload["run"] | run).items() if value is not None}
    return {"workload": workload | {"run": settings}}


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        ({"users": 99}, {}, "`run.users` of the baseline: 16; of this run: 99"),
        (
            {},
            {"keep_alive": None},
            "the baseline does not know `run.keep_alive`: save the baseline again",
        ),
        ({"seed": 99, "rounds": 9}, {}, None),
    ],
)
def test_another_demand_is_not_compared(
    mine: dict[str, Any], theirs: dict[str, Any], why: str | None
) -> None:
    before = build([1.0] * 3, **demanding(**theirs))
    found = judged(build([1.0] * 3, **demanding(**mine)), LINE, baseline=before)
    assert found.verdict is (PASS if why is None else OPEN)
    assert why is None or found.checks[1].reason == f"not comparable: {why}"


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
    times = showing("ttft_s.p50", **ELSEWHERE), showing("ttft_s.p50")
    limits, left_out = limits_against_baseline(*times, 0.1)
    assert ([one.metric for one in limits], left_out) == (["ttft_s"], [])
