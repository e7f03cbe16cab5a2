"""The quantiles are those of scipy.stats, and a run, a gate or a report does without loading it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from harness.analysis.figure import Sample, describe
from harness.analysis.load_side import truncation
from harness.analysis.stats import (
    beta_quantile,
    binomial_quantile,
    chi2_quantile,
    fewest_for_quantile,
    fewest_for_rate_below,
    kaplan_meier,
    normal_quantile,
    quantile_ci95,
    rate_upper95,
    ratio_ci95,
    t_quantile,
)

SHARES = (0.0005, 0.025, 0.05, 0.5, 0.95, 0.975, 0.9999)
NAMES = ["scipy.special", "scipy.stats"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("share", SHARES)
def test_they_are_those_of_scipy_stats(share: float) -> None:
    assert normal_quantile(share) == pytest.approx(stats.norm.ppf(share), rel=1e-9, abs=1e-12)
    for freedom in (1, 2, 3.7, 30, 10_000):
        of_t = stats.t.ppf(share, freedom)
        assert t_quantile(share, freedom) == pytest.approx(of_t, rel=1e-9, abs=1e-9)
        of_chi2 = stats.chi2.ppf(share, freedom)
        assert chi2_quantile(share, freedom) == pytest.approx(of_chi2, rel=1e-9)
    for a, b in ((1, 1), (1, 500), (3, 99), (400, 600)):
        assert beta_quantile(share, a, b) == pytest.approx(stats.beta.ppf(share, a, b), rel=1e-9)


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


@pytest.mark.parametrize(
    "module", ["harness.run.pipeline", "harness.commands.gate", "dashboards.report"]
)
def test_nobody_waits_until_scipy_stats_is_loaded(module: str) -> None:
    code = (
        f"import sys, {module}; print('scipy.special' in sys.modules, 'scipy.stats' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["True", "False"]


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
