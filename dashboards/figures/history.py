"""One figure of many runs, by the time at which each was written."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from dashboards.figures.canvas import (
    CYCLE,
    GREY,
    SCALES,
    VERMILION,
    Figure,
    canvas,
    plain,
    whiskers,
)
from dashboards.run_history import Point, Track
from harness.formatting import between, quantity
from harness.gate.limits import Limit

SYMBOLS: Final = ("circle", "diamond", "square", "triangle-up", "star", "hexagon")


def over_runs(
    tracks: Sequence[Track], limits: Sequence[Limit], changes: Mapping[datetime, str]
) -> Figure:
    scale, unit = SCALES.get(tracks[0].unit, (1.0, tracks[0].unit))
    figure = canvas(x_title="written (UTC)", y_title=unit, height=280)
    for place, track in enumerate(tracks):
        _add_line(figure, track, scale, place)
    every = [point for track in tracks for point in track.points]
    _add_points(
        figure,
        [(one, one.value, f"{_text(one)}, {one.run.flaw}") for one in every if one.run.flaw],
        scale,
        {"symbol": "x", "size": 9, "color": VERMILION},
        "invalid or not complete",
    )
    _add_points(
        figure,
        [
            (one, one.more_than, f"{one.run.name}: > {quantity(one.more_than, one.metric.unit)}")
            for one in every
        ],
        scale,
        {"symbol": "triangle-up-open", "size": 11, "color": VERMILION},
        "known only to be more",
    )
    for limit in limits:
        _add_limit(figure, limit, scale)
    if changes:
        _add_changes(figure, changes)
    figure.set_x(type="date")
    figure.set_layout(showlegend=len(figure.data) > 1)
    return figure


def _add_line(figure: Figure, track: Track, scale: float, place: int) -> None:
    points: list[Point | None] = []
    for stretch in track.stretches():
        points += [*stretch, None]  # a gap before the next
    values = [None if one is None else one.value for one in points]
    ends = [None if one is None else one.limits for one in points]
    figure.add_line(
        [None if one is None else one.run.at.isoformat() for one in points],
        [None if value is None else value * scale for value in values],
        ["" if one is None else _text(one) for one in points],
        {"width": 1.5, "color": CYCLE[place % len(CYCLE)]},
        mode="lines+markers",
        marker={"size": 7, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        error_y=whiskers(values, ends, scale=scale, thickness=1, width=2),
        name=track.side,
    )


def _text(point: Point) -> str:
    metric = point.metric
    limits = between(point.limits, metric.unit)
    sure = "" if limits is None else f" ({limits})"
    figure = f"{quantity(point.value, metric.unit)}{sure}"
    return f"{point.run.at:%Y-%m-%d %H:%M} {point.run.name}: {figure}"


def _add_points(
    figure: Figure,
    points: Sequence[tuple[Point, float | None, str]],
    scale: float,
    marker: Mapping[str, object],
    name: str,
) -> None:
    known = [(one.run.at, value * scale, text) for one, value, text in points if value is not None]
    if known:
        at, values, texts = zip(*known, strict=True)
        figure.add_dots([one.isoformat() for one in at], values, texts, marker, name=name)


def _add_limit(figure: Figure, limit: Limit, scale: float) -> None:
    y = limit.number * scale
    place = {"x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y, "yref": "y"}
    line = {"color": VERMILION, "width": 1.5, "dash": "dash"}
    figure.add_shape(type="line", line=line, **place)
    where = {"x": 0, "xanchor": "left", "xref": "x domain", "y": y, "yanchor": "bottom"}
    text = plain(f"limit: {limit.figure} {limit.operator} {limit.number:g}")
    figure.add_text(text, font={"size": 11}, yref="y", **where)


def _add_changes(figure: Figure, changes: Mapping[datetime, str]) -> None:
    stamps = [at.isoformat() for at in changes]
    for at in stamps:
        figure.add_vertical(at, layer="below")
    look = {"symbol": "diamond-tall", "size": 9, "color": GREY}
    name = "something else changed"
    heights = [0.02] * len(stamps)
    figure.add_dots(stamps, heights, list(changes.values()), look, name=name, yaxis="y2")
    figure.add_second_y()
