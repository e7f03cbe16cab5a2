"""A figure of two runs: the interval of their difference, and what of it is the step time."""

import numpy as np
import pytest

from harness.analysis.compare import difference_ci95, pair_of, wilson_ci95
from harness.analysis.figure import Sample, describe, rate, reading
from harness.records import Metric


def times(*values: float, method: str = "exact") -> Metric:
    return describe(Sample(values=np.array(values)), unit="s", method=method)


def test_newcombes_example_of_two_rates() -> None:
    """56 of 70 against 48 of 80: 0.0524 to 0.3339 (Newcombe 1998, table II, method 10, row a)."""
    a, b = 56 / 70, 48 / 80
    found = difference_ci95(a, wilson_ci95(a, 70), b, wilson_ci95(b, 80))
    assert found == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_of_symmetric_intervals_it_is_the_root_of_their_squares() -> None:
    assert difference_ci95(5.0, (2.0, 8.0), 1.0, (-3.0, 5.0)) == pytest.approx((-1.0, 9.0))


def test_how_often_the_interval_holds_the_true_difference() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        a, b = times(*rng.exponential(2.0, 80)), times(*rng.exponential(1.0, 80))
        limits = pair_of("ttft_s", "mean", b, a).difference_ci95
        assert limits is not None
        hits += limits[0] <= 1.0 <= limits[1]
    assert 273 <= hits <= 296


def test_without_an_interval_of_both_there_is_none_of_the_difference() -> None:
    pair = pair_of(
        "leaked_slots", "mean", *(reading(n, unit="slots", method="gauge") for n in (1, 3))
    )
    assert (pair.difference, pair.difference_ci95, pair.ratio) == (2.0, None, 3.0)


def test_a_rate_of_nothing_has_an_interval_and_no_ratio() -> None:
    pair = pair_of(
        "ghost_rate", "mean", rate(0, 100, method="exact"), rate(20, 100, method="exact")
    )
    assert pair.difference == pytest.approx(0.2)
    assert pair.ratio is None
    assert pair.difference_ci95 is not None
    assert pair.difference_ci95[0] > 0


def test_twice_the_time_in_steps_twice_as_long_is_the_same_number_of_steps() -> None:
    first, second = times(0.01, 0.02, 0.03), times(0.02, 0.04, 0.06)
    pair = pair_of("cancel_latency_s", "p50", first, second, steps_s=(0.02, 0.04))
    assert pair.ratio == pytest.approx(2.0)
    assert pair.ratio_in_steps == pytest.approx(1.0)
    unknown = pair_of("cancel_latency_s", "p50", first, second, steps_s=(None, 0.04))
    assert unknown.ratio_in_steps is None


def test_figures_of_different_kinds_are_shown_and_not_compared() -> None:
    pair = pair_of("ttft_s", "mean", times(1.0), times(2.0, method="gauge"))
    assert (pair.baseline, pair.candidate, pair.difference) == (1.0, 2.0, None)
    assert pair.note == "measured by exact and by gauge"


def test_what_lies_among_the_censored_is_not_compared() -> None:
    ghosts = describe(
        Sample(values=np.array([0.1, 2.0]), censored=np.array([False, True])),
        unit="s",
        method="exact",
    )
    assert pair_of("ttft_s", "p99", times(0.1, 0.2), ghosts).note == "not known of both"
