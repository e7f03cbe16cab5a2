"""The quantiles are those of scipy.stats, and a run, a gate or a report does without loading it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from harness.analysis.stats import (
    beta_quantile,
    binomial_quantile,
    chi2_quantile,
    normal_quantile,
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
    "module", ["harness.analysis.summary", "harness.commands.gate", "dashboards.report"]
)
def test_scipy_stats_takes_a_second_to_import_and_is_not_needed(module: str) -> None:
    code = f"import sys, {module}; print('scipy.stats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip() == "False"
