"""How far apart two figures are: intervals against scipy and the literature, and who is better."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.analysis.figure import reading
from harness.compare.pairs import (
    FEWEST_REQUESTS,
    MOST_REQUESTS,
    Pair,
    Standing,
    compare_rounds,
    difference_ci95,
    is_certain,
    pair_of,
    ratio_ci95,
    shift_between,
    standing,
    wilson_ci95,
)
from harness.records import Difference, Metric
from harness.stats import Floats
from tests.harness.told import known

Rounds = list[float | None]

MINE: Rounds = [10.0, 30.0, 22.0, 15.0]
THEIRS: Rounds = [21.0, 55.0, 40.0, 36.0]


# Rounds.


def paired(mine: Rounds, theirs: Rounds) -> Difference:
    return compare_rounds("on", "off", mine, theirs, paired=True)


def by_scipy(mine: Floats, theirs: Floats, *, is_paired: bool) -> Any:
    if is_paired:
        return stats.ttest_rel(mine, theirs).confidence_interval(0.95)
    return stats.ttest_ind(mine, theirs, equal_var=False).confidence_interval(0.95)


@pytest.mark.parametrize("is_paired", [True, False])
def test_the_intervals_of_rounds_are_those_of_scipy(is_paired: bool) -> None:
    mine, theirs = np.array(MINE, dtype=float), np.array(THEIRS, dtype=float)
    found = compare_rounds("on", "off", MINE, THEIRS, paired=is_paired)
    expected = by_scipy(mine, theirs, is_paired=is_paired)
    assert found.difference == pytest.approx(float((mine - theirs).mean()))
    assert found.difference_ci95 == pytest.approx((expected.low, expected.high))
    expected = by_scipy(np.log(mine), np.log(theirs), is_paired=is_paired)
    assert found.ratio == pytest.approx(stats.gmean(mine / theirs))
    assert found.ratio_ci95 == pytest.approx((np.exp(expected.low), np.exp(expected.high)))
    assert (found.arm, found.reference, found.n, found.note) == ("on", "off", 4, None)


def test_rounds_are_paired_and_half_pairs_left_out() -> None:
    drifting = paired([1.0, 10.0, 100.0, 7.0], [2.0, 20.0, 200.0, None])
    assert drifting.n == 3
    assert drifting.ratio == pytest.approx(0.5)
    assert drifting.ratio_ci95 == pytest.approx((0.5, 0.5))  # what differs between rounds drops out
    assert drifting.note == "1 of 4 rounds have no value of both arms"


def test_separate_runs_may_differ_in_their_number_of_rounds() -> None:
    found = compare_rounds("new", "baseline", [2.0, 2.1, None, 1.9], [1.0, 1.0, 1.0], paired=False)
    assert found.difference == pytest.approx(1.0)
    assert (found.n, found.note) == (3, None)
    alike = compare_rounds("new", "baseline", [2.0] * 4, [1.0] * 3, paired=False)
    assert alike.difference_ci95 == (1.0, 1.0)
    nothing = paired([None, 1.0], [1.0, None])
    assert (nothing.n, nothing.difference) == (0, None)
    assert nothing.note == "no round has a value of both arms"


def test_two_rounds_have_no_interval() -> None:
    found = paired([1.0, 2.0], [2.0, 5.0])
    assert (found.difference, found.difference_ci95, found.ratio_ci95) == (-2.0, None, None)
    assert found.ratio == pytest.approx(np.sqrt(0.2))
    assert found.note == "not enough data for an interval: 2 of at least 3 rounds"
    assert not is_certain(found)


def test_a_zero_has_no_ratio_but_a_difference() -> None:
    found = paired([0.0, 0.0, 0.0], [3.0, 4.0, 5.0])
    assert (found.ratio, found.ratio_ci95, found.difference) == (None, None, -4.0)
    assert found.note == "not enough data for a ratio: a round has a value of zero, or below"
    assert is_certain(found)


# Single requests.

values = st.lists(st.integers(0, 40).map(float), min_size=FEWEST_REQUESTS, max_size=40)


@given(values, values)
def test_the_shift_is_the_median_difference_and_superiority_the_u_of_scipy(
    a: list[float], b: list[float]
) -> None:
    found = shift_between(np.array(a), np.array(b))
    assert found.shift == np.median([x - y for x in a for y in b])
    low, high = known(found.shift_ci95)
    assert low <= known(found.shift) <= high
    u = float(stats.mannwhitneyu(a, b).statistic)
    assert found.superiority == pytest.approx(u / (len(a) * len(b)))


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_the_interval_ends_where_the_test_of_scipy_stops_to_reject(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.exponential(1.0, 25) + 0.5, rng.exponential(1.0, 30)
    limits = known(shift_between(a, b).shift_ci95)
    width = limits[1] - limits[0]

    def p(shift: float) -> float:
        result = stats.mannwhitneyu(a - shift, b, method="asymptotic", use_continuity=False)
        return float(result.pvalue)

    for limit, outwards in ((limits[0], -1), (limits[1], 1)):
        assert p(limit - outwards * 0.02 * width) > 0.04
        assert p(limit + outwards * 0.02 * width) < 0.06


def test_large_samples_are_thinned_without_harm() -> None:
    """20,000 values each of one width give the shift within 1.96 * sqrt(pi / 3) * sqrt(2 / n)."""
    rng = np.random.default_rng(1)
    n = 10 * MOST_REQUESTS
    found = shift_between(rng.normal(2.0, 1.0, n), rng.normal(0.0, 1.0, n))
    assert found.shift == pytest.approx(2.0, abs=0.05)
    low, high = known(found.shift_ci95)
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(np.pi / 3) * np.sqrt(2 / n), rel=0.1)
    just_more = rng.lognormal(size=MOST_REQUESTS + 1)
    other = rng.lognormal(size=300)
    thinned, whole = shift_between(just_more, other), shift_between(just_more[:-1], other)
    assert thinned.shift == pytest.approx(whole.shift, rel=0.02)


@given(values, values, st.integers(0, 3), st.integers(0, 3))
def test_censored_values_have_the_largest_ranks(
    a: list[float], b: list[float], more: int, fewer: int
) -> None:
    """As if all of them were one value beyond the others, as far as that value does not matter."""
    beyond = 10_000.0
    found = shift_between(np.array(a + [np.inf] * more), np.array(b + [np.inf] * fewer))
    as_if = shift_between(np.array(a + [beyond] * more), np.array(b + [beyond] * fewer))
    assert (found.n_censored, found.n_reference_censored) == (more, fewer)
    assert found.superiority == as_if.superiority
    assert found.shift == (as_if.shift if abs(known(as_if.shift)) < 1000 else None)
    is_known = max(map(abs, known(as_if.shift_ci95))) < 1000
    assert found.shift_ci95 == (as_if.shift_ci95 if is_known else None)


def test_few_requests_have_no_shift() -> None:
    found = shift_between(np.arange(4.0), np.arange(9.0))
    assert found.shift is None
    assert found.note == "not enough data: 4 and 9 values, and at least 5 of each are needed"


# One figure of two runs.


def test_newcombes_example_of_two_rates() -> None:
    """56 of 70 against 48 of 80: 0.0524 to 0.3339 (Newcombe 1998, table II, method 10, row a)."""
    a, b = 56 / 70, 48 / 80
    found = difference_ci95(a, wilson_ci95(a, 70), b, wilson_ci95(b, 80))
    assert found == pytest.approx((0.0524, 0.3339), abs=5e-5)


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (0, 300), (3, 50), (29, 60), (50, 50)])
def test_the_interval_of_a_share_is_that_of_scipy(hits: int, n: int) -> None:
    expected = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert wilson_ci95(hits / n, n) == pytest.approx(tuple(expected), abs=1e-12)


def test_symmetric_intervals_add_as_the_root_of_their_squares() -> None:
    assert difference_ci95(5.0, (2.0, 8.0), 1.0, (-3.0, 5.0)) == pytest.approx((-1.0, 9.0))
    factor = 1.1 ** (2**0.5)  # of a ratio the same on logarithms: relative errors of 10 %
    found = ratio_ci95(20.0, (20 / 1.1, 22.0), 10.0, (10 / 1.1, 11.0))
    assert found == pytest.approx((2 / factor, 2 * factor))
    assert ratio_ci95(20.0, (0.0, 22.0), 10.0, (9.0, 11.0)) is None
    assert ratio_ci95(20.0, None, 10.0, (9.0, 11.0)) is None


def test_figures_that_are_not_compared_are_shown() -> None:
    one = Metric(unit="s", n=1, mean=1.0, p99=2.0, method="exact")
    other = msgspec.structs.replace(one, method="gauge")
    pair = pair_of("ttft_s", "mean", one, other)
    assert (pair.baseline, pair.candidate, pair.difference) == (1.0, 1.0, None)
    assert pair.note == "measured by exact and by gauge"
    assert standing(pair) == Standing.NOT_COMPARED
    censored = msgspec.structs.replace(one, p99=None)
    assert pair_of("ttft_s", "p99", one, censored).note == "not known of both"


# Which of two runs is better.


def latency(p50: float, half: float = 0.001) -> Metric:
    limits = (p50 - half, p50 + half)
    return Metric(unit="s", n=100, p50=p50, p50_ci95=limits, method="exact")


def share(mean: float) -> Metric:
    return Metric(unit="ratio", n=500, mean=mean, upper95=1.0, method="exact")


def blocks(mean: float) -> Metric:
    return reading("leaked_blocks", mean, method="gauge")


def pair(name: str, baseline: Metric, candidate: Metric, steps_s: tuple[float, float]) -> Pair:
    key = "p50" if baseline.p50 is not None else "mean"
    return pair_of(name, key, baseline, candidate, steps_s=steps_s)


@pytest.mark.parametrize(
    ("name", "baseline", "candidate", "steps_s", "found"),
    [
        ("cancel_latency_s", latency(0.020), latency(0.030), (0.02, 0.02), Standing.WORSE),
        ("cancel_latency_s", latency(0.030), latency(0.020), (0.02, 0.02), Standing.BETTER),
        ("cancel_latency_s", latency(0.020), latency(0.0205), (0.02, 0.02), Standing.UNSURE),
        ("removed_at_first_boundary", share(0.99), share(0.80), (1, 1), Standing.WORSE),
        ("removed_at_first_boundary", share(0.80), share(0.99), (1, 1), Standing.BETTER),
        ("ghost_rate", share(0.0), share(0.05), (1, 1), Standing.WORSE),
        ("slot_utilisation", share(0.2), share(0.9), (1, 1), Standing.NOT_JUDGED),
        # a count of an idle server is certain, other readings are not
        ("leaked_blocks", blocks(0), blocks(5), (1, 1), Standing.WORSE),
        ("leaked_blocks", blocks(0), blocks(0), (1, 1), Standing.UNSURE),
        ("throughput_tps", blocks(0), blocks(5), (1, 1), Standing.UNSURE),
        # twice as long, in steps that take twice as long: a slower machine is no worse server
        ("cancel_latency_s", latency(0.04), latency(0.08, 0.002), (0.02, 0.04), Standing.UNSURE),
        ("cancel_latency_s", latency(0.04), latency(0.08, 0.002), (0.02, 0.02), Standing.WORSE),
        # better as measured and in steps, worse in both, and better by one alone
        ("cancel_latency_s", latency(0.040), latency(0.030), (0.01, 0.02), Standing.BETTER),
        ("cancel_latency_s", latency(0.030), latency(0.040), (0.02, 0.01), Standing.WORSE),
        ("cancel_latency_s", latency(0.040), latency(0.030), (0.02, 0.01), Standing.UNSURE),
        # an interval that reaches down to nothing has no logarithm
        ("free_s", latency(0.001), latency(0.040), (0.01, 0.02), Standing.UNSURE),
    ],
)
def test_the_interval_and_the_direction_of_the_figure_decide(
    name: str, baseline: Metric, candidate: Metric, steps_s: tuple[float, float], found: Standing
) -> None:
    assert standing(pair(name, baseline, candidate, steps_s)) == found


@pytest.mark.parametrize("name", ["cancel_latency_s", "detect_s", "slot_refill_s", "ttft_s"])
@pytest.mark.parametrize("steps_waited", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("step_s", [0.005, 0.02, 0.2])
def test_an_identical_build_with_other_steps_is_neither_better_nor_worse(
    name: str, steps_waited: float, step_s: float
) -> None:
    """A latency of 1 ms and `steps_waited` steps, known as finely as one likes."""
    build = [latency(0.001 + steps_waited * of, half=1e-6) for of in (0.010, step_s)]
    assert standing(pair(name, build[0], build[1], (0.010, step_s))) == Standing.UNSURE
