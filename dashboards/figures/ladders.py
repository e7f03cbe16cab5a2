"""Quantiles as ladders: a row for each series, on one logarithmic time axis.

A ladder whose upper quantiles have only lower bounds ends in an arrow at the lowest of them.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from dashboards.figures.canvas import BLUE, GREY, VERMILION, Figure, Floats, canvas, plain, whiskers
from harness.formatting import quantity
from harness.records import Metric

MOST_TICKS: Final = 6  # with their units, on a phone
RUNGS: Final = (("p50", "circle", 11), ("p90", "diamond", 10), ("p99", "line-ns-open", 16))
_ARROW: Final = {"symbol": "triangle-right", "size": 13, "color": VERMILION}
_ROW_PX: Final = 34
_AROUND_PX: Final = 110  # legend and axis

Row = tuple[str, Metric]


def ladders(rows: Sequence[Row], *, intervals: bool = False) -> Figure:
    """Median, p90 and p99 of each metric (seconds); a metric without any is left out."""
    present = [(plain(label), metric) for label, metric in rows if _rungs(metric)]
    figure = canvas(x_title="", y_title="", height=_AROUND_PX + _ROW_PX * max(len(present), 3))
    for label, metric in present:
        rungs = [value * 1e3 for value in _rungs(metric)]
        figure.add_line(rungs, [label] * len(rungs), None, {"color": GREY, "width": 2})
    for key, symbol, size in RUNGS:
        known = [
            (label, value, metric) for label, metric in present if (value := getattr(metric, key))
        ]
        labels, values = [label for label, *_ in known], [value for _, value, _ in known]
        limits = [metric.p50_ci95 for *_, metric in known]
        has_limits = intervals and key == "p50"
        figure.add_dots(
            [value * 1e3 for value in values],
            labels,
            [quantity(value, "s") for value in values],
            {"symbol": symbol, "size": size, "color": BLUE, "line": {"width": 2}},
            name=key,
            **({"error_x": whiskers(values, limits, scale=1e3)} if has_limits else {}),
        )
    open_ends = {label: bound for label, metric in present if (bound := _open_end(metric))}
    if open_ends:
        texts = [f"> {quantity(bound, 's')}" for bound in open_ends.values()]
        ends_ms = [bound * 1e3 for bound in open_ends.values()]
        figure.add_dots(ends_ms, list(open_ends), texts, _ARROW, name="longer than")
    if every := [value for _, metric in present for value in _rungs(metric)]:
        log_time_axis(figure, np.array(every), title="time (log)")
    figure.set_y(autorange="reversed", rangemode="normal")
    return figure


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
    texts = [quantity(tick / 1e3, "s") for tick in ticks]
    figure.set_x(type="log", range=[first - 0.1, last + 0.15], tickvals=ticks, ticktext=texts)
