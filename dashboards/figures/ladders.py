"""Quantiles as ladders: a row for each series, on one logarithmic time axis.

A ladder whose upper quantiles have only lower bounds ends in an arrow at the lowest of them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go

from dashboards.figures.look import (
    BLUE,
    GREY,
    POINT_TEXT,
    VERMILION,
    Floats,
    Properties,
    axis,
    plain,
    styled,
    whiskers,
)
from harness.formatting import quantity
from harness.records import Metric

MOST_TICKS: Final = 6  # with their units, on a phone
RUNGS: Final = (("p50", "circle", 11), ("p90", "diamond", 10), ("p99", "line-ns-open", 16))
_ARROW: Final = {"symbol": "triangle-right", "size": 13, "color": VERMILION}
_ROW_PX: Final = 34
_AROUND_PX: Final = 110  # legend and axis

Row = tuple[str, Metric]


def ladders(rows: Sequence[Row], *, intervals: bool = False) -> go.Figure:
    """Median, p90 and p99 of each metric (seconds); a metric without any is left out."""
    present = [(plain(label), metric) for label, metric in rows if _rungs(metric)]
    traces = [_line(row) for row in present]
    for key, symbol, size in RUNGS:
        known = [row for row in present if getattr(row[1], key)]
        marks = _marks(known, key, {"symbol": symbol, "size": size})
        if intervals and key == "p50":
            medians, limits = [one.p50 for _, one in known], [one.p50_ci95 for _, one in known]
            marks.error_x = whiskers(medians, limits, scale=1e3)
        traces.append(marks)
    open_ends = {label: bound for label, metric in present if (bound := _open_end(metric))}
    if open_ends:
        traces.append(_arrows(open_ends))
    every = [value for _, metric in present for value in _rungs(metric)]
    return styled(
        traces,
        x=log_time_axis(np.array(every), title="time (log)") if every else axis(""),
        y=axis("", autorange="reversed", rangemode="normal"),
        height=_AROUND_PX + _ROW_PX * max(len(present), 3),
    )


def _line(row: Row) -> go.Scatter:
    label, metric = row
    rungs = [value * 1e3 for value in _rungs(metric)]
    return go.Scatter(
        mode="lines",
        x=rungs,
        y=[label] * len(rungs),
        line={"color": GREY, "width": 2},
        showlegend=False,
        hoverinfo="skip",
    )


def _marks(rows: Sequence[Row], key: str, look: Properties) -> go.Scatter:
    values = [getattr(metric, key) for _, metric in rows]
    return go.Scatter(
        mode="markers",
        x=[value * 1e3 for value in values],
        y=[label for label, _ in rows],
        marker={**look, "color": BLUE, "line": {"width": 2}},
        name=key,
        customdata=[quantity(value, "s") for value in values],
        hovertemplate=POINT_TEXT,
    )


def _arrows(open_ends: Mapping[str, float]) -> go.Scatter:
    return go.Scatter(
        mode="markers",
        x=[end * 1e3 for end in open_ends.values()],
        y=list(open_ends),
        marker=_ARROW,
        name="longer than",
        customdata=[plain(f"> {quantity(end, 's')}") for end in open_ends.values()],
        hovertemplate=POINT_TEXT,
    )


def _rungs(metric: Metric) -> list[float]:
    known = [value for key, _, _ in RUNGS if (value := getattr(metric, key))]
    bound = _open_end(metric)
    return known if bound is None else [*known, bound]


def _open_end(metric: Metric) -> float | None:
    bounds = [bound for key, _, _ in RUNGS if (bound := metric.lower_bounds.get(key))]
    return min(bounds, default=None)


def log_time_axis(seconds: Floats, *, title: str) -> Properties:
    first = math.floor(math.log10(seconds.min() * 1e3))
    last = max(math.ceil(math.log10(seconds.max() * 1e3)), first + 1)
    ticks = [10.0**n for n in range(first, last + 1, 1 + (last - first) // MOST_TICKS)]
    texts = [quantity(tick / 1e3, "s") for tick in ticks]
    around = [first - 0.1, last + 0.15]
    return axis(title, type="log", range=around, tickvals=ticks, ticktext=texts)
