"""Where the time of a cancel goes, as bars that never look better than the server was.

A stage that many requests never came out of has no median, only a time that it exceeds. Such a part
of a bar is the last of its row: what came after it nobody saw, or only the lucky ones. It reaches
as far as is known; where that would leave no room for the parts that are known, it is cut off, and
its label, which always tells how long it was at least, says so.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import plotly.graph_objects as go

from dashboards.theme import BLUE, GREEN, ORANGE, SKY, VERMILION, canvas, pattern
from harness.formatting import figure_of
from harness.records import Metric

STAGES: Final = (
    ("detect_s", "detect: the server saw it", SKY, ""),
    ("signal_s", "signal: the worker heard it", VERMILION, "x"),
    ("wait_s", "wait: out of the batch", ORANGE, "-"),
    ("free_s", "free: blocks reclaimed", BLUE, "|"),
    ("slot_refill_s", "refill: taken by the next", GREEN, "."),
)
OPEN: Final = "/"
CUT_FROM: Final = 3  # times the longest row of known parts: an open part beyond it is cut off
CUT_TO: Final = 0.5  # of that row
STAGE_ROWS: Final = (("p50", "median"), ("p99", "99th percentile"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """How long a stage took; an open one is known only to have lasted longer than `seconds`."""

    seconds: float
    text: str
    is_open: bool


def stage_parts(metrics: Mapping[str, Metric], key: str) -> dict[str, StagePart]:
    """A quantile of each stage, up to the first that is open: what came after it nobody saw."""
    parts: dict[str, StagePart] = {}
    for name, *_ in STAGES:
        if (metric := metrics.get(name)) is None:
            continue
        exact, bound = getattr(metric, key), metric.lower_bounds.get(key)
        seconds = bound if exact is None else exact
        if seconds is None:
            break
        is_open = exact is None
        parts[name] = StagePart(seconds=seconds, text=figure_of(metric, key), is_open=is_open)
        if is_open:
            break
    return parts


def cancel_stages(metrics: Mapping[str, Metric]) -> go.Figure:
    """Two rows of stacked bars: the median of each stage, and its 99th percentile.

    A stage that is known only to have lasted longer says so with an arrow, and ends its row.
    """
    figure = canvas(x_title="milliseconds", y_title="", height=220)
    rows = [(label, stage_parts(metrics, key)) for key, label in STAGE_ROWS]
    most_s = open_at_most(parts for _, parts in rows)
    for name, label, colour, shape in STAGES:
        drawn = [(row, parts[name]) for row, parts in rows if name in parts]
        if not drawn:
            continue
        figure.add_bar(
            name=label,
            orientation="h",
            y=[row for row, _ in drawn],
            x=[_drawn_s(part, most_s) * 1e3 for _, part in drawn],
            customdata=[part.text for _, part in drawn],
            hovertemplate="%{customdata}<extra>" + label + "</extra>",
            marker={
                "color": colour,
                "pattern": pattern([OPEN if part.is_open else shape for _, part in drawn]),
            },
        )
    for row, parts in rows:
        _label_open_end(figure, row, parts, most_s)
    figure.update_layout(barmode="stack", bargap=0.45, legend_traceorder="normal", showlegend=True)
    figure.update_yaxes(
        categoryarray=[row for row, _ in reversed(rows)], categoryorder="array", tickmode="linear"
    )
    return figure


def open_at_most(rows: Iterable[Mapping[str, StagePart]]) -> float:
    """How long (s) an open part is drawn at most: infinity where it leaves room for the others."""
    parts = [list(row.values()) for row in rows]
    known_s = max(
        (sum(one.seconds for one in row if not one.is_open) for row in parts), default=0.0
    )
    longest_s = max((one.seconds for row in parts for one in row if one.is_open), default=0.0)
    return CUT_TO * known_s if longest_s > CUT_FROM * known_s > 0 else math.inf


def _drawn_s(part: StagePart, most_s: float) -> float:
    return min(part.seconds, most_s) if part.is_open else part.seconds


def _label_open_end(
    figure: go.Figure, row: str, parts: Mapping[str, StagePart], most_s: float
) -> None:
    for name, part in parts.items():
        if part.is_open:
            cut = ", cut off" if part.seconds > most_s else ""
            figure.add_annotation(
                text=f"{name[:-2]} {part.text.replace('>', '&gt;')}{cut} \N{RIGHTWARDS ARROW}",
                x=sum(_drawn_s(one, most_s) for one in parts.values()) * 1e3,
                y=row,
                xanchor="right",
                yanchor="bottom",
                yshift=22,
                showarrow=False,
            )
