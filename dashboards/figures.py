"""Distributions and comparisons: frame in, figure out. Nothing here reads a file or a clock."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.downsample import Floats
from dashboards.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, canvas
from dashboards.words import quantity
from harness.analysis.cancellation import was_cancelled
from harness.analysis.stats import kaplan_meier
from harness.records import Metric

STAGES: Final = (
    ("detect_s", "detect: the server saw it", SKY),
    ("signal_s", "signal: the worker heard it", VERMILION),
    ("wait_s", "wait: out of the batch", ORANGE),
    ("free_s", "free: blocks reclaimed", BLUE),
)
CLIENT_TIMES: Final = (
    ("ttft_s", "first token (TTFT)"),
    ("itl_s", "between tokens (ITL)"),
    ("tpot_s", "per token (TPOT)"),
    ("e2e_s", "whole answer (E2E)"),
)
RECOVERY_ARMS: Final = (("unloaded", GREEN), ("abandon", BLUE), ("control", GREY))
PHASES: Final = (
    ("waiting", "left while waiting", ORANGE),
    ("prefill", "left in prefill", GREEN),
    ("decode", "left in decode", PURPLE),
)
FEWEST_OF_A_PHASE: Final = 5  # fewer do not make a distribution
LOG_FROM: Final = 20  # times the median: beyond it a linear axis would hide the middle
LADDER: Final = (("p50", "circle", 11), ("p90", "diamond", 10), ("p99", "line-ns-open", 16))


def cancel_stages(metrics: Mapping[str, Metric]) -> go.Figure:
    """Two stacked bars: the median of each stage, and its 99th percentile."""
    figure = canvas(x_title="milliseconds", y_title="", height=220)
    rows = (("p50", "median"), ("p99", "99th percentile"))
    for name, label, colour in STAGES:
        metric = metrics.get(name)
        if metric is None:
            continue
        drawn = [(row, value) for key, row in rows if (value := getattr(metric, key)) is not None]
        figure.add_bar(
            name=label,
            orientation="h",
            y=[row for row, _ in drawn],
            x=[value * 1e3 for _, value in drawn],
            customdata=[quantity(value, "s") for _, value in drawn],
            hovertemplate="%{customdata}<extra>" + label + "</extra>",
            marker_color=colour,
        )
    figure.update_layout(barmode="stack", bargap=0.35, legend_traceorder="normal")
    figure.update_yaxes(categoryarray=[row for _, row in reversed(rows)], categoryorder="array")
    return figure


def cancel_latency(cancels: pd.DataFrame) -> go.Figure:
    """The share of abandoned requests that the server had let go of, by time since they left, for
    all and by what the request was doing.

    The Kaplan-Meier curve: a request that was never let go of counts as "longer than it was
    watched" and is drawn as a cross where the watching ended. Needs at least one request.
    """
    figure = canvas(x_title="milliseconds since the user left", y_title="let go of")
    cancels = cancels[was_cancelled(cancels)]
    seconds = cancels["cancel_latency_s"].to_numpy(dtype=float)
    censored = cancels["censored"].to_numpy(dtype=bool)
    times, shares = _add_curve(figure, cancels, name="all", colour=BLUE, width=3)
    phases = cancels["phase"].value_counts()
    if len(phases) > 1:
        for phase, label, colour in PHASES:
            if phases.get(phase, 0) >= FEWEST_OF_A_PHASE:
                rows = cancels[cancels["phase"] == phase]
                _add_curve(figure, rows, name=label, colour=colour, width=1.5)
    if censored.any():
        ends = np.sort(seconds[censored])
        figure.add_scatter(
            x=ends * 1e3,
            y=shares[np.searchsorted(times, ends, side="right") - 1],
            mode="markers",
            marker={"symbol": "x", "size": 9, "color": VERMILION},
            name=f"never let go of while watched: {int(censored.sum())}",
            hovertemplate="still there after %{x:.3~s} ms<extra></extra>",
        )
    figure.update_yaxes(tickformat=".0%", range=[0, 1.03])
    if seconds.max() > LOG_FROM * np.median(seconds):
        figure.update_xaxes(type="log", title_text="milliseconds since the user left (log)")
    else:
        figure.update_xaxes(rangemode="tozero")
    return figure


def _add_curve(
    figure: go.Figure, cancels: pd.DataFrame, *, name: str, colour: str, width: float
) -> tuple[Floats, Floats]:
    curve = kaplan_meier(
        cancels["cancel_latency_s"].to_numpy(dtype=float),
        cancels["censored"].to_numpy(dtype=bool),
    )
    times, shares = np.append(0.0, curve.times), np.append(0.0, curve.done)
    figure.add_scatter(
        x=times * 1e3,
        y=shares,
        mode="lines",
        line={"shape": "hv", "width": width, "color": colour},
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


def waste_by_abandon_point(points: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Stacked bars: mean tokens generated before and after the user left, unread."""
    figure = canvas(x_title="the user left after", y_title="tokens for nobody, mean")
    names = [quantity(point["planned_abandon"], "tokens") for point in points]
    totals = [quantity(p["in_flight_mean"] + p["after_close_mean"], "") for p in points]
    parts = (
        ("in_flight_mean", "on the way when the user left", SKY),
        ("after_close_mean", "generated after the user had left", VERMILION),
    )
    for key, label, colour in parts:
        figure.add_bar(
            name=label,
            x=names,
            y=[point[key] for point in points],
            customdata=[point["n"] for point in points],
            marker_color=colour,
            hovertemplate="%{y:.3~g} tokens, mean of %{customdata} requests"
            + f"<extra>{label}</extra>",
        )
    figure.update_traces(
        selector=-1, text=totals, textposition="outside", textangle=0, cliponaxis=False
    )
    figure.update_layout(barmode="stack", bargap=0.4, legend_traceorder="normal")
    figure.update_xaxes(type="category")
    return figure


def client_times(metrics: Mapping[str, Metric]) -> go.Figure:
    """A ladder of quantiles for each time that surviving users felt, on one log axis."""
    figure = canvas(x_title="milliseconds (log)", y_title="", height=260)
    present = [(name, label) for name, label in CLIENT_TIMES if _has_quantiles(metrics.get(name))]
    for name, label in present:
        known = [value for key, _, _ in LADDER if (value := getattr(metrics[name], key))]
        figure.add_scatter(
            x=[value * 1e3 for value in known],
            y=[label] * len(known),
            mode="lines",
            line={"color": GREY, "width": 2},
            showlegend=False,
            hoverinfo="skip",
        )
    for key, symbol, size in LADDER:
        drawn = [
            (label, value) for name, label in present if (value := getattr(metrics[name], key))
        ]
        figure.add_scatter(
            x=[value * 1e3 for _, value in drawn],
            y=[label for label, _ in drawn],
            mode="markers",
            marker={"symbol": symbol, "size": size, "color": BLUE, "line": {"width": 2}},
            name=key,
            customdata=[quantity(value, "s") for _, value in drawn],
            hovertemplate="%{customdata}<extra>" + key + "</extra>",
        )
    figure.update_xaxes(type="log")
    figure.update_yaxes(autorange="reversed", rangemode="normal")
    return figure


def _has_quantiles(metric: Metric | None) -> bool:
    return metric is not None and bool(metric.p50)


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
