"""One arm against another, round by round.

The two runs of a round share a seed and follow each other closely, so what is compared is not two
heaps of runs but the pairs: what differs between rounds is in both of a pair and drops out.

Difference: mean of (arm - reference), with Student's t interval of paired differences.
Ratio: geometric mean of (arm / reference): the same on the logarithms, and back. A ratio is as
often halved as doubled by chance, which only its logarithm shows evenly.
Sources: Student, Biometrika 6 (1908), 1-25; Bland and Altman, BMJ 312 (1996), 1153.

Both intervals take the rounds for independent and about normal: they are as honest as that, and
with a handful of rounds nobody can check it.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from harness.analysis.stats import Floats, mean_ci95
from harness.differences import Difference

FEWEST_ROUNDS: Final = 3


def compare(
    arm: str,
    reference: str,
    values: Sequence[float | None],
    reference_values: Sequence[float | None],
) -> Difference:
    """Compare two arms by one value a round each; null where a round has none."""
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(values, reference_values, strict=True)
        if mine is not None and theirs is not None
    ]
    n = len(pairs)
    if not n:
        note = "no round has a value of both arms"
        return Difference(arm=arm, reference=reference, n=0, note=note)
    mine, theirs = np.array(pairs, dtype=float).T
    is_positive = bool((mine > 0).all() and (theirs > 0).all())
    ratio, ratio_ci95 = _ratio(mine, theirs) if is_positive else (None, None)
    return Difference(
        arm=arm,
        reference=reference,
        n=n,
        difference=float((mine - theirs).mean()),
        difference_ci95=_interval(mine - theirs),
        ratio=ratio,
        ratio_ci95=ratio_ci95,
        note=_note(n, len(values) - n, is_positive=is_positive),
    )


def is_certain(one: Difference) -> bool:
    """Does the ratio's interval leave out 1, or without one, the difference's interval 0?"""
    limits, same = one.ratio_ci95, 1.0
    if limits is None:
        limits, same = one.difference_ci95, 0.0
    return limits is not None and not limits[0] <= same <= limits[1]


def _ratio(mine: Floats, theirs: Floats) -> tuple[float, tuple[float, float] | None]:
    logs = np.log(mine) - np.log(theirs)
    limits = _interval(logs)
    ratio = float(np.exp(logs.mean()))
    return ratio, None if limits is None else (float(np.exp(limits[0])), float(np.exp(limits[1])))


def _interval(values: Floats) -> tuple[float, float] | None:
    return mean_ci95(values) if len(values) >= FEWEST_ROUNDS else None


def _note(n: int, num_left_out: int, *, is_positive: bool) -> str | None:
    """Why something is null, and how many rounds could not be compared."""
    said = []
    if n < FEWEST_ROUNDS:
        said.append(f"not enough data for an interval: {n} of at least {FEWEST_ROUNDS} rounds")
    elif not is_positive:
        said.append("not enough data for a ratio: a round has a value of zero, or below")
    if num_left_out:
        said.append(f"{num_left_out} of {n + num_left_out} rounds have no value of both arms")
    return "; ".join(said) or None
