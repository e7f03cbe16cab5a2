"""`[arrivals]`: when requests come, one class a kind. Pure.

Rates that change make an inhomogeneous process by time change: arrivals lie evenly, or with gamma
gaps, on an axis with one expected arrival a unit, and the area under the rate maps it to time.
"""

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from harness.workload.abandon import TaskPlan
from harness.workload.load import AbandonLoad, Load
from harness.workload.traces import TimeUnit
from harness.workload.values import MOST_RATE, Duration, Seconds, Streams, TomlTable, number_or

MOST_ARRIVALS: Final = 10_000_000
MOST_SIMULATED: Final = 100_000_000  # of which a cluster's replicas each have a share
MAX_STREAMS: Final = 1_000
_MOST_FACTOR: Final = 1e6
# An area is a float: an arrival nearer than this to the end of the schedule lies on the end.
_ROUNDING: Final = 1e-9

Rate = Annotated[float, Field(gt=0, le=MOST_RATE)]
RateOrNone = Annotated[float, Field(ge=0, le=MOST_RATE)]
Burstiness = Annotated[float, Field(ge=0.001, le=1000)]
Factor = Annotated[float, Field(gt=0, le=_MOST_FACTOR)]


PromptFactor = Annotated[
    str | float,
    number_or("fit", least=math.ulp(0.0), most=_MOST_FACTOR, said="a number above 0"),
]
Spacing = Annotated[
    str | float,
    number_or(*("even", "poisson"), least=0.001, most=1000, said="a burstiness from 0.001 to 1000"),
]


class Stretch(NamedTuple):
    """`seconds` in which the rate (arrivals per second) goes straight from one to the other."""

    seconds: float
    from_rate: float
    to_rate: float

    @property
    def expected(self) -> float:
        return self.seconds * (self.from_rate + self.to_rate) / 2

    def when(self, area: float) -> float:
        """Seconds from its beginning until the area under the rate is so large: the root t of
        from_rate * t + slope * t^2 / 2 = area, in the form that also holds without a slope."""
        if area <= 0:
            return 0.0
        slope = (self.to_rate - self.from_rate) / self.seconds
        root = math.sqrt(max(0.0, self.from_rate**2 + 2 * slope * area))
        if self.from_rate + root == 0:  # rates whose square is too small for a float
            return self.seconds
        return min(2 * area / (self.from_rate + root), self.seconds)


class ClosedArrivals(TomlTable):
    kind: Literal["closed"] = "closed"


class OpenArrivals(TomlTable):
    kind: str
    max_streams: Streams = MAX_STREAMS


class RateArrivals(OpenArrivals):
    @property
    @abstractmethod
    def stretches(self) -> Sequence[Stretch]: ...

    @property
    def shape(self) -> float | None:
        """The shape of the gamma distribution of the gaps (1: exponential, so the arrivals are
        independent of each other), which have mean 1 on the axis; None: evenly spaced."""
        return 1.0

    @model_validator(mode="after")
    def _must_end(self) -> Self:
        expected = self.expected
        if expected <= 0:
            raise ValueError(f"{expected:g} arrivals are expected; there must be more than 0")
        return self

    @property
    def expected(self) -> float:
        return sum(stretch.expected for stretch in self.stretches)

    @property
    def seconds_in_all(self) -> float:
        return sum(stretch.seconds for stretch in self.stretches)

    @property
    def highest_rate(self) -> float:
        return max(max(one.from_rate, one.to_rate) for one in self.stretches)

    def offsets_s(self, rng: random.Random) -> Iterator[float]:
        return (offset_s for _, offset_s in self.thinned(rng, lambda: 0))

    def thinned(
        self, rng: random.Random, num_skipped: Callable[[], int]
    ) -> Iterator[tuple[int, float]]:
        """The number and the offset of some arrivals; `num_skipped` says how many are left out
        before the next. A sum of gamma gaps is one gamma gap, so that what is left out costs
        nothing."""
        shape = self.shape

        def gaps(n: int) -> float:
            return n if shape is None else rng.gammavariate(n * shape, 1 / shape)

        number = num_skipped()
        place = gaps(number + (shape is not None))
        begin_s = passed = 0.0
        for stretch in self.stretches:
            while place - passed < stretch.expected - _ROUNDING:
                yield number, begin_s + stretch.when(place - passed)
                ahead = 1 + num_skipped()
                number += ahead
                place += gaps(ahead)
            begin_s += stretch.seconds
            passed += stretch.expected


