"""When requests arrive in an open loop: pure, from rates and a random number generator.

A schedule is made in two steps. First arrivals are placed on an axis on which one is expected in
each unit: evenly (0, 1, 2, ...), or with gaps drawn from a gamma distribution of mean 1. Then each
place u is moved to the time t at which so many were due, i.e. to where the area under the rate
curve is u. So one rule serves every curve: a flat one, a ramp, steps.

`burstiness` is the shape of the gamma distribution, as in vLLM's benchmark: a gap has the
coefficient of variation 1 / sqrt(burstiness). 1 is Poisson's process, less is burstier, more is
more regular.
"""

import math
import random
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Final, TypeVar

import msgspec

Dealt = TypeVar("Dealt")

# An area is a float: what is nearer than this to the end of the schedule lies on it.
_ROUNDING: Final = 1e-9


class Stretch(msgspec.Struct, kw_only=True, frozen=True):
    """`seconds` in which the rate (arrivals per second) goes straight from one to the other."""

    seconds: float
    from_rate: float
    to_rate: float

    @property
    def expected(self) -> float:
        """How many arrivals are expected: the area under the rate."""
        return self.seconds * (self.from_rate + self.to_rate) / 2

    def when(self, area: float) -> float:
        """Seconds from its beginning until the area under the rate is so large.

        The root t of from_rate * t + slope * t^2 / 2 = area, in the form that also holds for no
        slope.
        """
        if area <= 0:
            return 0.0
        slope = (self.to_rate - self.from_rate) / self.seconds
        root = math.sqrt(max(0.0, self.from_rate**2 + 2 * slope * area))
        if self.from_rate + root == 0:  # rates whose square is too small for a float
            return self.seconds
        return min(2 * area / (self.from_rate + root), self.seconds)


class RateArrivals(msgspec.Struct, kw_only=True, tag="rate", tag_field="kind"):
    """One stretch after the other. `burstiness` as above; null: evenly spaced."""

    stretches: list[Stretch]
    burstiness: float | None


def expected_arrivals(stretches: Iterable[Stretch]) -> float:
    """How many arrivals are expected in all; evenly spaced, it is so many."""
    return sum(stretch.expected for stretch in stretches)


def offsets_s(arrivals: RateArrivals, rng: random.Random) -> Iterator[float]:
    """The time of each arrival, in seconds from the beginning, in order; ends with the schedule."""
    places = _places(arrivals.burstiness, rng)
    place = next(places)
    begin_s = passed = 0.0
    for stretch in arrivals.stretches:
        while place - passed < stretch.expected - _ROUNDING:
            yield begin_s + stretch.when(place - passed)
            place = next(places)
        begin_s += stretch.seconds
        passed += stretch.expected


def deal(arrivals: Iterable[Dealt], *, worker: int, workers: int) -> Iterator[Dealt]:
    """What one of several workers, numbered from 0 without a gap, has to do: every so-many-th, so
    that together they do it all."""
    return islice(arrivals, worker, None, workers)


def _places(burstiness: float | None, rng: random.Random) -> Iterator[float]:
    """Where arrivals lie when one is expected in each unit."""
    if burstiness is None:
        yield from map(float, count())
        return
    place = 0.0
    while True:
        place += rng.gammavariate(burstiness, 1 / burstiness)
        yield place
