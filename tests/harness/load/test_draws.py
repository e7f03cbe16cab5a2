"""Draws keep to their limits and follow the distributions that they are named after."""

import random
from statistics import median as middle

from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from harness.workload.abandon import geometric, lognormal

RNGS = st.integers(0, 2**63).map(random.Random)
LIMITS = st.integers(2, 10_000_000)


@given(rng=RNGS, mean=st.floats(1, 1e7), limit=LIMITS)
def test_geometric_leaves_before_the_limit(rng: random.Random, mean: float, limit: int) -> None:
    assert 1 <= geometric(rng, mean=mean, limit=limit) < limit


@given(rng=RNGS, median=st.floats(1, 1e7), sigma=st.floats(0, 10), limit=LIMITS)
def test_lognormal_leaves_before_the_limit(
    rng: random.Random, median: float, sigma: float, limit: int
) -> None:
    assert 1 <= lognormal(rng, median=median, sigma=sigma, limit=limit) < limit


def test_geometric_is_what_its_name_says() -> None:
    rng = random.Random(1)
    drawn = [geometric(rng, mean=5, limit=10**6) for _ in range(5000)]
    counts = [drawn.count(n) for n in range(1, 11)] + [sum(n > 10 for n in drawn)]
    truth = stats.geom(1 / 5)
    shares = [truth.pmf(n) for n in range(1, 11)] + [truth.sf(10)]
    assert stats.chisquare(counts, [5000 * share for share in shares]).pvalue > 0.001


def test_what_lies_beyond_the_answer_is_spread_over_what_lies_before() -> None:
    """Not heaped up at the limit: those draws would all leave at the very end."""
    rng = random.Random(2)
    drawn = [geometric(rng, mean=100, limit=11) for _ in range(5000)]
    weights = [stats.geom(1 / 100).pmf(n) for n in range(1, 11)]
    expected = [5000 * weight / sum(weights) for weight in weights]
    assert stats.chisquare([drawn.count(n) for n in range(1, 11)], expected).pvalue > 0.001


def test_lognormal_is_what_its_name_says() -> None:
    rng = random.Random(3)
    drawn = [lognormal(rng, median=200, sigma=0.5, limit=10**6) for _ in range(5000)]
    assert 190 < middle(drawn) < 210
    assert stats.kstest(drawn, stats.lognorm(s=0.5, scale=200).cdf).pvalue > 0.001


def test_a_lognormal_of_no_width_is_its_median() -> None:
    assert {lognormal(random.Random(n), median=7, sigma=0, limit=99) for n in range(9)} == {7}
    assert lognormal(random.Random(1), median=70, sigma=0, limit=9) == 8
