"""The figures of full slots; the experiments on real servers are in tests/truth."""

from statistics import median

import pytest

from harness.experiments.full_slots import latest_gaps


def test_tokens_that_a_busy_client_read_in_one_piece_are_no_step_of_nothing() -> None:
    step_ns = 10_000_000
    in_threes = [step_ns * (n // 3 * 3) for n in range(300)]
    assert median(latest_gaps(in_threes)) == pytest.approx(0.01, rel=0.3)
    times = [step_ns * n for n in range(8)]  # a stream that has just begun
    assert latest_gaps(times) == pytest.approx([0.01] * 4)
