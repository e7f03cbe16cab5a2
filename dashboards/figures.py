"""Distributions and comparisons: frame in, figure out. Nothing here reads a file or a clock."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.downsample import Floats, rising_steps
from dashboards.ladders import log_time_axis
from dashboards.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, canvas
from dashboards.timelines import thin_marks
from harness.analysis.cancellation import was_cancelled
from harness.analysis.stats import kaplan_meier

RECOVERY_ARMS: Final = (("unloaded", GREEN), ("abandon", BLUE), ("control", GREY))
PHASES: Final = (
    ("waiting", "left while waiting", ORANGE, "dash"),
    ("prefill", "left in prefill", GREEN, "dot"),
    ("decode", "left in decode", PURPLE, "dashdot"),
)
FEWEST_OF_A_PHASE: Final = 5  # fewer do not make a distribution
LOG_FROM: Final = 20  # times the median: beyond it a linear axis would hide the middle


def cancel_latency(cancels: pd.DataFrame) -> go.Figure:
    """The share of abandoned requests that the server had let go of, by time since they left, for
    all and by what the request was doing.

    The Kaplan-Meier curve: a request that nobody stopped counts as longer than the settle time, or
    than it was watched, even if it ended by itself before; a cross marks how long. Needs at least
    one request.
    """
    figure = canvas(x_title="milliseconds since the user left", y_title="let go of")
    cancels = cancels[was_cancelled(cancels)]
    seconds = cancels["cancel_latency_s"].to_numpy(dtype=float)
    censored = cancels["censored"].to_numpy(dtype=bool)
    line = {"color": BLUE, "width": 3}
    times, shares = _add_curve(figure, cancels, name="all", line=line)
    phases = cancels["phase"].value_counts()
    if len(phases) > 1:
        for phase, label, colour, dash in PHASES:
            if phases.get(phase, 0) >= FEWEST_OF_A_PHASE:
                rows = cancels[cancels["phase"] == phase]
                line = {"color": colour, "width": 1.8, "dash": dash}
                _add_curve(figure, rows, name=label, line=line)
    if censored.any():
        ends = thin_marks(np.unique(seconds[censored]), seconds.max())
        figure.add_scatter(
            x=ends * 1e3,
            y=shares[np.searchsorted(times, ends, side="right") - 1],
            mode="markers",
            marker={"symbol": "x", "size": 9, "color": VERMILION},
            name=f"never stopped: {int(censored.sum())}",
            hovertemplate="counts as longer than %{x:.4~g} ms<extra></extra>",
        )
    figure.update_yaxes(tickformat=".0%", range=[0, 1.03])
    if seconds.max() > LOG_FROM * np.median(seconds):
        log_time_axis(figure, seconds[seconds > 0], title="since the user left (log)")
    else:
        figure.update_xaxes(range=[0, 1.03e3 * seconds.max()])
    return figure


def _add_curve(
    figure: go.Figure, cancels: pd.DataFrame, *, name: str, line: Mapping[str, Any]
) -> tuple[Floats, Floats]:
    curve = kaplan_meier(
        cancels["cancel_latency_s"].to_numpy(dtype=float),
        cancels["censored"].to_numpy(dtype=bool),
    )
    times, shares = np.append(0.0, curve.times), np.append(0.0, curve.done)
    drawn = rising_steps(shares)
    figure.add_scatter(
        x=times[drawn] * 1e3,
        y=shares[drawn],
        mode="lines",
        line={"shape": "hv", **line},
        name=name,
        hovertemplate="%{y:.1%} within %{x:.3~s} ms",
    )
    return times, shares


def cancel_steps(cancels: pd.DataFrame) -> go.Figure:
    """How many abandoned requests took how many step boundaries."""
    figure = canvas(x_title="step boundaries until let go", y_title="requests", height=240)
    steps = cancels.loc[~cancels["censored"].astype(bool), "cancel_latency_steps"].dropna()
    counts = steps.astype(int).value_counts().sort_index()
    figure.add_bar(
        x=counts.index.tolist(),
        y=counts.tolist(),
        marker_color=BLUE,
        hovertemplate="%{y} requests took %{x} steps<extra></extra>",
    )
    figure.update_layout(bargap=0.35)
    lowest, highest = int(counts.index.min()), int(counts.index.max())
    figure.update_xaxes(range=[min(lowest, 0) - 0.5, max(highest, 4) + 0.5])
    if highest < 20:
        figure.update_xaxes(dtick=1)
    return figure


def slot_recovery(waited: pd.DataFrame) -> go.Figure:
    """Every trial of `analysis.recovery.probes` as a dot, one row an arm, with its quartiles.

    A probe that saw no first token is a cross where it gave up, and in no box.
    """
    figure = canvas(x_title="milliseconds to the probe's first token", y_title="", height=260)
    is_censored = waited["censored"].astype(bool)
    for arm, colour in RECOVERY_ARMS:
        seconds = waited.loc[(waited["arm"] == arm) & ~is_censored, "recovery_s"]
        figure.add_box(
            x=(seconds * 1e3).tolist(),
            y=[arm] * len(seconds),
            name=arm,
            orientation="h",
            boxpoints="all",
            jitter=0.5,
            pointpos=0,
            marker={"color": colour, "size": 6, "opacity": 0.65},
            line={"width": 2},
            fillcolor="rgba(0,0,0,0)",
            hoverinfo="x",
        )
    gave_up = waited[is_censored & waited["arm"].isin([arm for arm, _ in RECOVERY_ARMS])]
    figure.add_scatter(
        x=(gave_up["recovery_s"] * 1e3).tolist(),
        y=gave_up["arm"].tolist(),
        mode="markers",
        marker={"symbol": "x", "size": 9, "color": VERMILION},
        hovertemplate="no first token within %{x:.3~s} ms<extra></extra>",
    )
    figure.update_layout(showlegend=False)
    arms = [arm for arm, _ in reversed(RECOVERY_ARMS)]
    figure.update_yaxes(categoryorder="array", categoryarray=arms, rangemode="normal")
    figure.update_xaxes(rangemode="tozero")
    return figure
