"""The verdict on a candidate, in words: better, worse, mixed or no clear difference, and by what.

`harness.compare.pairs.standing` judges each figure. A part of another figure does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from harness.compare.comparison import Comparison, steps_differ
from harness.compare.pairs import Pair, Standing, standing
from harness.formatting import between, quantity, times
from harness.metrics import METRICS, titled

MOST_NAMED: Final = 4  # figures that are better or worse; the others are counted
BOTH_WAYS: Final = (
    "The runs differ in step time, so a time is called better or worse only if it is so both as "
    "measured and in steps."
)
CLEAR: Final = (
    "Better and worse are significant at 95 %: expect one false mark in twenty figures that are "
    "equal. A figure that is part of another one is shown and not counted."
)


class Overall(StrEnum):
    WORSE = "worse"
    MIXED = "mixed"
    BETTER = "better"
    UNCLEAR = "no clear difference"
    NOT_COMPARED = "cannot be compared"


class VerdictLine(NamedTuple):
    """One figure: in short, and with its levels and interval."""

    standing: Standing
    brief: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonVerdict:
    """`lines`: the figures behind it, worse ones first; `more`: of each kind, how many figures are
    not in a line.
    """

    overall: Overall
    sentence: str
    lines: tuple[VerdictLine, ...] = ()
    more: tuple[tuple[Standing, int], ...] = ()


def verdict_on(comparison: Comparison, candidate: str, baseline: str) -> ComparisonVerdict:
    """`candidate` and `baseline`: their names in the sentence."""
    if any(one.level == "invalid" for one in comparison.remarks):
        why = "One of the runs is invalid, so its figures say nothing about the server."
        return ComparisonVerdict(overall=Overall.NOT_COMPARED, sentence=why)
    of: dict[Standing, list[Pair]] = {which: [] for which in Standing}
    for pair in comparison.pairs:
        if METRICS[pair.metric].part_of is None:
            of[standing(pair)].append(pair)
    worse, better = of[Standing.WORSE], of[Standing.BETTER]
    judged = len(worse) + len(better) + len(of[Standing.UNSURE])
    if not judged:
        why = f"No figure of {candidate} can be compared with {baseline}."
        return ComparisonVerdict(overall=Overall.NOT_COMPARED, sentence=why)
    sentence = _sentence(len(worse), len(better), judged, candidate, baseline)
    sides = {Standing.WORSE: _of_metrics(worse), Standing.BETTER: _of_metrics(better)}
    return ComparisonVerdict(
        overall=_overall(worse, better),
        sentence=f"{sentence} {BOTH_WAYS}" if steps_differ(comparison) else sentence,
        lines=tuple(_line(side, pair) for side in sides for pair in sides[side][:MOST_NAMED]),
        more=tuple(
            (side, len(pairs) - MOST_NAMED)
            for side, pairs in sides.items()
            if len(pairs) > MOST_NAMED
        ),
    )


def _overall(worse: Sequence[Pair], better: Sequence[Pair]) -> Overall:
    if worse and better:
        return Overall.MIXED
    if worse:
        return Overall.WORSE
    return Overall.BETTER if better else Overall.UNCLEAR


def _sentence(worse: int, better: int, judged: int, candidate: str, baseline: str) -> str:
    of = f"of {quantity(judged, 'figures')}"
    if worse and better:
        return f"{candidate} is worse than {baseline} in {worse} {of} and better in {better}."
    if worse or better:
        which, n = (Standing.WORSE, worse) if worse else (Standing.BETTER, better)
        rest = "" if n == judged else "; the others show no clear difference"
        return f"{candidate} is {which} than {baseline} in {n} {of}{rest}."
    return f"{candidate} shows no clear difference from {baseline} in any {of}."


def _of_metrics(pairs: Sequence[Pair]) -> list[Pair]:
    """The first figure of each metric."""
    return list({pair.metric: pair for pair in reversed(pairs)}.values())[::-1]


def _line(side: Standing, pair: Pair) -> VerdictLine:
    name, unit = titled(pair.metric, pair.figure), pair.unit
    levels = f"{quantity(pair.baseline, unit)} to {quantity(pair.candidate, unit)}"
    if pair.ratio is None:
        return VerdictLine(side, f"{name} {levels}", f"{name}: {levels}")
    limits = between(pair.ratio_ci95, "")
    sure = "" if limits is None else f" (95 %: {limits})"
    in_steps = "" if pair.ratio_in_steps is None else f", in steps {times(pair.ratio_in_steps)}"
    ratio = times(pair.ratio)
    return VerdictLine(side, f"{name} {ratio}", f"{name}: {levels}, {ratio}{sure}{in_steps}")
