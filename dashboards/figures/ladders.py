"""Quantiles as ladders: a row for each series, on one logarithmic time axis.

A ladder whose upper rungs are known only to lie higher ends in an arrow where that begins.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from dashboards.figures.canvas import (
    BLUE,
    GREY,
    VERMILION,
    Figure,
    Floats,
    canvas,
    plain,
    whiskers,
)
from harness.formatting import quantity
from harness.records import Metric

MOST_TICKS: Final = 6  # with their units, on a phone
RUNGS: Final = (("p50", "circle", 11), ("p90", "diamond", 10), ("p99", "line-ns-open", 16))
_ROW_PX: Final = 34
_AROUND_PX: Final = 110  # legend and axis

Row = tuple[str, Metric]


def ladders(rows: Sequence[Row], *, intervals: bool = False) -> Figure:
    """Median, p90 and p99 of each metric (seconds); a metric without any is left out."""
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
        drawn = [
            (label, value, metric) for label, metric in present if (value := getattr(metric, key))
        ]
        figure.add_scatter(
            x=[value * 1e3 for _, value, _ in drawn],
            y=[label for label, *_ in drawn],
            mode="markers",
            marker={"symbol": symbol, "size": size, "color": BLUE, "line": {"width": 2}},
            name=key,
            customdata=[quantity(value, "s") for _, value, _ in drawn],
            hovertemplate="%{customdata}<extra>" + key + "</extra>",
        )
        if intervals and key == "p50":
            figure.data[-1]["error_x"] = whiskers([_median_ms(one) for *_, one in drawn])
    _add_open_ends(figure, present)
    if every := [value for _, metric in present for value in _rungs(metric)]:
        log_time_axis(figure, np.array(every), title="time (log)")
    figure.set_y(autorange="reversed", rangemode="normal")
    return figure


def _median_ms(metric: Metric) -> tuple[float, tuple[float, float] | None]:
    limits = metric.p50_ci95
    ends = None if limits is None else (limits[0] * 1e3, limits[1] * 1e3)
    return (metric.p50 or 0.0) * 1e3, ends


def _add_open_ends(figure: Figure, rows: Sequence[Row]) -> None:
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
    known = [value for key, _, _ in RUNGS if (value := getattr(metric, key))]
    bound = _open_end(metric)
    return known if bound is None else [*known, bound]


def _open_end(metric: Metric) -> float | None:
    bounds = [bound for key, _, _ in RUNGS if (bound := metric.lower_bounds.get(key))]
    return min(bounds, default=None)


def log_time_axis(figure: Figure, seconds: Floats, *, title: str) -> None:
    first = math.floor(math.log10(seconds.min() * 1e3))
    last = max(math.ceil(math.log10(seconds.max() * 1e3)), first + 1)
    ticks = [10.0**n for n in range(first, last + 1, 1 + (last - first) // MOST_TICKS)]
    figure.layout["xaxis"]["title"]["text"] = title
    figure.set_x(
        type="log",
        range=[first - 0.1, last + 0.15],
        tickvals=ticks,
        ticktext=[quantity(tick / 1e3, "s") for tick in ticks],
    )
