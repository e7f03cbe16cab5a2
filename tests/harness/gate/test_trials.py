"""When a row of the gate's trials is as it should be."""

from collections import Counter

import pytest

from harness.gate.judge import Verdict
from tests.gate_trials.__main__ import Row
from tests.gate_trials.cases import CLEAN, FAULTY, Case


@pytest.mark.parametrize(
    ("case", "verdicts", "is_right"),
    [
        (CLEAN, {Verdict.PASS: 99, Verdict.FAIL: 1}, True),
        (CLEAN, {Verdict.PASS: 98, Verdict.FAIL: 2}, False),
        (CLEAN, {Verdict.PASS: 90, Verdict.CANNOT_DECIDE: 10}, True),
        (CLEAN, {Verdict.PASS: 89, Verdict.CANNOT_DECIDE: 11}, False),
        (FAULTY[0], {Verdict.FAIL: 20}, True),
        (FAULTY[0], {Verdict.FAIL: 19, Verdict.CANNOT_DECIDE: 1}, False),
    ],
)
def test_good_builds_pass_and_bad_ones_fail(
    case: Case, verdicts: dict[Verdict, int], is_right: bool
) -> None:
    assert Row(case=case, verdicts=Counter(verdicts), made_again=0).is_right is is_right
