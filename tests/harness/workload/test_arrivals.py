"""Schedules follow their formulas: counts, means, variation, the area under the rate."""

import random
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.workload.arrivals import (
    ConstantArrivals,
    GammaArrivals,
    RampArrivals,
    RateArrivals,
    RateStep,
    StepsArrivals,
    Stretch,
)

EVEN = ConstantArrivals(kind="constant", rate=4, seconds=1)


def gamma(rate: float, seconds: float, burstiness: float) -> RateArrivals:
    return GammaArrivals(kind="gamma", rate=rate, seconds=seconds, burstiness=burstiness)


def ramp(from_rate: float, to_rate: float, seconds: float, spacing: str | float) -> RampArrivals:
    return RampArrivals(
        kind="ramp", from_rate=from_rate, to_rate=to_rate, seconds=seconds, spacing=spacing
    )


def steps(*pairs: tuple[float, float], spacing: str | float) -> StepsArrivals:
    several = [RateStep(seconds=seconds, rate=rate) for seconds, rate in pairs]
    return StepsArrivals(kind="steps", steps=several, spacing=spacing)


def times(arrivals: RateArrivals, seed: int = 1) -> list[float]:
    return list(arrivals.offsets_s(random.Random(seed)))


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        (EVEN, [0.0, 0.25, 0.5, 0.75]),
        (ConstantArrivals(kind="constant", rate=10, seconds=0.3), [0.0, 0.1, 0.2]),  # no fourth
        (steps((2, 1), (3, 0), (1, 4), spacing="even"), [0.0, 1.0, 5.0, 5.25, 5.5, 5.75]),
    ],
)
def test_even_arrivals(arrivals: RateArrivals, expected: list[float]) -> None:
    assert times(arrivals) == pytest.approx(expected)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(
    burstiness: float,
) -> None:
    gaps = [b - a for a, b in pairwise(times(gamma(50, 1000, burstiness)))]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.03)


def test_a_ramp_sends_the_area_under_its_rate() -> None:
    rising = ramp(0, 100, 10, "even")
    found = times(rising)
    assert len(found) == rising.expected == 500
    # 0 to 100 in 10 s: by t, 5 t^2 have come
    assert [sum(time < t for time in found) for t in (2, 5, 8)] == [20, 125, 320]
    found = times(ramp(80, 0, 100, "poisson"))
    assert len(found) == pytest.approx(4000, rel=0.05)
    assert sum(time < 50 for time in found) == pytest.approx(3000, rel=0.05)


rates = st.floats(0, 50)
stretches = st.builds(Stretch, seconds=st.floats(0.1, 20), from_rate=rates, to_rate=rates)


@given(
    pairs=st.lists(st.tuples(st.floats(0.1, 20), rates), min_size=1, max_size=4),
    spacing=st.just("even") | st.floats(0.1, 10),
    seed=st.integers(0, 9),
)
def test_every_schedule_is_in_order_within_its_time_and_repeatable(
    pairs: list[tuple[float, float]], spacing: str | float, seed: int
) -> None:
    assume(any(rate > 0.01 for _, rate in pairs))
    arrivals = steps(*pairs, spacing=spacing)
    found = times(arrivals, seed)
    assert found == sorted(found)
    assert all(0 <= time <= arrivals.seconds_in_all + 1e-6 for time in found)
    assert found == times(arrivals, seed)
    if spacing == "even":
        assert abs(len(found) - arrivals.expected) <= 1


@given(stretch=stretches, share=st.floats(0, 1))
def test_the_area_up_to_the_time_of_an_area_is_that_area(stretch: Stretch, share: float) -> None:
    area = share * stretch.expected
    time = stretch.when(area)
    slope = (stretch.to_rate - stretch.from_rate) / stretch.seconds
    assert stretch.from_rate * time + slope * time**2 / 2 == pytest.approx(area, rel=1e-6, abs=1e-6)


def test_a_rate_with_a_square_of_zero_divides_nothing_by_zero() -> None:
    stretch = Stretch(seconds=1, from_rate=0, to_rate=1.7e-265)
    assert 0 <= stretch.when(stretch.expected / 2) <= 1
