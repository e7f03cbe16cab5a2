"""One figure from run to run: its lines, the runs to be noticed, limits, and its newest change."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import plotly.graph_objects as go

from dashboards.figures.look import (
    CYCLE,
    GREEN,
    GREY,
    MARKS_AXIS,
    POINT_TEXT,
    SCALES,
    VERMILION,
    Properties,
    axis,
    note,
    plain,
    styled,
    vertical_line,
    whiskers,
)
from dashboards.run_history import Point, Track
from dashboards.turns import TrendTurn
from harness.formatting import between, quantity
from harness.gate.limits import RUN, Limit

WRITTEN: Final = "%Y-%m-%d %H:%M"
HEIGHT_PX: Final = 210
SIGN_OF_SYMBOL: Final = {  # an arm each
    "circle": "\N{BLACK CIRCLE}",
    "diamond": "\N{BLACK DIAMOND}",
    "square": "\N{BLACK SQUARE}",
    "triangle-up": "\N{BLACK UP-POINTING TRIANGLE}",
    "star": "\N{BLACK STAR}",
    "hexagon": "\N{BLACK HEXAGON}",
}
SYMBOLS: Final = list(SIGN_OF_SYMBOL)
NOT_JOINED: Final = "invalid or not complete, so in no line"
BEYOND: Final = "beyond a limit of the gate"
OPEN: Final = "known only to be more"
CHANGED: Final = "something else changed"
WORSE: Final = "worse from this run on"
BETTER: Final = "better from this run on"
SIGN_OF: Final = {
    WORSE: "\N{HEAVY MULTIPLICATION X}",
    BETTER: "\N{LARGE CIRCLE}",
    NOT_JOINED: "\N{CIRCLED TIMES}",
    BEYOND: "\N{WHITE SQUARE}",
    OPEN: "\N{WHITE UP-POINTING TRIANGLE}",
    CHANGED: "\N{BLACK DIAMOND}",
}
_WORSE: Final[Properties] = {"color": VERMILION, "width": 3}
_BETTER: Final[Properties] = {"color": GREEN, "width": 3, "dash": "dot"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendContext:
    """What many such pictures have in common. `sides`: all arms that one of them has; `broken`: by
    the name of the run, the limits that it is beyond; `changes` of something else, by time.
    """

    sides: Sequence[str]
    broken: Mapping[str, Sequence[Limit]]
    changes: Mapping[datetime, str]


def over_runs(
    tracks: Sequence[Track],
    limits: Sequence[Limit],
    turned: Sequence[TrendTurn],
    around: TrendContext,
) -> go.Figure:
    """A picture without a legend: `signs` says what the marks are, once for many such pictures."""
    scale, unit = SCALES.get(tracks[0].unit, (1.0, tracks[0].unit))
    traces = [_line(track, scale, around.sides.index(track.side)) for track in tracks]
    traces += _noticed(tracks, limits, around.broken, scale)
    traces += _turned(turned, scale)
    traces += _changed(around.changes)
    shapes = [_limit_line(limit, scale) for limit in limits]
    shapes += [vertical_line(at.isoformat(), layer="below") for at in around.changes]
    shapes += [shape for turn in turned for shape in _levels(turn, scale)]
    return styled(
        traces,
        x=_dates(tracks),
        y=axis(unit, nticks=5),
        yaxis2=MARKS_AXIS,
        height=HEIGHT_PX,
        showlegend=False,
        shapes=shapes,
        annotations=[_limit_note(limit, tracks[0], scale) for limit in limits],
    )


def _dates(tracks: Sequence[Track]) -> Properties:
    """Around a single run Plotly would mark milliseconds."""
    times = {point.run.at for track in tracks for point in track.points}
    if len(times) != 1:
        return axis("", type="date", nticks=5)
    (at,) = times
    ends = [(at + sign * timedelta(days=1)).isoformat() for sign in (-1, 1)]
    return axis("", type="date", range=ends, tickvals=[at.isoformat()], tickformat="%b %-d\n%Y")


def signs(figures: Sequence[go.Figure], sides: Sequence[str]) -> list[tuple[str, str]]:
    """Each mark of the figures, as a sign in a text, and its meaning."""
    symbols = list(SIGN_OF_SYMBOL.values())
    lines = [
        (symbols[n % len(symbols)], "a run" if one == RUN else one) for n, one in enumerate(sides)
    ]
    named = {trace.name for figure in figures for trace in figure.data}
    return [*lines, *((sign, name) for name, sign in SIGN_OF.items() if name in named)]


def _line(track: Track, scale: float, place: int) -> go.Scatter:
    points: list[Point | None] = []
    for stretch in track.stretches:
        points += [*(one for one in stretch if one.value is not None), None]  # a gap at the end
    values = [None if one is None else one.value for one in points]
    ends = [None if one is None else one.limits for one in points]
    return go.Scatter(
        mode="lines+markers",
        x=[None if one is None else one.run.at.isoformat() for one in points],
        y=[None if value is None else value * scale for value in values],
        error_y=whiskers(values, ends, scale=scale, thickness=1, width=2),
        line={"width": 1.5, "color": CYCLE[place % len(CYCLE)]},
        marker={"size": 6, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        name=plain(track.side),
        customdata=["" if one is None else plain(_text(one)) for one in points],
        hovertemplate=POINT_TEXT,
    )


def _text(point: Point) -> str:
    metric = point.metric
    limits = between(point.limits, metric.unit)
    sure = "" if limits is None else f" ({limits})"
    if point.value is None:
        figure = f"> {quantity(point.more_than, metric.unit)}"
    else:
        figure = f"{quantity(point.value, metric.unit)}{sure}"
    return f"{point.run.at:{WRITTEN}} {point.run.name}: {figure}"


def _noticed(
    tracks: Sequence[Track],
    limits: Sequence[Limit],
    broken: Mapping[str, Sequence[Limit]],
    scale: float,
) -> Iterator[go.Scatter]:
    every = [point for track in tracks for point in track.points]
    flawed = [
        (one, f"{_text(one)}, {one.run.flaw}")
        for one in every
        if one.run.flaw and one.value is not None
    ]
    look: Properties = {"symbol": "circle-x-open", "size": 9, "color": GREY}
    yield from _points(flawed, scale, look, NOT_JOINED)
    is_open = [(one, _text(one)) for one in every if one.value is None]
    look = {"symbol": "triangle-up-open", "size": 10, "color": VERMILION}
    yield from _points(is_open, scale, look, OPEN)
    beyond = [
        (one, f"{_text(one)}, beyond {', '.join(limit.text for limit in of)}")
        for track in tracks
        for one in track.points
        if (of := _broken_here(broken.get(one.run.name, ()), limits, track.side))
    ]
    look = {"symbol": "square-open", "size": 13, "color": VERMILION, "line": {"width": 2}}
    yield from _points(beyond, scale, look, BEYOND)


def _broken_here(broken: Sequence[Limit], drawn: Sequence[Limit], side: str) -> Sequence[Limit]:
    return [one for one in broken if one in drawn and one.arm == side]


def _points(
    points: Sequence[tuple[Point, str]], scale: float, marker: Properties, name: str
) -> Iterator[go.Scatter]:
    if points:
        values = [one.more_than if one.value is None else one.value for one, _ in points]
        yield go.Scatter(
            mode="markers",
            x=[one.run.at.isoformat() for one, _ in points],
            y=[(value or 0.0) * scale for value in values],
            marker=marker,
            name=name,
            customdata=[plain(text) for _, text in points],
            hovertemplate=POINT_TEXT,
        )


def _turned(turned: Sequence[TrendTurn], scale: float) -> Iterator[go.Scatter]:
    looks: dict[str, Properties] = {
        WORSE: {"symbol": "x", "size": 11, "color": VERMILION},
        BETTER: {"symbol": "circle-open", "size": 12, "color": GREEN, "line": {"width": 2}},
    }
    for name, look in looks.items():
        first = [turn.since[0] for turn in turned if turn.is_worse == (name == WORSE)]
        yield from _points([(one, f"{_text(one)}, {name}") for one in first], scale, look, name)


def _levels(turn: TrendTurn, scale: float) -> Iterator[Properties]:
    """The level before as a thin line and that of today as a thick one, over a tinted ground."""
    before, first, last = turn.before[0], turn.since[0], turn.since[-1]
    look = _WORSE if turn.is_worse else _BETTER
    ground = {"type": "rect", "fillcolor": look["color"], "opacity": 0.12}
    ground["line"] = {"color": look["color"], "width": 1}  # of a single run, all that is seen
    span = {"x0": first.run.at.isoformat(), "x1": last.run.at.isoformat(), "xref": "x"}
    yield {**ground, **span, "y0": 0, "y1": 1, "yref": "y domain", "layer": "below"}
    level = turn.level_since.value * scale
    yield {"type": "line", "line": look, **span, "y0": level, "y1": level, "yref": "y"}
    level = turn.level_before.value * scale
    span = {"x0": before.run.at.isoformat(), "x1": first.run.at.isoformat(), "xref": "x"}
    line = {"type": "line", "line": {"color": GREY, "width": 2}}
    yield {**line, **span, "y0": level, "y1": level, "yref": "y"}


def _limit_line(limit: Limit, scale: float) -> Properties:
    y = limit.number * scale
    place = {"x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y, "yref": "y"}
    return {"type": "line", "line": {"color": VERMILION, "width": 1.5, "dash": "dash"}, **place}


def _limit_note(limit: Limit, track: Track, scale: float) -> Properties:
    arm = "" if limit.arm == RUN else f"{limit.arm}: "
    key = "" if limit.key == track.figure else f"{limit.key} "
    text = plain(f"limit: {arm}{key}{limit.operator} {quantity(limit.number, track.unit)}")
    at = {"y": limit.number * scale, "yref": "y", "yanchor": "bottom"}
    return note(text, font={"size": 11}, x=0, xanchor="left", xref="x domain", **at)


def _changed(changes: Mapping[datetime, str]) -> Iterator[go.Scatter]:
    if changes:
        yield go.Scatter(
            mode="markers",
            x=[at.isoformat() for at in changes],
            y=[0.02] * len(changes),
            yaxis="y2",
            marker={"symbol": "diamond-tall", "size": 9, "color": GREY},
            name=CHANGED,
            customdata=[plain(text) for text in changes.values()],
            hovertemplate=POINT_TEXT,
        )
