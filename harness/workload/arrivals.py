"""`[arrivals]`: when requests come, one class a kind; `harness.workload.arrivals` has the formulas.

Without the section users are a closed loop: each sends its next request when the last one ended. In
an open loop nobody waits for an answer: requests come by a schedule, whatever the server does.
"""

import math
import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Annotated, Final, Literal, Self, TypeVar

import msgspec
from pydantic import Field, PlainValidator, model_validator

from harness.workload.load import AbandonSettings, LoadSettings
from harness.workload.values import MOST_RATE, Duration, Seconds, Section, Streams

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


MOST_ARRIVALS: Final = 10_000_000
MAX_STREAMS: Final = 1_000
_MOST_FACTOR: Final = 1e6

Rate = Annotated[float, Field(gt=0, le=MOST_RATE)]
RateOrNone = Annotated[float, Field(ge=0, le=MOST_RATE)]
Burstiness = Annotated[float, Field(ge=0.001, le=1000)]
Factor = Annotated[float, Field(gt=0, le=_MOST_FACTOR)]


def _parse_prompt_factor(value: object) -> str | float:
    match value:
        case "fit":
            return "fit"
        case bool():
            pass
        case int() | float() if 0 < value <= _MOST_FACTOR:
            return float(value)
    raise ValueError(f'must be "fit" or a number above 0, not {value!r}')


def _parse_spacing(value: object) -> str | float:
    match value:
        case "even" | "poisson":
            return str(value)
        case bool():
            pass
        case int() | float() if 0.001 <= value <= 1000:
            return float(value)
    raise ValueError(f'must be "even", "poisson" or a burstiness from 0.001 to 1000, not {value!r}')


PromptFactor = Annotated[str | float, PlainValidator(_parse_prompt_factor)]
Spacing = Annotated[str | float, PlainValidator(_parse_spacing)]


class ClosedArrivals(Section):
    """No schedule: who asks next is who was answered."""

    kind: Literal["closed"] = "closed"


class OpenArrivals(Section):
    """What every schedule has. An arrival beyond `max_streams` waits until a stream has ended."""

    max_streams: Streams = MAX_STREAMS


class RateSettings(OpenArrivals):
    """A schedule that follows a rate (arrivals per second)."""

    @property
    @abstractmethod
    def schedule(self) -> RateArrivals:
        """Its stretches, and how evenly arrivals come in them."""

    @model_validator(mode="after")
    def _must_end(self) -> Self:
        expected = expected_arrivals(self.schedule.stretches)
        if not 0 < expected <= MOST_ARRIVALS:
            raise ValueError(
                f"{expected:g} arrivals are expected; it must be more than none, and at most "
                f"{MOST_ARRIVALS}"
            )
        return self

    @property
    def seconds_in_all(self) -> float:
        return sum(stretch.seconds for stretch in self.schedule.stretches)

    @property
    def highest_rate(self) -> float:
        return max(max(one.from_rate, one.to_rate) for one in self.schedule.stretches)


class ConstantArrivals(RateSettings):
    """`rate` for `seconds`, evenly spaced."""

    kind: Literal["constant"]
    rate: Rate
    seconds: Duration

    @property
    def schedule(self) -> RateArrivals:
        return _flat(self.rate, self.seconds, burstiness=None)


class PoissonArrivals(RateSettings):
    """`rate` for `seconds`, each arrival independent of the others."""

    kind: Literal["poisson"]
    rate: Rate
    seconds: Duration

    @property
    def schedule(self) -> RateArrivals:
        return _flat(self.rate, self.seconds, burstiness=1.0)


class GammaArrivals(RateSettings):
    """`rate` for `seconds`, in bursts: gaps vary by 1 / sqrt(`burstiness`) of their mean."""

    kind: Literal["gamma"]
    rate: Rate
    burstiness: Burstiness
    seconds: Duration

    @property
    def schedule(self) -> RateArrivals:
        return _flat(self.rate, self.seconds, burstiness=self.burstiness)


class RampArrivals(RateSettings):
    """A rate that goes straight from `from_rate` to `to_rate` in `seconds`."""

    kind: Literal["ramp"]
    from_rate: RateOrNone
    to_rate: RateOrNone
    seconds: Duration
    spacing: Spacing = "poisson"

    @property
    def schedule(self) -> RateArrivals:
        stretch = Stretch(seconds=self.seconds, from_rate=self.from_rate, to_rate=self.to_rate)
        return RateArrivals(stretches=[stretch], burstiness=_burstiness(self.spacing))


class StepSettings(Section):
    """`rate` for `seconds`."""

    rate: RateOrNone
    seconds: Duration


class StepsArrivals(RateSettings):
    """One rate after the other."""

    kind: Literal["steps"]
    steps: Annotated[list[StepSettings], Field(min_length=1)]
    spacing: Spacing = "poisson"

    @property
    def schedule(self) -> RateArrivals:
        stretches = [
            Stretch(seconds=step.seconds, from_rate=step.rate, to_rate=step.rate)
            for step in self.steps
        ]
        return RateArrivals(stretches=stretches, burstiness=_burstiness(self.spacing))


class TraceArrivals(OpenArrivals):
    """Recorded traffic (`workload.traces`), from `from_s` on, for `seconds` of the recording.

    `prompt_factor` "fit": as much less than 1 as makes the longest prompt fit.
    """

    kind: Literal["trace"]
    file: Annotated[str, Field(min_length=1)]
    from_s: Seconds = 0.0
    seconds: Duration | None = None
    speed: Factor = 1.0
    prompt_factor: PromptFactor = 1.0


AnyArrivals = Annotated[
    ClosedArrivals
    | ConstantArrivals
    | PoissonArrivals
    | GammaArrivals
    | RampArrivals
    | StepsArrivals
    | TraceArrivals,
    Field(discriminator="kind"),
]


def arrivals_problem(
    arrivals: AnyArrivals, load: LoadSettings, *, max_seconds: float
) -> str | None:
    """Why this load cannot come by this schedule; None: it can."""
    if isinstance(arrivals, ClosedArrivals):
        return None
    if not isinstance(load, AbandonSettings):
        return f'`arrivals.kind` "{arrivals.kind}" needs `load.kind` "abandon", not "{load.kind}"'
    if load.canaries or load.ask_again_after:
        return (
            "`load.canaries` and `load.ask_again_after` need users who ask again, and in an open "
            'loop nobody does: leave them out, or take `arrivals.kind` "closed"'
        )
    if isinstance(arrivals, RateSettings) and arrivals.seconds_in_all > max_seconds:
        return (
            f"arrivals come for {arrivals.seconds_in_all:g} s, but the load ends after "
            f"`run.max_seconds`, {max_seconds:g} s; raise it, so that the last streams can end too"
        )
    return None


def _flat(rate: float, seconds: float, *, burstiness: float | None) -> RateArrivals:
    stretch = Stretch(seconds=seconds, from_rate=rate, to_rate=rate)
    return RateArrivals(stretches=[stretch], burstiness=burstiness)


def _burstiness(spacing: str | float) -> float | None:
    if isinstance(spacing, str):
        return {"even": None, "poisson": 1.0}[spacing]
    return spacing
