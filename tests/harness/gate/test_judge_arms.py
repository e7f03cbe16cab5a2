"""Verdicts on two arms: compared round by round, where they are measured and counted alike."""

from collections.abc import Mapping
from typing import Any

import pytest

from harness.gate.judge import Measured
from tests.harness.gate.judging import FAIL, OPEN, PASS, Rounds, judged
from tests.made_up import gated


def two(old: Rounds, new: Rounds, **more: Any) -> Measured:
    metric = gated.steps(**more)
    arms = {
        "old": gated.arm({"cancel_latency_steps": gated.steps()}, _rounds(old)),
        "new": gated.arm({"cancel_latency_steps": metric}, _rounds(new)),
    }
    return gated.measured(gated.summary_of_arms(arms), ["old", "new"])


def _rounds(values: Rounds) -> Mapping[str, Mapping[str, Rounds]]:
    return {"cancel_latency_steps": {"mean": list(values)}}


DIFFERENCE = "new - old: cancel_latency_steps.mean <= 0.5"

RATIO = "new / old: cancel_latency_steps.mean <= 1.25"


@pytest.mark.parametrize("line", [DIFFERENCE, RATIO])
def test_arms_are_compared_round_by_round(line: str) -> None:
    old = [1.0, 2.0, 4.0]  # the rounds differ much, the arms in each of them hardly
    assert judged(two(old, [1.01, 2.03, 4.02]), line).verdict is PASS
    assert judged(two(old, [2.0, 4.0, 8.0]), RATIO).verdict is FAIL
    assert judged(two(old, [2.0, 3.01, 5.0]), DIFFERENCE).verdict is FAIL
    assert judged(two(old, [1.0, 4.0, 3.0]), line).verdict is OPEN


def test_two_rounds_decide_nothing() -> None:
    found = judged(two([1.0, 1.0], [9.0, 9.0]), DIFFERENCE)
    assert found.verdict is OPEN
    assert "at least 3 rounds" in found.checks[1].to_decide


def test_nothing_in_either_arm_is_no_change() -> None:
    assert judged(two([0.0] * 3, [0.0] * 3), RATIO).verdict is PASS
    found = judged(two([0.0] * 3, [1.0, 2.0, 1.0]), RATIO)
    assert found.verdict is OPEN
    assert found.checks[1].to_decide == "a limit on the difference: `new - old: ...`"
