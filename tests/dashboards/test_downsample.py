"""Down-sampling keeps the peaks and says what it did."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboards.downsample import min_max, rising_note, rising_steps


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


def test_the_levels_are_of_all_samples_and_the_mean_is_by_time() -> None:
    y = np.arange(100_000.0)
    levels = min_max(y, y, intervals=100).levels
    assert levels is not None
    assert (levels.highest, levels.last) == (99_999.0, 99_999.0)
    assert levels.mean == 49_999.0
    held = min_max(np.array([0.0, 1.0, 10.0]), np.array([8.0, 2.0, 0.0])).levels
    assert held is not None
    assert (held.highest, held.mean, held.last) == (8.0, 2.6, 0.0)
    assert min_max(np.array([1.0]), np.array([np.nan])).levels is None


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


def test_a_short_curve_is_drawn_whole() -> None:
    assert rising_steps(np.linspace(0, 1, 12), steps=10).tolist() == list(range(12))
    assert rising_note(12, steps=12) is None


@settings(deadline=None)  # what a busy machine takes for it says nothing
@given(st.lists(st.integers(0, 40), min_size=1, max_size=400))
def test_a_long_curve_is_drawn_nowhere_above_itself(rises: list[int]) -> None:
    y = np.cumsum(rises).astype(float)
    drawn = rising_steps(y, steps=10)
    assert len(drawn) <= 13
    assert (drawn[0], drawn[-1]) == (0, len(y) - 1)
    shown = y[drawn[np.searchsorted(drawn, np.arange(len(y)), side="right") - 1]]
    assert (shown <= y).all()
    assert (y - shown <= (y[-1] - y[0]) / 10).all()
    assert rising_note(5_000, steps=10) == (
        "5,000 requests, drawn in 10 steps: nowhere above the true curve."
    )