class FlatArrivals(RateArrivals):
    rate: Rate
    seconds: Duration

    @property
    def stretches(self) -> Sequence[Stretch]:
        return [Stretch(self.seconds, self.rate, self.rate)]


class ConstantArrivals(FlatArrivals):
    kind: Literal["constant"]

    @property
    def shape(self) -> None:
        return None


class PoissonArrivals(FlatArrivals):
    """`rate` for `seconds`, each arrival independent of the others."""

    kind: Literal["poisson"]


class GammaArrivals(FlatArrivals):
    """`rate` for `seconds`, in bursts: gaps vary by 1 / sqrt(`burstiness`) of their mean."""

    kind: Literal["gamma"]
    burstiness: Burstiness

    @property
    def shape(self) -> float:
        return self.burstiness


class _SpacedArrivals(RateArrivals):
    spacing: Spacing = "poisson"

    @property
    def shape(self) -> float | None:
        words = {"even": None, "poisson": 1.0}
        return words[self.spacing] if isinstance(self.spacing, str) else self.spacing


class RampArrivals(_SpacedArrivals):
    kind: Literal["ramp"]
    from_rate: RateOrNone
    to_rate: RateOrNone
    seconds: Duration

    @property
    def stretches(self) -> Sequence[Stretch]:
        return [Stretch(self.seconds, self.from_rate, self.to_rate)]


class RateStep(TomlTable):
    rate: RateOrNone
    seconds: Duration


class StepsArrivals(_SpacedArrivals):
    kind: Literal["steps"]
    steps: Annotated[list[RateStep], Field(min_length=1)]

    @property
    def stretches(self) -> Sequence[Stretch]:
        return [Stretch(step.seconds, step.rate, step.rate) for step in self.steps]


class TraceArrivals(OpenArrivals):
    """Recorded traffic, replayed `speed` times as fast: `seconds` of it, from `from_s` after its
    first request on. `time_unit`: of its times, if the file leaves it open. `prompt_factor` "fit"
    becomes the largest number up to 1 by which the longest prompt fits; the load process gets that
    number."""

    kind: Literal["trace"]
    file: Annotated[str, Field(min_length=1)]
    time_unit: TimeUnit | None = None
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
    arrivals: AnyArrivals, load: Load, *, max_seconds: float, is_simulated: bool = False
) -> str | None:
    if isinstance(arrivals, ClosedArrivals):
        return None
    if not isinstance(load, AbandonLoad):
        return f'`arrivals.kind` "{arrivals.kind}" needs `load.kind` "abandon", not "{load.kind}"'
    if load.canaries or (load.ask_again_after and not is_simulated):
        return (
            "`load.canaries` and `load.ask_again_after` need users with more than one request, "
            'which an open loop does not have: leave them out, or take `arrivals.kind` "closed"'
        )
    if load.session is not None:
        return (
            "the turns of `load.session` follow each other, and an open loop's requests do not: "
            'leave it out, or take `arrivals.kind` "closed"'
        )
    if isinstance(arrivals, TraceArrivals) and any(
        isinstance(plan, TaskPlan) for plan in load.leavers
    ):
        return (
            "plan `task` has texts of known lengths, and a trace has lengths of its own: take "
            "another `arrivals.kind`"
        )
    most = MOST_SIMULATED if is_simulated else MOST_ARRIVALS
    if isinstance(arrivals, RateArrivals) and arrivals.expected > most:
        return f"{arrivals.expected:g} arrivals are expected; there may be at most {most:,}"
    if isinstance(arrivals, RateArrivals) and arrivals.seconds_in_all > max_seconds:
        return (
            f"arrivals come for {arrivals.seconds_in_all:g} s, but the load ends after "
            f"`run.max_seconds`, {max_seconds:g} s; raise it, so that the last streams can end too"
        )
    return None
