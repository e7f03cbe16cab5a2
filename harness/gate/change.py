"""How a figure differs from another arm's, or from the baseline's: between which values.

Two arms of one run are compared round by round (`harness.analysis.paired`). Run and baseline share
no rounds: their values a round are two samples, compared by Welch's t interval of the difference of
their means; a ratio is the same on logarithms, and back.
Source: Welch, Biometrika 34 (1947), 28-35.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from harness.analysis.distributions import t_quantile
from harness.analysis.paired import FEWEST_ROUNDS, compare
from harness.analysis.stats import Floats
from harness.gate.known import Known, Unknown
from harness.gate.limits import Limit
from harness.words import number

Values = Sequence[float | None]
_MORE_ROUNDS: Final = f"at least {FEWEST_ROUNDS} rounds of both (`[[arms]]` and `run.rounds`)"


def between_arms(limit: Limit, mine: Values, theirs: Values) -> Known | Unknown:
    """The paired rounds of two arms."""
    if limit.relation == "/" and _are_all_zero(mine) and _are_all_zero(theirs):
        return _both_zero(len(mine))
    one = compare(limit.arm, str(limit.against), mine, theirs)
    value, limits = one.ratio, one.ratio_ci95
    if limit.relation == "-":
        value, limits = one.difference, one.difference_ci95
    if value is None or limits is None:
        to_decide = _MORE_ROUNDS if one.n < FEWEST_ROUNDS else _difference_instead(limit)
        return Unknown(reason=one.note or "nothing to compare", to_decide=to_decide)
    return _range(value, limits, f"{one.n} rounds")


def since_baseline(limit: Limit, mine: Values, theirs: Values) -> Known | Unknown:
    """The rounds of the run against those of the baseline."""
    here, there = _known(mine), _known(theirs)
    if min(len(here), len(there)) < FEWEST_ROUNDS:
        return Unknown(
            reason=f"{len(here)} and {len(there)} rounds (run, baseline) tell of no interval",
            to_decide=_MORE_ROUNDS,
        )
    rounds = f"{len(here)} against {len(there)} rounds"
    if limit.relation == "-":
        return _range(float(here.mean() - there.mean()), _welch_ci95(here, there), rounds)
    if not here.any() and not there.any():
        return _both_zero(len(here))
    if (here <= 0).any() or (there <= 0).any():
        reason = "a round has a value of zero, or below: there is no ratio"
        return Unknown(reason=reason, to_decide=_difference_instead(limit))
    logs = np.log(here), np.log(there)
    low, high = _welch_ci95(*logs)
    ratio = math.exp(float(logs[0].mean() - logs[1].mean()))
    return _range(ratio, (math.exp(low), math.exp(high)), rounds)


def _welch_ci95(here: Floats, there: Floats) -> tuple[float, float]:
    """Difference of means ± t(0.975, Welch-Satterthwaite) * its standard error."""
    difference = float(here.mean() - there.mean())
    parts = [float(values.var(ddof=1)) / len(values) for values in (here, there)]
    if not sum(parts):
        return difference, difference
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (here, there), strict=True)
    )
    half = t_quantile(0.975, freedom) * math.sqrt(sum(parts))
    return difference - half, difference + half


def _range(value: float, limits: tuple[float, float], rounds: str) -> Known:
    low, high = limits
    return Known(
        low=low,
        high=high,
        shown=f"{number(value)} ({number(low)} to {number(high)}), {rounds}",
        to_decide="more rounds: `run.rounds`",
    )


def _both_zero(num_rounds: int) -> Known:
    return Known(low=1.0, high=1.0, shown=f"both 0 in all of {num_rounds} rounds", to_decide="")


def _difference_instead(limit: Limit) -> str:
    return f"a limit on the difference: `{limit.arm} - {limit.against}: ...`"


def _are_all_zero(values: Values) -> bool:
    return bool(values) and all(value == 0 for value in values)


def _known(values: Values) -> Floats:
    return np.array([value for value in values if value is not None], dtype=float)
