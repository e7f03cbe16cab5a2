"""A benchmark's finding: our figure, theirs, and how they compare, round by round."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Literal, NamedTuple


class UnavailableError(RuntimeError):
    """A benchmark cannot run here; the message says what is missing."""


class RatioLimit(NamedTuple):
    """The limit on the ratio."""

    kind: Literal["at least", "at most", "off 1 by at most"]
    value: float

    def keeps(self, ratio: float) -> bool:
        if self.kind == "at least":
            return ratio >= self.value
        return (ratio if self.kind == "at most" else abs(ratio - 1)) <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRatio:
    """One line of the table. `spread`: the ratio's quartiles over the rounds.

    `is_overrun`: our client could not keep up, so its cost is that of less work than was asked for.
    """

    what: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    spread: tuple[float, float]
    bound: RatioLimit | None = None
    is_overrun: bool = False

    @property
    def holds(self) -> bool:
        return self.bound is None or (not self.is_overrun and self.bound.keeps(self.ratio))


def share(
    what: str,
    unit: str,
    part: Sequence[float],
    whole: Sequence[float],
    bound: RatioLimit | None = None,
) -> BenchRatio:
    """Part / whole, measured in the same rounds; the part is shown as ours."""
    ratios = [over / under for over, under in zip(part, whole, strict=True)]
    low, middle, high = (
        quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return BenchRatio(
        what=what,
        unit=unit,
        ours=median(part),
        theirs=median(whole),
        ratio=middle,
        spread=(low, high),
        bound=bound,
    )


def within(what: str, unit: str, measured: Sequence[float], most: float) -> BenchRatio:
    """A measured figure against its limit, which is shown as theirs."""
    return share(what, unit, measured, [most] * len(measured), RatioLimit("at most", 1.0))


def times_as_fast(
    what: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    at_least: float | None = None,
) -> BenchRatio:
    """Theirs / ours, of durations measured in the same rounds."""
    bound = None if at_least is None else RatioLimit("at least", at_least)
    line = share(what, unit, theirs, ours, bound)
    return replace(line, ours=line.theirs, theirs=line.ours)
