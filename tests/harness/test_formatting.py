"""Numbers and units as a report prints them."""

import numpy as np
import pytest

from harness.analysis.figure import Sample, describe
from harness.compare.pairs import shift_between
from harness.formatting import (
    bounded,
    figure_of,
    interval,
    quantity,
    shift_in_words,
)
from harness.records import Metric, Shift


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0019, "s", "1.9 ms"),
        (0.02034, "s", "20.3 ms"),
        (0.00042, "s", "420 µs"),
        (1.2, "s", "1.2 s"),
        (0.0, "s", "0 s"),
        (150.0, "s", "2.5 min"),
        (-0.0021, "s", "-2.1 ms"),
        (0.012345, "", "0.0123"),
        (99.96, "", "100"),
        (1234.5, "", "1,234"),
        (-0.0, "ratio", "0 %"),
        (0.006, "ratio", "0.6 %"),
        (1.0, "tokens", "1 token"),
        (1.024, "tokens", "1.02 tokens"),
        (12345.6, "tokens", "12,346 tokens"),
        (0.0, "slots", "0 slots"),
        (3.5, "rps", "3.5 per s"),
        (1.0, "rps", "1 per s"),
        (1.0, "tokens/s", "1 tokens/s"),
        (4 * 2**30, "bytes", "4 GiB"),
        (None, "s", "\N{EN DASH}"),
        (float("nan"), "s", "\N{EN DASH}"),
    ],
)
def test_a_quantity_has_the_unit_that_fits(value: float | None, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_a_quantile_among_the_censored_is_a_lower_bound_not_a_number() -> None:
    metric = Metric(unit="s", n=10, n_censored=2, p99=None, lower_bounds={"p99": 2.0}, method="x")
    assert figure_of(metric, "p99") == "> 2 s"
    assert figure_of(metric, "p50") == "\N{EN DASH}"


def test_an_interval_that_is_not_there_is_not_printed() -> None:
    metric = Metric(unit="s", n=10, p50_ci95=(0.001, 0.002), mean_ci95=(0.0005, 0.002), method="x")
    assert interval(metric, "p50") == "1 to 2 ms"
    assert interval(metric, "mean") == "500 µs to 2 ms"
    assert interval(metric, "p99") is None
    assert interval(metric, "p90") is None


@pytest.mark.parametrize(
    ("unit", "mean", "limits", "bound", "text"),
    [
        ("s", 9e-5, (-20.1e-6, 203e-6), "point", "0 s to 203 µs"),
        ("tokens", 21.3, (-2.01, 44.5), "point", "0 to 44.5 tokens"),
        ("s", -1e-6, (-3e-6, 1e-6), "point", "-3 to 1 µs"),  # of two clocks: it is as it was found
        ("slots", 1.0, (-1.0, 3.0), "point", "-1 to 3 slots"),
        ("tokens", 21.3, (2.0, 44.5), "lower", None),
        ("tokens", 21.3, (2.0, 44.5), "upper", None),
    ],
)
def test_the_interval_of_a_time_does_not_reach_below_nothing_and_a_bound_has_none(
    unit: str, mean: float, limits: tuple[float, float], bound: str, text: str | None
) -> None:
    one = Metric(unit=unit, n=9, mean=mean, mean_ci95=limits, method="x", bound=bound)
    assert interval(one, "mean") == text


@pytest.mark.parametrize(("bound", "sign"), [("point", ""), ("lower", "≥ "), ("upper", "≤ ")])
def test_every_figure_has_the_sign_of_its_bound(bound: str, sign: str) -> None:
    sample = Sample(values=np.array([0.01, 0.02, 0.03]))
    metric = describe(sample, unit="s", method="gauge", bound=bound)
    assert [bounded(metric, name) for name in ("mean", "p50", "p99", "max")] == [
        f"{sign}{shown}" for shown in ("20 ms", "20 ms", "30 ms", "30 ms")
    ]


def test_a_mean_of_which_only_a_limit_is_known_is_the_limit() -> None:
    metric = Metric(unit="s", n=10, upper95=0.02, method="gauge", bound="upper")
    assert (bounded(metric, "mean"), bounded(metric, "p50")) == ("≤ 20 ms", "\N{EN DASH}")


def test_a_shift_says_how_much_and_how_often() -> None:
    mine, theirs = np.array([1.0, 2, 3, 4, np.inf]), np.array([2.0, 3, 4, 5, 6])
    said = shift_in_words("ttft_s", "on", "off", shift_between(mine, theirs), "s")
    assert said == (
        "ttft_s of each request: on against off -1 s, larger in 38 % of pairs, "
        "without an end 1 and 0"
    )
    assert shift_in_words("ttft_s", "on", "off", Shift(n=1, n_reference=9), "s") is None
