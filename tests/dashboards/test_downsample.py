"""Down-sampling keeps the peaks and says what it did."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dashboards.downsample import min_max


def test_a_short_series_is_drawn_whole() -> None:
    x = np.arange(10.0)
    series = min_max(x, x**2, intervals=5)
    assert series.y.tolist() == (x**2).tolist()
    assert series.note is None


def test_one_spike_in_a_long_series_survives() -> None:
    y = np.zeros(100_000)
    y[54_321] = 9.0
    series = min_max(np.arange(100_000.0), y, intervals=100)
    assert len(series.x) <= 200
    assert series.x[series.y == 9.0].tolist() == [54_321.0]
    assert series.note == (
        "100,000 samples, drawn as the lowest and highest of each of 100 intervals"
    )


def test_gaps_are_left_out() -> None:
    series = min_max(np.arange(4.0), np.array([1.0, np.nan, 3.0, np.inf]))
    assert series.x.tolist() == [0.0, 2.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 20))
def test_extremes_are_kept_and_order_too(values: list[float], intervals: int) -> None:
    x, y = np.arange(float(len(values))), np.array(values)
    series = min_max(x, y, intervals=intervals)
    assert series.y.min() == y.min()
    assert series.y.max() == y.max()
    assert (np.diff(series.x) > 0).all()
    assert series.samples == len(values)
    assert set(zip(series.x, series.y, strict=True)) <= set(zip(x, y, strict=True))
