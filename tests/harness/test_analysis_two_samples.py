"""Differences between samples against scipy; the steady window; how many values are enough."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.analysis.figure import Sample, describe
from harness.analysis.load_side import truncation
from harness.analysis.paired import FEWEST, shift_between
from harness.analysis.stats import (
    fewest_for_quantile,
    fewest_for_rate_below,
    kaplan_meier,
    quantile_ci95,
    rate_upper95,
    ratio_ci95,
)

values = st.lists(st.integers(0, 40).map(float), min_size=FEWEST, max_size=40)


@given(values, values)
def test_superiority_is_the_u_statistic_of_scipy(a: list[float], b: list[float]) -> None:
    u = float(stats.mannwhitneyu(a, b).statistic)
    found = shift_between(np.array(a), np.array(b))
    assert found.superiority == pytest.approx(u / (len(a) * len(b)))


@given(values, values)
def test_the_shift_is_the_median_difference_and_lies_in_its_interval(
    a: list[float], b: list[float]
) -> None:
    found = shift_between(np.array(a), np.array(b))
    assert found.shift == np.median([x - y for x in a for y in b])
    assert found.shift is not None
    assert found.shift_ci95 is not None
    assert found.shift_ci95[0] <= found.shift <= found.shift_ci95[1]


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_the_interval_ends_where_the_test_of_scipy_stops_to_reject(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.exponential(1.0, 25) + 0.5, rng.exponential(1.0, 30)
    limits = shift_between(a, b).shift_ci95
    assert limits is not None
    width = limits[1] - limits[0]

    def p(shift: float) -> float:
        result = stats.mannwhitneyu(a - shift, b, method="asymptotic", use_continuity=False)
        return float(result.pvalue)

    for limit, outwards in ((limits[0], -1), (limits[1], 1)):
        assert p(limit - outwards * 0.02 * width) > 0.04
        assert p(limit + outwards * 0.02 * width) < 0.06


def test_the_interval_holds_the_true_shift_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        limits = shift_between(rng.lognormal(size=30) + 1.0, rng.lognormal(size=40)).shift_ci95
        assert limits is not None
        hits += limits[0] <= 1.0 <= limits[1]
    assert 0.92 <= hits / 400 <= 0.98


def test_of_large_samples_the_interval_is_as_narrow_as_it_can_be() -> None:
    """20,000 values each of one width give the shift within 1.96 * sqrt(pi / 3) * sqrt(2 / n)."""
    rng = np.random.default_rng(1)
    n = 20_000
    found = shift_between(rng.normal(2.0, 1.0, n), rng.normal(0.0, 1.0, n))
    assert found.shift == pytest.approx(2.0, abs=0.05)
    assert found.shift_ci95 is not None
    due = 2 * 1.96 * np.sqrt(np.pi / 3) * np.sqrt(2 / n)
    assert found.shift_ci95[1] - found.shift_ci95[0] == pytest.approx(due, rel=0.1)


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
    assert as_if.shift is not None
    assert as_if.shift_ci95 is not None
    assert found.shift == (as_if.shift if abs(as_if.shift) < 1000 else None)
    is_known = max(map(abs, as_if.shift_ci95)) < 1000
    assert found.shift_ci95 == (as_if.shift_ci95 if is_known else None)


def test_too_few_values_are_said_to_be() -> None:
    found = shift_between(np.arange(4.0), np.arange(9.0))
    assert found.shift is None
    assert found.note == "not enough data: 4 and 9 values, and at least 5 of each are needed"


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 0.99])
def test_so_many_give_a_quantile_an_interval_and_one_fewer_does_not(share: float) -> None:
    n = fewest_for_quantile(share)

    def has_interval(count: int) -> bool:
        curve = kaplan_meier(np.arange(float(count)), np.zeros(count, dtype=bool))
        return quantile_ci95(curve, share) is not None

    assert has_interval(n)
    assert not has_interval(n - 1)


@pytest.mark.parametrize(("rate", "n"), [(0.01, 299), (0.001, 2995), (0.05, 59)])
def test_so_many_without_a_hit_bound_a_rate_and_one_fewer_does_not(rate: float, n: int) -> None:
    assert fewest_for_rate_below(rate) == n
    assert rate_upper95(0, n) <= rate < rate_upper95(0, n - 1)


def test_a_figure_says_what_it_lacks() -> None:
    few = describe(Sample(values=np.arange(20.0)), unit="s", method="client")
    assert few.needs == {"p99_ci95": fewest_for_quantile(0.99)}
    enough = describe(Sample(values=np.arange(400.0)), unit="s", method="client")
    assert enough.needs == {}


def test_the_interval_of_a_ratio_is_that_of_a_bootstrap_over_blocks() -> None:
    rng = np.random.default_rng(3)
    counts = rng.integers(5, 30, 200)
    sums = counts * 0.02 + rng.normal(0.0, 0.02, 200)
    limits = ratio_ci95(sums, counts)
    boot = stats.bootstrap(
        (sums, counts.astype(float)),
        lambda s, c, axis: s.sum(axis=axis) / c.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(4),
    ).confidence_interval
    assert limits == pytest.approx((boot.low, boot.high), rel=0.01)


def test_the_warm_up_is_cut_off_where_it_ends() -> None:
    rng = np.random.default_rng(5)
    series = np.concatenate([np.linspace(0.0, 10.0, 8), np.full(32, 10.0)])
    noisy = series + rng.normal(0.0, 0.3, 40)
    cut, is_steady = truncation(noisy)
    assert is_steady
    assert cut >= 6
    assert noisy[cut:].mean() == pytest.approx(10.0, abs=0.2)


def test_what_changes_to_the_end_is_not_steady() -> None:
    assert truncation(np.linspace(0.0, 10.0, 40))[1] is False


def test_what_is_even_loses_little() -> None:
    cut, is_steady = truncation(np.random.default_rng(6).normal(10.0, 0.3, 40))
    assert is_steady
    assert cut <= 12
