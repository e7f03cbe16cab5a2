"""Stacked bars: the stages of a cancel, and the tokens that were generated unread.

A stage that many requests never completed has no median, only a time that it exceeds. Such an open
part ends its row, because later stages are known for a few lucky requests at most.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import plotly.graph_objects as go

from dashboards.figures.look import (
    BLUE,
    GREEN,
    GREY,
    LEGEND,
    ORANGE,
    POINT_TEXT,
    SKY,
    VERMILION,
    Limits,
    Properties,
    axis,
    hatched,
    note,
    plain,
    styled,
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
WASTE_TEXT: Final = "%{y:.3~g} tokens (of %{customdata[1]}), mean of %{customdata[0]} requests"
_STACKED: Final[Properties] = {"barmode": "stack", "legend": {**LEGEND, "traceorder": "normal"}}


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
        seconds, is_open = bound if exact is None else exact, exact is None
        if seconds is not None:
            parts[name] = StagePart(seconds=seconds, text=figure_of(metric, key), is_open=is_open)
        if is_open:
            break
    return parts


def cancel_stages(metrics: Mapping[str, Metric]) -> go.Figure:
    rows = [(label, stage_parts(metrics, key)) for key, label in STAGE_ROWS]
    most_s = open_at_most(parts for _, parts in rows)
    traces = []
    for name, label, colour, shape in STAGES:
        drawn = {row: parts[name] for row, parts in rows if name in parts}
        if drawn:
            shapes = [OPEN if part.is_open else shape for part in drawn.values()]
            bar = go.Bar(
                orientation="h",
                x=[_drawn_s(part, most_s) * 1e3 for part in drawn.values()],
                y=list(drawn),
                marker=hatched(colour, shapes),
                name=label,
                customdata=[plain(part.text) for part in drawn.values()],
                hovertemplate=POINT_TEXT,
            )
            traces.append(bar)
    upwards = [row for row, _ in reversed(rows)]
    return styled(
        traces,
        x=axis("milliseconds"),
        y=axis("", categoryarray=upwards, categoryorder="array", tickmode="linear"),
        height=220,
        **_STACKED,
        bargap=0.45,
        showlegend=True,
        annotations=[one for row, parts in rows for one in _open_notes(row, parts, most_s)],
    )


def _open_notes(row: str, parts: Mapping[str, StagePart], most_s: float) -> Iterator[Properties]:
    end_ms = sum(_drawn_s(part, most_s) for part in parts.values()) * 1e3
    for name, part in parts.items():
        if part.is_open:
            cut = ", cut off" if part.seconds > most_s else ""
            text = f"{name[:-2]} {plain(part.text)}{cut} \N{RIGHTWARDS ARROW}"
            yield note(text, x=end_ms, y=row, xanchor="right", yanchor="bottom", yshift=22)


def open_at_most(rows: Iterable[Mapping[str, StagePart]]) -> float:
    parts = [list(row.values()) for row in rows]
    known_s = max((sum(one.seconds for one in row if not one.is_open) for row in parts), default=0)
    longest_s = max((one.seconds for row in parts for one in row if one.is_open), default=0)
    return CUT_TO * known_s if longest_s > CUT_FROM * known_s > 0 else math.inf


def _drawn_s(part: StagePart, most_s: float) -> float:
    return min(part.seconds, most_s) if part.is_open else part.seconds


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


def waste_bars(bars: Sequence[WasteBar], *, x_title: str) -> go.Figure:
    looks = [*WASTE_PARTS]
    heights = [[0.0 if bar.parts is None else bar.parts[part] for bar in bars] for part in (0, 1)]
    if any(bar.parts is None for bar in bars):
        looks.append(("both together", GREY, "x"))
        heights.append([bar.total if bar.parts is None else 0.0 for bar in bars])
    traces = [
        go.Bar(
            x=[plain(bar.label) for bar in bars],
            y=values,
            marker=hatched(colour, shape),
            name=label,
            customdata=[(bar.n, bar.text) for bar in bars],
            hovertemplate=WASTE_TEXT,
        )
        for (label, colour, shape), values in zip(looks, heights, strict=True)
    ]
    known = [(bar, bar.limits) for bar in bars if bar.limits is not None]
    if known:
        traces.append(_intervals(known))
    else:
        place = {"textposition": "outside", "textangle": 0, "cliponaxis": False}
        traces[-1].update(text=[bar.text for bar in bars], **place)
    x, y = axis(x_title, type="category"), axis("unread tokens, mean")
    return styled(traces, x=x, y=y, height=280, **_STACKED, bargap=0.4)


def _intervals(known: Sequence[tuple[WasteBar, Limits]]) -> go.Scatter:
    totals = [bar.total for bar, _ in known]
    return go.Scatter(
        mode="markers",
        x=[plain(bar.label) for bar, _ in known],
        y=totals,
        error_y=whiskers(totals, [ends for _, ends in known]),
        marker={"size": 1.0, "color": GREY},
        showlegend=False,
        hoverinfo="skip",
    )
