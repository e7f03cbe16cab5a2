"""Numbers and units as a report prints them."""

import pytest

from harness.records import Metric
from harness.words import figure_of, interval, number, quantity


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


def test_three_significant_digits_but_whole_thousands() -> None:
    assert [number(x) for x in (0.012345, 1.5, 99.96, 1234.5, 100)] == [
        "0.0123",
        "1.5",
        "100",
        "1,234",
        "100",
    ]


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
