"""Numbers as people read them: three significant digits and the unit that fits the size."""

import math
from typing import Final

from harness.analysis.paired import Difference
from harness.records import Metric

DASH: Final = "\N{EN DASH}"
SELF_EVIDENT_UNITS: Final = frozenset({"s", "ratio", "bytes"})  # each figure says ms, %, MiB
RATES: Final = {"rps": "per s", "tokens/s": "tokens/s"}


def number(value: float) -> str:
    """Three significant digits; whole numbers from a thousand on keep all theirs."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def quantity(value: float | None, unit: str) -> str:
    """`0.0203, "s"` is "20.3 ms". A value that is not there is a dash, never 0."""
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
    """One figure of a metric (`p99`, `mean`); one that lies among the censored reads "> 2 s"."""
    shown_unit = metric.unit if unit is None else unit
    value, bound = getattr(metric, name), metric.lower_bounds.get(name)
    if value is None and bound is not None:
        return f"> {quantity(bound, shown_unit)}"
    return quantity(value, shown_unit)


def difference_in_words(one: Difference) -> str:
    """ "on / off = 0.41 (0.35 to 0.48), 5 rounds"; where there is no ratio, the difference."""
    what, value, limits = f"{one.arm} / {one.reference}", one.ratio, one.ratio_ci95
    if value is None:
        what = f"{one.arm} - {one.reference}"
        value, limits = one.difference, one.difference_ci95
    shown = DASH if value is None else number(value)
    shown_limits = "" if limits is None else f" ({number(limits[0])} to {number(limits[1])})"
    return f"{what} = {shown}{shown_limits}, {quantity(one.n, 'rounds')}"


def interval(metric: Metric, name: str, *, unit: str | None = None) -> str | None:
    """The 95 % interval of a figure, or None where there is none: "1.5 to 2 ms"."""
    limits = getattr(metric, f"{name}_ci95", None)
    if limits is None:
        return None
    low, high = (quantity(limit, metric.unit if unit is None else unit) for limit in limits)
    low_number, _, low_unit = low.partition(" ")
    is_same_unit = bool(low_unit) and low_unit == high.partition(" ")[2]
    return f"{low_number if is_same_unit else low} to {high}"
