"""What a benchmark finds: our figure, theirs, and how they compare, round by round."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal, NamedTuple


class UnavailableError(RuntimeError):
    """A benchmark cannot run here; the message says what is missing."""


class Figure(NamedTuple):
    value: float
    unit: str


class Bound(NamedTuple):
    """What the ratio is held to."""

    kind: Literal["at least", "at most", "off 1 by at most"]
    value: float

    def keeps(self, ratio: float) -> bool:
        """Whether the ratio is within this bound."""
        match self.kind:
            case "at least":
                return ratio >= self.value
            case "at most":
                return ratio <= self.value
            case "off 1 by at most":
                return abs(ratio - 1) <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One line of the table. `spread`: the ratio's quartiles over the rounds. `is_overrun`: what is
    ours could not do what was asked of it, so that its cost is of less than that."""

    what: str
    ours: Figure
    theirs: Figure
    ratio: float
    spread: tuple[float, float]
    bound: Bound | None = None
    is_overrun: bool = False

    @property
    def holds(self) -> bool:
        """Whether the ratio keeps its bound; true where there is none."""
        if self.bound is None:
            return True
        return not self.is_overrun and self.bound.keeps(self.ratio)


def times_as_fast(
    what: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    at_least: float | None = None,
) -> Ratio:
    """Theirs / ours of durations measured in the same rounds: medians of the rounds."""
    bound = None if at_least is None else Bound("at least", at_least)
    return _paired(what, unit, (ours, theirs), (theirs, ours), bound)


def share(
    what: str, unit: str, part: Sequence[float], whole: Sequence[float], bound: Bound | None = None
) -> Ratio:
    """Part / whole, measured in the same rounds; the part is shown as ours."""
    return _paired(what, unit, (part, whole), (part, whole), bound)


_Pair = tuple[Sequence[float], Sequence[float]]


def _paired(what: str, unit: str, figures: _Pair, over_under: _Pair, bound: Bound | None) -> Ratio:
    ours, theirs = (Figure(median(rounds), unit) for rounds in figures)
    ratios = [over / under for over, under in zip(*over_under, strict=True)]
    quarters = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Ratio(
        what=what,
        ours=ours,
        theirs=theirs,
        ratio=quarters[1],
        spread=(quarters[0], quarters[2]),
        bound=bound,
    )
