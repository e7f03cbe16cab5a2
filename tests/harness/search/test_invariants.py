"""What must hold at rest: how long answers that were left may hold slots by themselves."""

import pytest

from harness.experiments.patience import SLOWER
from harness.search.invariants import longest_run_s


@pytest.mark.parametrize(
    ("left", "slots", "steps"),
    [
        ([], 4, 0),
        ([100], 4, 125),
        ([100] * 8, 4, 300),
        ([10, 10, 10, 400], 2, 615),
    ],
)
def test_answers_that_find_no_slot_run_after_those_that_have_one(
    left: list[int], slots: int, steps: int
) -> None:
    longest_s = longest_run_s(left, slots=slots, step_s=0.01, ttft_s=0.0)
    assert longest_s == pytest.approx(SLOWER * steps * 0.01)
    turns = -(-len(left) // slots)
    with_prompts_s = longest_run_s(left, slots=slots, step_s=0.01, ttft_s=2.0)
    assert with_prompts_s - longest_s == pytest.approx(SLOWER * turns * 2.0)
