"""Stacked bars: the stages of a cancel, and the tokens that were generated unread.

A bar must not look better than the server was. A stage that many requests never completed has no
median, only a time that it exceeds. Such an open part ends its row, because later stages are known
of a few lucky requests at most. It reaches as far as is known. If that leaves no room for the known
parts, it is cut off, and its label says so.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    Figure,
    Limits,
    canvas,
    pattern,
    plain,
    whiskers,
)
from harness.formatting import figure_of
from harness.records import Metric

STAGES: Final = (
    ("detect_s", "detect: the server saw it", SKY, ""),
    ("signal_s", "signal: the worker heard it", VERMILION, "x"),
    ("wait_s", "wait: out of the batch", ORANGE, "-"),
    ("free_s", "free: blocks reclaimed", BLUE, "|"),
    ("slot_refill_s", "refill: taken by the next", GREEN, "."),
)
STAGE_ROWS: Final = (("p50", "median"), ("p99", "99th percentile"))
OPEN: Final = "/"
CUT_FROM: Final = 3  # times the longest row of known parts: an open part beyond it is cut off
CUT_TO: Final = 0.5  # of that row
WASTE_PARTS: Final = (
    ("on the way when the user left", SKY, ""),
    ("generated after the user had left", VERMILION, "/"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """How long a stage took; an open one is known only to have lasted longer than `seconds`."""

    seconds: float
    text: str
    is_open: bool


def stage_parts(metrics: Mapping[str, Metric], key: str) -> dict[str, StagePart]:
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


def cancel_stages(metrics: Mapping[str, Metric]) -> Figure:
    figure = canvas(x_title="milliseconds", y_title="", height=220)
    rows = [(label, stage_parts(metrics, key)) for key, label in STAGE_ROWS]
    most_s = open_at_most(parts for _, parts in rows)
    for name, label, colour, shape in STAGES:
        drawn = [(row, parts[name]) for row, parts in rows if name in parts]
        if not drawn:
            continue
        shapes = [OPEN if part.is_open else shape for _, part in drawn]
        figure.add_bar(
            name=label,
            orientation="h",
            y=[row for row, _ in drawn],
            x=[_drawn_s(part, most_s) * 1e3 for _, part in drawn],
            customdata=[part.text for _, part in drawn],
            hovertemplate="%{customdata}<extra>" + label + "</extra>",
            marker={"color": colour, "pattern": pattern(shapes)},
        )
    for row, parts in rows:
        _label_open_end(figure, row, parts, most_s)
    legend = figure.layout["legend"] | {"traceorder": "normal"}
    figure.set_layout(barmode="stack", bargap=0.45, legend=legend, showlegend=True)
    upwards = [row for row, _ in reversed(rows)]
    figure.set_y(categoryarray=upwards, categoryorder="array", tickmode="linear")
    return figure


def open_at_most(rows: Iterable[Mapping[str, StagePart]]) -> float:
    """The greatest length (s) of an open part: infinity if it leaves room for the others."""
    parts = [list(row.values()) for row in rows]
    known_s = max(
        (sum(one.seconds for one in row if not one.is_open) for row in parts), default=0.0
    )
    longest_s = max((one.seconds for row in parts for one in row if one.is_open), default=0.0)
    return CUT_TO * known_s if longest_s > CUT_FROM * known_s > 0 else math.inf


def _drawn_s(part: StagePart, most_s: float) -> float:
    return min(part.seconds, most_s) if part.is_open else part.seconds


def _label_open_end(
    figure: Figure, row: str, parts: Mapping[str, StagePart], most_s: float
) -> None:
    for name, part in parts.items():
        if part.is_open:
            cut = ", cut off" if part.seconds > most_s else ""
            figure.add_text(
                f"{name[:-2]} {plain(part.text)}{cut} \N{RIGHTWARDS ARROW}",
                x=sum(_drawn_s(one, most_s) for one in parts.values()) * 1e3,
                y=row,
                xanchor="right",
                yanchor="bottom",
                yshift=22,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteBar:
    """Mean unread tokens of `n` requests. `parts`: sampled before their users left, and after;
    None if only their sum is known. `limits`: the interval of the sum.
    """

    label: str
    n: int
    total: float
    parts: tuple[float, float] | None
    text: str
    limits: Limits | None = None


def waste_bars(bars: Sequence[WasteBar], *, x_title: str) -> Figure:
    figure = canvas(x_title=x_title, y_title="unread tokens, mean", height=280)
    labels = [plain(bar.label) for bar in bars]
    looks = [(label, colour, shape) for label, colour, shape in WASTE_PARTS]
    heights = [[0.0 if bar.parts is None else bar.parts[part] for bar in bars] for part in (0, 1)]
    if any(bar.parts is None for bar in bars):
        looks.append(("both together", GREY, "x"))
        heights.append([bar.total if bar.parts is None else 0.0 for bar in bars])
    for (label, colour, shape), values in zip(looks, heights, strict=True):
        figure.add_bar(
            name=label,
            x=labels,
            y=values,
            customdata=[(bar.n, bar.text) for bar in bars],
            marker={"color": colour, "pattern": pattern(shape)},
            hovertemplate="%{y:.3~g} tokens (of %{customdata[1]}), mean of %{customdata[0]} "
            f"requests<extra>{label}</extra>",
        )
    has_limits = [bar for bar in bars if bar.limits is not None]
    if has_limits:
        _add_limits(figure, has_limits)
    else:
        figure.data[-1] |= {
            "text": [bar.text for bar in bars],
            "textposition": "outside",
            "textangle": 0,
            "cliponaxis": False,
        }
    legend = figure.layout["legend"] | {"traceorder": "normal"}
    figure.set_layout(barmode="stack", bargap=0.4, legend=legend)
    figure.set_x(type="category")
    return figure


def _add_limits(figure: Figure, bars: Sequence[WasteBar]) -> None:
    figure.add_scatter(
        x=[plain(bar.label) for bar in bars],
        y=[bar.total for bar in bars],
        mode="markers",
        marker={"size": 1, "color": GREY},
        error_y=whiskers([(bar.total, bar.limits) for bar in bars]),
        showlegend=False,
        hoverinfo="skip",
    )
