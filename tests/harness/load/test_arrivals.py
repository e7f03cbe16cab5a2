"""Schedules follow their formulas: counts, means, variation, the area under the rate."""

import random
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.workload.arrivals import RateArrivals, Stretch, deal, expected_arrivals, offsets_s


def flat(rate: float, seconds: float, burstiness: float | None) -> RateArrivals:
    return RateArrivals(
        stretches=[Stretch(seconds=seconds, from_rate=rate, to_rate=rate)], burstiness=burstiness
    )


def times(arrivals: RateArrivals, seed: int = 1) -> list[float]:
    return list(offsets_s(arrivals, random.Random(seed)))


def gaps(arrivals: RateArrivals) -> list[float]:
    return [b - a for a, b in pairwise(times(arrivals))]


def test_a_constant_rate_is_evenly_spaced_and_ends_with_its_time() -> None:
    assert times(flat(4, 1, None)) == [0.0, 0.25, 0.5, 0.75]
    assert len(times(flat(10, 0.3, None))) == 3  # not a fourth one, by rounding


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(
    burstiness: float,
) -> None:
    found = gaps(flat(50, 1000, burstiness))
    assert fmean(found) == pytest.approx(1 / 50, rel=0.03)
    assert pstdev(found) / fmean(found) == pytest.approx(burstiness**-0.5, rel=0.03)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    counts = [0] * 2000
    for time in times(flat(10, 2000, 1.0)):
        counts[int(time)] += 1
    assert fmean(counts) == pytest.approx(10, rel=0.03)
    assert pstdev(counts) ** 2 / fmean(counts) == pytest.approx(1, abs=0.1)


def test_a_ramp_sends_the_area_under_its_rate() -> None:
    ramp = RateArrivals(stretches=[Stretch(seconds=10, from_rate=0, to_rate=100)], burstiness=None)
    found = times(ramp)
    assert len(found) == expected_arrivals(ramp.stretches) == 500
    # 0 to 100 in 10 s: by t, 5 t^2 have come
    assert [sum(time < t for time in found) for t in (2, 5, 8)] == [20, 125, 320]


def test_a_random_ramp_has_its_rate_on_average() -> None:
    ramp = RateArrivals(stretches=[Stretch(seconds=100, from_rate=80, to_rate=0)], burstiness=1.0)
    found = times(ramp)
    assert len(found) == pytest.approx(4000, rel=0.05)
    assert sum(time < 50 for time in found) == pytest.approx(3000, rel=0.05)


def test_steps_follow_each_other_and_may_be_silent() -> None:
    steps = RateArrivals(
        stretches=[
            Stretch(seconds=2, from_rate=1, to_rate=1),
            Stretch(seconds=3, from_rate=0, to_rate=0),
            Stretch(seconds=1, from_rate=4, to_rate=4),
        ],
        burstiness=None,
    )
    assert times(steps) == [0.0, 1.0, 5.0, 5.25, 5.5, 5.75]


rates = st.floats(0, 50)
stretches = st.builds(Stretch, seconds=st.floats(0.1, 20), from_rate=rates, to_rate=rates)


@given(
    several=st.lists(stretches, min_size=1, max_size=4),
    burstiness=st.none() | st.floats(0.1, 10),
    seed=st.integers(0, 9),
)
def test_every_schedule_is_in_order_within_its_time_and_the_same_again(
    several: list[Stretch], burstiness: float | None, seed: int
) -> None:
    arrivals = RateArrivals(stretches=several, burstiness=burstiness)
    found = times(arrivals, seed)
    assert found == sorted(found)
    assert all(0 <= time <= sum(one.seconds for one in several) + 1e-6 for time in found)
    assert found == times(arrivals, seed)
    if burstiness is None:
        assert abs(len(found) - expected_arrivals(several)) <= 1


@given(stretch=stretches, share=st.floats(0, 1))
def test_the_area_up_to_the_time_of_an_area_is_that_area(stretch: Stretch, share: float) -> None:
    area = share * stretch.expected
    time = stretch.when(area)
    slope = (stretch.to_rate - stretch.from_rate) / stretch.seconds
    assert stretch.from_rate * time + slope * time**2 / 2 == pytest.approx(area, rel=1e-6, abs=1e-6)


def test_a_rate_whose_square_is_no_number_any_more_divides_nothing_by_zero() -> None:
    stretch = Stretch(seconds=1, from_rate=0, to_rate=1.7e-265)
    assert 0 <= stretch.when(stretch.expected / 2) <= 1


@given(number=st.integers(0, 40), workers=st.integers(1, 6))
def test_workers_together_send_each_arrival_once(number: int, workers: int) -> None:
    shares = [list(deal(range(number), worker=i, workers=workers)) for i in range(workers)]
    assert sorted(one for share in shares for one in share) == list(range(number))
