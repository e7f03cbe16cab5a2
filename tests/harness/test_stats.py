"""Statistics of censored samples, and the distributions that they need."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.analysis.figure import NotMeasurable, Sample, describe, sampled
from harness.intervals import rate_interval, rate_lower95, rate_upper95, t_quantile
from harness.stats import (
    Curve,
    binomial_quantile,
    clustered_mean_ci95,
    curve_at,
    kaplan_meier,
    mean_ci95,
    quantile,
    quantile_ci95,
)


def curve(values: list[float], censored: list[bool] | None = None) -> Curve:
    return kaplan_meier(np.array(values, dtype=float), np.array(censored or [False] * len(values)))


observations = st.lists(
    st.tuples(st.integers(0, 30).map(float), st.booleans()), min_size=1, max_size=60
)


@given(observations)
def test_the_curve_is_that_of_scipy(sample: list[tuple[float, bool]]) -> None:
    values = np.array([value for value, _ in sample])
    censored = np.array([is_censored for _, is_censored in sample])
    expected = stats.ecdf(stats.CensoredData.right_censored(values, censored)).cdf
    ours = kaplan_meier(values, censored)
    last_of_each = np.searchsorted(ours.times, expected.quantiles, side="right") - 1
    np.testing.assert_allclose(ours.done[last_of_each], expected.probabilities, atol=1e-12)


@given(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=80), st.integers(1, 99))
def test_quantiles_without_censoring_are_order_statistics(
    values: list[float], percent: int
) -> None:
    expected = np.quantile(values, percent / 100, method="inverted_cdf")
    assert quantile(curve(values), percent / 100) == expected


@settings(deadline=None)  # what a busy machine takes for it says nothing
@given(observations)
def test_quantiles_that_were_asked_for_need_no_whole_curve(
    sample: list[tuple[float, bool]],
) -> None:
    values = np.array([value for value, _ in sample])
    censored = np.array([is_censored for _, is_censored in sample])
    whole, asked = kaplan_meier(values, censored), curve_at(values, censored, [0.5, 0.99])
    assert asked.times[-1] == whole.times[-1]
    for share in (0.5, 0.99):
        assert quantile(asked, share) == quantile(whole, share)
        assert quantile_ci95(asked, share) == quantile_ci95(whole, share)


HUNDRED = [float(i) for i in range(1, 101)]


@pytest.mark.parametrize(
    ("values", "censored", "share", "interval"),
    [
        (HUNDRED, None, 0.5, (40.0, 61.0)),
        (HUNDRED, None, 0.99, None),  # would end at the 101st
        (HUNDRED[:5], None, 0.5, None),
        (HUNDRED, [i >= 80 for i in range(100)], 0.5, (40.0, 61.0)),
        (HUNDRED, [i >= 55 for i in range(100)], 0.5, None),
        # Values censored before the quantile make the sample no larger.
        ([0.5] * 100 + HUNDRED, [i < 100 for i in range(200)], 0.5, (40.0, 61.0)),
    ],
)
def test_the_interval_of_a_quantile(
    values: list[float],
    censored: list[bool] | None,
    share: float,
    interval: tuple[float, float] | None,
) -> None:
    assert quantile_ci95(curve(values, censored), share) == interval


def test_the_median_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        truth = rng.exponential(size=60)
        limits = rng.exponential(scale=4.0, size=60)  # a fifth is censored, at any time
        interval = quantile_ci95(kaplan_meier(np.minimum(truth, limits), truth > limits), 0.5)
        assert interval is not None
        covered += interval[0] <= np.log(2) <= interval[1]
    assert covered >= 372  # 93 %: two standard errors below 95 %


def test_mean_interval_is_students() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_ci95(values) == pytest.approx(expected)
    assert mean_ci95(values[:1]) is None


def test_clusters_widen_the_interval_of_a_pooled_mean() -> None:
    values = np.array([1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    sizes = np.array([3, 0, 3])
    # Two independent things were seen, with means 1 and 3: the interval is that of n = 2.
    assert clustered_mean_ci95(values, sizes) == pytest.approx(mean_ci95(np.array([1.0, 3.0])))
    assert clustered_mean_ci95(values, np.array([6])) is None


def test_a_censored_sample_has_no_mean_and_no_largest() -> None:
    values = np.array([*np.arange(1.0, 99.0), 200.0, 200.0])
    metric = describe(Sample(values=values, censored=values == 200.0), unit="s", method="exact")
    assert (metric.n, metric.n_censored) == (100, 2)
    assert (metric.p50, metric.p95, metric.p99) == (50.0, 95.0, None)
    assert (metric.mean, metric.mean_ci95, metric.max) == (None, None, None)
    assert metric.lower_bounds == {"p99": 200.0, "max": 200.0}


def test_nothing_observed_is_a_reason_and_not_a_zero() -> None:
    nothing = Sample(values=np.empty(0))
    assert sampled("ttft_s", nothing, "why", method="client") == NotMeasurable("why")
    with pytest.raises(ValueError, match="without observations"):
        describe(nothing, unit="s", method="client")


SHARES = (0.0005, 0.025, 0.05, 0.5, 0.95, 0.975, 0.9999)
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("share", SHARES)
def test_the_quantiles_of_t_are_those_of_scipy_stats(share: float) -> None:
    for freedom in (1, 2, 3.7, 30, 10_000):
        of_t = stats.t.ppf(share, freedom)
        assert t_quantile(share, freedom) == pytest.approx(of_t, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("share", [share for share in SHARES if share != 0.5])
@pytest.mark.parametrize("rate", [0.0, 0.003, 0.01, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0])
def test_ranks_are_those_of_scipy_stats(rate: float, share: float) -> None:
    sizes = [*range(1, 400, 7), 1000, 10_000, 123_457, 1_000_000]
    found = [binomial_quantile(share, n, rate) for n in sizes]
    assert found == np.asarray(stats.binom.ppf(share, sizes, rate), dtype=int).tolist()


def test_a_share_that_is_met_exactly_is_met() -> None:
    """Where rounding decides: scipy.stats takes one more now and then."""
    for n in range(1, 400, 2):
        assert binomial_quantile(0.5, n, 0.5) == (n - 1) // 2


def test_scipy_stats_takes_a_second_to_import_and_is_not_needed() -> None:
    modules = "harness.analysis.summary, harness.commands.gate, dashboards.report"
    code = f"import sys, {modules}; print('scipy.stats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (0, 300), (3, 50), (49, 50), (1, 1), (300, 300)])
def test_the_bounds_of_a_share_are_those_of_clopper_and_pearson(hits: int, n: int) -> None:
    upper = stats.binomtest(hits, n, alternative="less").proportion_ci(0.95, method="exact").high
    lower = stats.binomtest(hits, n, alternative="greater").proportion_ci(0.95, method="exact").low
    assert rate_upper95(hits, n) == pytest.approx(upper)
    assert rate_lower95(hits, n) == pytest.approx(lower)
    both = stats.binomtest(hits, n).proportion_ci(0.975, method="exact")
    assert rate_interval(hits, n, 0.975) == pytest.approx((both.low, both.high))


def test_values_that_depend_on_each_other_have_no_interval_of_a_quantile() -> None:
    values, of_each = np.arange(1000.0), np.full(10, 100)
    series = describe(Sample(values=values, is_series=True), unit="s", method="exact")
    assert (series.mean_ci95, series.p50_ci95, series.p99_ci95) == (None, None, None)
    gaps = describe(Sample(values=values, clusters=of_each), unit="s", method="client")
    assert (gaps.p50_ci95, gaps.p99_ci95) == (None, None)
    assert gaps.mean_ci95 == clustered_mean_ci95(values, of_each)
