"""A comparison in words: its figures as cells, and which are not compared and why."""

from collections.abc import Iterable
from typing import Final

from harness.analysis.figure_pairs import Pair
from harness.analysis.standing import is_sure
from harness.comparison import BASELINE, CANDIDATE, Comparison
from harness.words import DASH, SELF_EVIDENT_UNITS, between, bounded, number, quantity

CERTAIN: Final = "*"
TELLING: Final = 0.02  # steps that differ by less change no third digit that means anything


def name_of(pair: Pair) -> str:
    """`cancel_latency_s p50`; of a mean the metric alone."""
    return pair.metric if pair.figure == "mean" else f"{pair.metric} {pair.figure}"


def cells(comparison: Comparison, pair: Pair) -> dict[str, str]:
    """The figure in both runs and how they differ, by the head of the column."""
    unit = pair.unit if pair.unit in SELF_EVIDENT_UNITS else ""
    mark = CERTAIN if is_sure(pair) else ""
    values = {
        side: bounded(comparison.metrics[side][pair.metric], pair.figure, unit=unit)
        if pair.metric in comparison.metrics[side]
        else DASH
        for side in (BASELINE, CANDIDATE)
    }
    return {
        "figure": name_of(pair),
        **values,
        "difference": f"{_signed(pair.difference, unit)}{mark}",
        "95 %": between(pair.difference_ci95, unit) or DASH,
        "times": times(pair.ratio),
        "in steps": times(pair.ratio_in_steps),
    }


def steps_differ(comparison: Comparison) -> bool:
    """Whether a ratio in steps tells more than the ratio itself."""
    return any(
        pair.ratio and pair.ratio_in_steps and abs(pair.ratio_in_steps / pair.ratio - 1) > TELLING
        for pair in comparison.pairs
    )


def not_compared(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    """By reason, the figures that are not compared."""
    reasons: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.note is not None:
            reasons.setdefault(pair.note, []).append(name_of(pair))
    return reasons


def times(ratio: float | None) -> str:
    """ "2.8x", or a dash."""
    return DASH if ratio is None else f"{number(ratio)}x"


def _signed(value: float | None, unit: str) -> str:
    return ("+" if value is not None and value > 0 else "") + quantity(value, unit)
