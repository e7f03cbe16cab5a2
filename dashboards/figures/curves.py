"""Distributions of cancels and of recoveries: every request counts, even one without an end.

The curve is the Kaplan-Meier estimate: a request that the server never stopped counts as longer
than it was watched, even if it ended by itself before.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.ladders import log_time_axis
from dashboards.figures.look import (
    BLUE,
    CYCLE,
    DASHES,
    GREEN,
    GREY,
    NO_NAME,
    ORANGE,
    PURPLE,
    VERMILION,
    Floats,
    Properties,
    axis,
    plain,
    styled,
)
from dashboards.figures.timeline import thin_marks
from harness.analysis.cancel_figures import latency_sample
from harness.analysis.cancellations import was_cancelled
from harness.metrics import CANCEL_LATENCY_STEPS
from harness.records import TrialArm
from harness.stats import Curve

STEPS: Final = 1_000  # in which a curve is drawn: none is more than 0.1 % of its height
RECOVERY_ARMS: Final = (  # upwards
    (TrialArm.CONTROL, GREY),
    (TrialArm.ABANDON, BLUE),
    (TrialArm.UNLOADED, GREEN),
)
PHASES: Final = (
    ("waiting", "left while waiting", ORANGE, "dash"),
    ("prefill", "left in prefill", GREEN, "dot"),
    ("decode", "left in decode", PURPLE, "dashdot"),
)
FEWEST_OF_A_PHASE: Final = 5  # fewer do not make a distribution
LOG_FROM: Final = 20  # times the median: beyond it a linear axis would hide the middle
_BOX: Final = 0.25  # of a row: half the height of a box
_GOLDEN: Final = 0.618034  # multiples of it, less their whole part, spread dots evenly
_CROSS: Final = {"symbol": "x", "size": 9, "color": VERMILION}
_LET_GO: Final = axis("let go of", tickformat=".0%", range=[0, 1.03])


def rising_steps(y: Floats, *, steps: int = STEPS) -> npt.NDArray[np.int64]:
    """The points of a rising curve to draw: the first to reach each of `steps` equal parts of its
    height. As steps they lie nowhere above the true curve, and less than one part below it.
    """
    if len(y) <= steps + 2:
        return np.arange(len(y))
    levels = np.linspace(y[0], y[-1], steps + 1)
    reached = np.minimum(np.searchsorted(y, levels), len(y) - 1)
    return np.unique(np.concatenate([[0], reached, [len(y) - 1]]))


def rising_note(points: int, *, steps: int = STEPS) -> str | None:
    if points <= steps:
        return None
    return f"{points:,} requests, drawn in {steps:,} steps: nowhere above the true curve."


def cancel_latency(cancels: pd.DataFrame) -> go.Figure:
    """A cross marks how long a request without an end was watched. Needs at least one request."""
    cancels = cancels[was_cancelled(cancels)]
    curve = latency_sample(cancels).curve()
    traces = [_curve(curve.times * 1e3, curve.done, name="all", line={"width": 3})]
    phases = cancels["phase"].value_counts()
    for phase, label, colour, dash in PHASES if len(phases) > 1 else ():
        if phases.get(phase, 0) >= FEWEST_OF_A_PHASE:
            one = latency_sample(cancels[cancels["phase"] == phase]).curve()
            line = {"color": colour, "width": 1.8, "dash": dash}
            traces.append(_curve(one.times * 1e3, one.done, name=label, line=line))
    if curve.censored.any():
        traces.append(_never_stopped(curve))
    longest = curve.times.max()
    if longest > LOG_FROM * np.median(curve.times):
        x = log_time_axis(curve.times[curve.times > 0], title="since the user left (log)")
    else:
        x = axis("milliseconds since the user left", range=[0, 1.03e3 * longest])
    return styled(traces, x=x, y=_LET_GO)


def _never_stopped(curve: Curve) -> go.Scatter:
    ends = thin_marks(np.unique(curve.times[curve.censored]), curve.times.max())
    heights = np.append(0.0, curve.done)[np.searchsorted(curve.times, ends, side="right")]
    return go.Scatter(
        mode="markers",
        x=ends * 1e3,
        y=heights,
        marker=_CROSS,
        name=f"never stopped: {curve.n_censored}",
        hovertemplate="counts as longer than %{x:.4~g} ms" + NO_NAME,
    )


def cancel_curves(curves: Mapping[str, Curve], *, units: Mapping[str, float], of: str) -> go.Figure:
    """A curve for each run, flat after its last request was let go.

    `units`: how many seconds the unit of the x axis has, by run; `of`: the name of that unit.
    """
    known = {label: _let_go(curve, units[label]) for label, curve in curves.items()}
    end = max(float(times[-1]) for times, _ in known.values())
    traces = []
    for place, (label, (times, shares)) in enumerate(known.items()):
        colour, dash = CYCLE[place % len(CYCLE)], DASHES[place % len(DASHES)]
        line = {"width": 2.5, "color": colour, "dash": dash}
        hover = "%{y:.1%} within %{x:.3~g}"
        ends = np.append(times, end), np.append(shares, shares[-1])
        traces.append(_curve(*ends, name=plain(label), line=line, hover=hover))
    middles = [float(np.median(times)) for times, _ in known.values()]
    is_log = 0 < LOG_FROM * min(middles) < end
    look: Properties = {"type": "log"} if is_log else {"range": [0, 1.03 * (end or 1.0)]}
    return styled(traces, x=axis(f"{of} since the user left", **look), y=_LET_GO)


def _let_go(curve: Curve, unit_s: float) -> tuple[Floats, Floats]:
    known = ~curve.censored
    if not known.any():
        return np.zeros(1), np.zeros(1)
    return curve.times[known] / unit_s, curve.done[known]


def _curve(
    times: Floats,
    shares: Floats,
    *,
    name: str,
    line: Mapping[str, Any],
    hover: str = "%{y:.1%} within %{x:.3~s} ms",
) -> go.Scatter:
    times, shares = np.append(0.0, times), np.append(0.0, shares)
    drawn = rising_steps(shares)
    return go.Scatter(
        mode="lines",
        x=times[drawn],
        y=shares[drawn],
        line={"shape": "hv", "color": BLUE, **line},
        name=name,
        hovertemplate=hover,
    )


def cancel_steps(cancels: pd.DataFrame) -> go.Figure:
    steps = cancels.loc[~cancels["censored"].astype(bool), CANCEL_LATENCY_STEPS].dropna()
    counts = steps.astype(int).value_counts().sort_index()
    bars = go.Bar(
        x=counts.index.tolist(),
        y=counts.tolist(),
        marker={"color": BLUE},
        showlegend=False,
        hovertemplate="%{y} requests took %{x} steps" + NO_NAME,
    )
    lowest, highest = int(counts.index.min()), int(counts.index.max())
    around = [min(lowest, 0) - 0.5, max(highest, 4) + 0.5]
    x = axis("step boundaries until let go", range=around, dtick=1 if highest < 20 else None)
    return styled([bars], x=x, y=axis("requests"), height=240, bargap=0.35)


def slot_recovery(waited: pd.DataFrame) -> go.Figure:
    is_censored = waited["censored"].astype(bool)
    rows, traces, boxes = [arm for arm, _ in RECOVERY_ARMS], [], []
    for row, (arm, colour) in enumerate(RECOVERY_ARMS):
        seconds = waited.loc[(waited["arm"] == arm) & ~is_censored, "recovery_s"]
        dots_ms = seconds.to_numpy(dtype=float) * 1e3
        traces.append(_spread_dots(dots_ms, row, arm, colour))
        if len(dots_ms):
            boxes += _box(dots_ms, row, colour)
    gave_up = waited[is_censored & waited["arm"].isin(rows)]
    crosses = go.Scatter(
        mode="markers",
        x=gave_up["recovery_s"].to_numpy(dtype=float) * 1e3,
        y=[rows.index(arm) for arm in gave_up["arm"]],
        marker=_CROSS,
        hovertemplate="no first token within %{x:.3~s} ms" + NO_NAME,
    )
    return styled(
        [*traces, crosses],
        x=axis("milliseconds to the probe's first token", rangemode="tozero"),
        y=axis("", **_row_ticks(rows)),
        height=260,
        showlegend=False,
        shapes=boxes,
    )


def _spread_dots(dots_ms: Floats, row: int, arm: str, colour: str) -> go.Scatter:
    spread = np.arange(1, len(dots_ms) + 1) * _GOLDEN % 1 - 0.5
    return go.Scatter(
        mode="markers",
        x=dots_ms,
        y=row + 1.6 * _BOX * spread,
        marker={"color": colour, "size": 6, "opacity": 0.65},
        name=arm,
        hovertemplate="%{x:.3~s} ms",
    )


def _row_ticks(rows: Sequence[str]) -> Properties:
    ticks = {"tickvals": list(range(len(rows))), "ticktext": rows, "showgrid": False}
    return {**ticks, "range": [-0.5, len(rows) - 0.5], "rangemode": "normal"}


def _box(values: Floats, row: float, colour: str) -> list[Properties]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    reach = 1.5 * (high - low)
    first = values[values >= low - reach].min()
    last = values[values <= high + reach].max()
    line = {"color": colour, "width": 2}
    return [
        {"type": kind, "x0": x0, "x1": x1, "y0": row - half, "y1": row + half, "line": line}
        for kind, x0, x1, half in (
            ("rect", low, high, _BOX),
            ("line", middle, middle, _BOX),
            ("line", first, low, 0.0),
            ("line", high, last, 0.0),
        )
    ]
