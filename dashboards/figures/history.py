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
    """A line for each side, broken where runs cannot be compared; crosses for invalid or incomplete
    runs; the gate's limits; marks at the foot where the manifest changed.
    """
    scale, unit = SCALES.get(tracks[0].unit, (1.0, tracks[0].unit))
    figure = canvas(x_title="written (UTC)", y_title=unit, height=280)
    for place, track in enumerate(tracks):
        _add_line(figure, track, scale, place)
    every = [point for track in tracks for point in track.points]
    _add_points(
        figure,
        [(one, one.value, f"{_text(one)}, {one.run.flaw}") for one in every if one.run.flaw],
        scale,
        marker={"symbol": "x", "size": 9, "color": VERMILION},
        name="invalid or not complete",
    )
    _add_points(
        figure,
        [
            (one, one.more_than, f"{one.run.name}: > {quantity(one.more_than, one.metric.unit)}")
            for one in every
        ],
        scale,
        marker={"symbol": "triangle-up-open", "size": 11, "color": VERMILION},
        name="known only to be more",
    )
    for limit in limits:
        _add_limit(figure, limit, scale)
    _add_changes(figure, changes)
    figure.set_x(type="date")
    figure.set_layout(showlegend=len(figure.data) > 1)
    return figure


def _add_line(figure: Figure, track: Track, scale: float, place: int) -> None:
    colour = CYCLE[place % len(CYCLE)]
    points: list[Point | None] = []
    for stretch in track.stretches():
        points += [*stretch, None]  # a gap before the next
    values = [None if one is None or one.value is None else one.value * scale for one in points]
    ends = [
        None
        if one is None or one.limits is None
        else (one.limits[0] * scale, one.limits[1] * scale)
        for one in points
    ]
    figure.add_scatter(
        x=[None if one is None else one.run.at.isoformat() for one in points],
        y=values,
        error_y=whiskers(list(zip(values, ends, strict=True)), thickness=1, width=2),
        mode="lines+markers",
        line={"width": 1.5, "color": colour},
        marker={"size": 7, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        customdata=["" if one is None else plain(_text(one)) for one in points],
        hovertemplate="%{customdata}<extra></extra>",
        name=plain(track.side),
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
    *,
    marker: Mapping[str, object],
    name: str,
) -> None:
    drawn = [(one.run.at, value, text) for one, value, text in points if value is not None]
    if drawn:
        figure.add_scatter(
            x=[at.isoformat() for at, _, _ in drawn],
            y=[value * scale for _, value, _ in drawn],
            mode="markers",
            marker=marker,
            customdata=[plain(text) for *_, text in drawn],
            hovertemplate="%{customdata}<extra></extra>",
            name=name,
        )


def _add_limit(figure: Figure, limit: Limit, scale: float) -> None:
    y = limit.number * scale
    place = {"x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y, "yref": "y"}
    line = {"color": VERMILION, "width": 1.5, "dash": "dash"}
    figure.add_shape(type="line", line=line, **place)
    where = {"x": 0, "xanchor": "left", "xref": "x domain", "y": y, "yanchor": "bottom"}
    text = plain(f"limit: {limit.figure} {limit.operator} {limit.number:g}")
    figure.add_text(text, font={"size": 11}, yref="y", **where)


def _add_changes(figure: Figure, changes: Mapping[datetime, str]) -> None:
    if not changes:
        return
    for at in changes:
        figure.add_vertical(at.isoformat(), layer="below")
    figure.add_scatter(
        x=[at.isoformat() for at in changes],
        y=[0.02] * len(changes),
        yaxis="y2",
        mode="markers",
        marker={"symbol": "diamond-tall", "size": 9, "color": GREY},
        customdata=[plain(text) for text in changes.values()],
        hovertemplate="%{customdata}<extra></extra>",
        name="something else changed",
    )
    figure.add_second_y()
