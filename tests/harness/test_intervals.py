"""The quantiles in plain Python are equal to scipy's."""

import random
from statistics import fmean, stdev

import pytest
from scipy import special, stats

from harness.intervals import (
    beta_cdf,
    mean_interval,
    rate_interval,
    rate_lower95,
    rate_upper95,
    t_quantile,
)

CLOSE = 1e-9


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 999, 100_000, 4.5])
@pytest.mark.parametrize("share", [0.9, 0.95, 0.975, 0.9995])
def test_a_quantile_of_student_is_that_of_scipy(share: float, freedom: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(special.stdtrit(freedom, share), rel=CLOSE)


@pytest.mark.parametrize("n", [1, 2, 10, 299, 5_000, 1_000_000])
def test_the_limits_of_a_rate_are_those_of_scipy(n: int) -> None:
    for hits in {0, min(1, n - 1), n // 3, n - 1}:
        upper = special.betaincinv(hits + 1, n - hits, 0.95)
        assert rate_upper95(hits, n) == pytest.approx(upper, rel=CLOSE)
        low, high = rate_interval(hits, n, 0.9)
        assert (low, high) == pytest.approx((rate_lower95(hits, n), upper), rel=CLOSE, abs=1e-12)
    assert rate_upper95(n, n) == 1.0
    assert rate_lower95(0, n) == 0.0


def test_the_beta_function_is_that_of_scipy() -> None:
    rng = random.Random(1)
    for _ in range(200):
        x, a, b = rng.random(), 10 ** rng.uniform(-1, 4), 10 ** rng.uniform(-1, 4)
        assert beta_cdf(x, a, b) == pytest.approx(special.betainc(a, b, x), rel=CLOSE, abs=1e-14)


def test_the_interval_of_a_mean_is_that_of_scipy() -> None:
    rng = random.Random(2)
    values = [rng.gauss(3, 2) for _ in range(9)]
    found = stats.t.interval(0.95, 8, fmean(values), stdev(values) / 3)
    assert mean_interval(values) == pytest.approx(found, rel=CLOSE)
    assert mean_interval(values[:1]) is None
