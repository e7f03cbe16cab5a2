"""Quantiles as ladders: a row for each thing, on one logarithmic time axis.

A ladder whose upper rungs are known only to lie higher ends in an arrow where that begins.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go

from dashboards.downsample import Floats
from dashboards.theme import BLUE, GREY, VERMILION, canvas, plain
from harness.formatting import quantity
from harness.records import Metric

CLIENT_TIMES: Final = (
    ("ttft_s", "first token (TTFT)"),
    ("ttft_from_intended_s", "... from the intended start"),
    ("itl_s", "between tokens (ITL)"),
    ("tpot_s", "per token (TPOT)"),
    ("e2e_s", "whole answer (E2E)"),
    ("e2e_from_intended_s", "... of it from the intended start"),
)
MOST_TICKS: Final = 6  # with their units, on a phone
RUNGS: Final = (("p50", "circle", 11), ("p90", "diamond", 10), ("p99", "line-ns-open", 16))
_ROW_PX: Final = 34
_AROUND_PX: Final = 110  # legend and axis

Row = tuple[str, Metric]


def client_times(metrics: Mapping[str, Metric]) -> go.Figure:
    """A ladder for each time that surviving users felt."""
    return ladders([(label, metrics[name]) for name, label in CLIENT_TIMES if name in metrics])


def ladders(rows: Sequence[Row]) -> go.Figure:
    """Median, p90 and p99 of each metric (seconds), in the order given; one without is left out."""
    present = [(plain(label), metric) for label, metric in rows if _rungs(metric)]
    figure = canvas(x_title="", y_title="", height=_AROUND_PX + _ROW_PX * max(len(present), 3))
    for label, metric in present:
        rungs = _rungs(metric)
        figure.add_scatter(
            x=[value * 1e3 for value in rungs],
            y=[label] * len(rungs),
            mode="lines",
            line={"color": GREY, "width": 2},
            showlegend=False,
            hoverinfo="skip",
        )
    for key, symbol, size in RUNGS:
        drawn = [(label, value) for label, metric in present if (value := getattr(metric, key))]
        figure.add_scatter(
            x=[value * 1e3 for _, value in drawn],
            y=[label for label, _ in drawn],
            mode="markers",
            marker={"symbol": symbol, "size": size, "color": BLUE, "line": {"width": 2}},
            name=key,
            customdata=[quantity(value, "s") for _, value in drawn],
            hovertemplate="%{customdata}<extra>" + key + "</extra>",
        )
    _add_open_ends(figure, present)
    if every := [value for _, metric in present for value in _rungs(metric)]:
        log_time_axis(figure, np.array(every), title="time (log)")
    figure.update_yaxes(autorange="reversed", rangemode="normal")
    return figure


def _add_open_ends(figure: go.Figure, rows: Sequence[Row]) -> None:
    ends = [(label, bound) for label, metric in rows if (bound := _open_end(metric))]
    if ends:
        figure.add_scatter(
            x=[bound * 1e3 for _, bound in ends],
            y=[label for label, _ in ends],
            mode="markers",
            marker={"symbol": "triangle-right", "size": 13, "color": VERMILION},
            name="longer than",
            customdata=[quantity(bound, "s") for _, bound in ends],
            hovertemplate="> %{customdata}<extra></extra>",
        )


def _rungs(metric: Metric) -> list[float]:
    """The quantiles that are known, then what the others are known to exceed."""
    known = [value for key, _, _ in RUNGS if (value := getattr(metric, key))]
    bound = _open_end(metric)
    return known if bound is None else [*known, bound]


def _open_end(metric: Metric) -> float | None:
    bounds = [bound for key, _, _ in RUNGS if (bound := metric.lower_bounds.get(key))]
    return min(bounds, default=None)


def log_time_axis(figure: go.Figure, seconds: Floats, *, title: str) -> None:
    """Whole decades of milliseconds, each tick with its unit."""
    first = math.floor(math.log10(seconds.min() * 1e3))
    last = max(math.ceil(math.log10(seconds.max() * 1e3)), first + 1)
    ticks = [10.0**n for n in range(first, last + 1, 1 + (last - first) // MOST_TICKS)]
    figure.update_xaxes(
        type="log",
        title_text=title,
        range=[first - 0.1, last + 0.15],
        tickvals=ticks,
        ticktext=[quantity(tick / 1e3, "s") for tick in ticks],
    )
