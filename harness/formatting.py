"""Numbers as people read them: three significant digits and the unit that fits the size."""

import math
import re
from collections.abc import Mapping
from typing import Final

from harness.records import WENT_WRONG, Difference, Metric, Outcome, Shift

DASH: Final = "\N{EN DASH}"
_SELF_EVIDENT_UNITS: Final = frozenset({"s", "ratio", "bytes", "J", "W"})  # each says ms, %, MiB
SIGNS: Final = {"lower": "≥ ", "upper": "≤ "}
NEVER_NEGATIVE: Final = frozenset({"s", "tokens", "steps"})  # other units also measure changes
_SPOKEN: Final = {"rejected": "refused"}  # of an outcome
RATES: Final = {"rps": "per s", "tokens/s": "tokens/s"}


def number(value: float) -> str:
    """Three significant digits; whole numbers from a thousand on keep all theirs."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value + 0.0:,.0f}"  # + 0.0 turns -0 into 0
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def quantity(value: float | None, unit: str) -> str:
    """`0.0203, "s"` is "20.3 ms". A missing value is a dash, never 0."""
    if value is None or not math.isfinite(value):
        return DASH
    if unit == "s":
        return _duration(value)
    if unit == "ratio":
        return f"{number(100 * value)} %"
    if unit == "bytes":
        return _bytes(value)
    if not unit:
        return number(value)
    if unit in RATES:
        return f"{number(value)} {RATES[unit]}"
    return f"{number(value)} {unit.removesuffix('s') if value == 1 else unit}"


def times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{number(ratio)}x"


def unit_in_figure(unit: str) -> str:
    """The unit to show behind each figure; "" for one that stands in the label of them all."""
    return unit if unit in _SELF_EVIDENT_UNITS else ""


def _duration(seconds: float) -> str:
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 1e-3:
        return f"{number(seconds * 1e6)} µs"
    if size < 1:
        return f"{number(seconds * 1e3)} ms"
    if size < 120:
        return f"{number(seconds)} s"
    return f"{number(seconds / 60)} min"


def _bytes(value: float) -> str:
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{number(value / size)} {name}"
    return f"{number(value)} B"


def figure_of(metric: Metric, name: str, *, unit: str | None = None) -> str:
    shown_unit = metric.unit if unit is None else unit
    value, bound = getattr(metric, name), metric.lower_bounds.get(name)
    if value is None and bound is not None:
        return f"> {quantity(bound, shown_unit)}"
    return quantity(value, shown_unit)


def bounded(metric: Metric, name: str, *, unit: str | None = None) -> str:
    if name == "mean" and is_only_limited(metric):
        return f"≤ {quantity(metric.upper95, metric.unit if unit is None else unit)}"
    sign = SIGNS.get(metric.bound, "") if getattr(metric, name) is not None else ""
    return sign + figure_of(metric, name, unit=unit)


def in_all(metric: Metric, *, unit: str) -> str:
    if metric.mean is None:
        return DASH
    total = metric.n * metric.mean
    whole = total if metric.unit == "J" else round(total)
    return f"{SIGNS.get(metric.bound, '')}{quantity(whole, unit)} in all"


def is_only_limited(metric: Metric) -> bool:
    return metric.mean is None and metric.bound == "upper" and metric.upper95 is not None


def is_p99_the_largest(metric: Metric) -> bool:
    return metric.p99 is not None and metric.n < 100 and metric.p99 == metric.max


def shift_in_words(name: str, arm: str, reference: str, shift: Shift, unit: str) -> str | None:
    """ "ttft_s of each request: on against off -12 ms (-20 to -3 ms), larger in 41 % of pairs".

    None if no superiority is known.
    """
    if shift.superiority is None:
        return None
    how_often = f"larger in {quantity(shift.superiority, 'ratio')} of pairs"
    parts = [how_often]
    if shift.shift is not None:
        sign = "+" if shift.shift > 0 else ""
        limits = between(shift.shift_ci95, unit)
        sure = "" if limits is None else f" ({limits})"
        parts.insert(0, f"{sign}{quantity(shift.shift, unit)}{sure}")
    endless = shift.n_censored, shift.n_reference_censored
    if any(endless):
        parts.append(f"without an end {endless[0]:,} and {endless[1]:,}")
    return f"{name} of each request: {arm} against {reference} {', '.join(parts)}"


def change_in_words(change: Difference, unit: str) -> tuple[str, str]:
    if change.ratio is not None:
        return f"{number(change.ratio)} times", between(change.ratio_ci95, "") or DASH
    value, limits = change.difference, change.difference_ci95
    if value is None:
        return DASH, DASH
    if unit == "ratio":
        unit, value = "percentage points", 100 * value
        limits = None if limits is None else (100 * limits[0], 100 * limits[1])
    sign = "" if value < 0 else "+"
    return f"{sign}{quantity(value, unit)}", between(limits, unit) or DASH


def interval(metric: Metric, name: str, *, unit: str | None = None) -> str | None:
    """The 95 % interval of a figure, such as "1.5 to 2 ms"; None if it has none.

    A bound has no interval: the distance of the true value is unknown. A symmetrical interval of
    times or tokens is cut at 0.
    """
    if metric.bound != "point":
        return None
    limits: tuple[float, float] | None = getattr(metric, f"{name}_ci95", None)
    may_clip = metric.unit in NEVER_NEGATIVE and (getattr(metric, name) or 0.0) >= 0.0
    if limits is not None and may_clip:
        limits = max(limits[0], 0.0), limits[1]
    return between(limits, metric.unit if unit is None else unit)


def between(limits: tuple[float, float] | None, unit: str) -> str | None:
    if limits is None:
        return None
    low, high = (quantity(limit, unit) for limit in limits)
    low_number, _, low_unit = low.partition(" ")
    is_same_unit = bool(low_unit) and low_unit == high.partition(" ")[2]
    return f"{low_number if is_same_unit else low} to {high}"


def spoken_outcome(outcome: str) -> str:
    """The outcome for sentences: "timed out", "refused"."""
    return _SPOKEN.get(outcome, outcome).replace("_", " ")


def error_kind(text: str) -> str:
    """Errors of one kind differ in their numbers only: ports, ids, sizes."""
    return re.sub(r"\d+", "#", text)


def why_unanswered(outcomes: Mapping[Outcome, int], error: str | None, same: int) -> str:
    """The load got not one answer, and some of its requests went wrong. `error`: the commonest
    error, with which `same` requests ended."""
    wrong, n = sum(outcomes.get(outcome, 0) for outcome in WENT_WRONG), sum(outcomes.values())
    verb = "were refused" if wrong == outcomes.get(Outcome.REJECTED, 0) else "failed"
    how_many = f"all {n} requests" if wrong == n else f"{wrong} of {n} requests"
    why = error or "no reason is known"
    return f"{how_many} {verb}, and none was answered; {same} of them: {why}"
