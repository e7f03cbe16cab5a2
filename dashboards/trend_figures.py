"""A figure over many runs, drawn: tracks in, picture out."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import plotly.graph_objects as go

from dashboards.arm_figures import SCALES
from dashboards.theme import CYCLE, GREY, VERMILION, canvas, plain
from dashboards.tracks import Point, Track
from harness.formatting import between, quantity
from harness.gate.limits import Limit

SYMBOLS: Final = ("circle", "diamond", "square", "triangle-up", "star", "hexagon")


def over_nights(
    tracks: Sequence[Track],
    limits: Sequence[Limit],
    changes: Mapping[datetime, str],
) -> go.Figure:
    """A line for each side, broken where runs cannot be compared; crosses for runs that say nothing
    of the server; the gate's limits; marks at the foot where the manifest changed."""
    scale, unit = SCALES.get(tracks[0].unit, (1.0, tracks[0].unit))
    figure = canvas(x_title="written (UTC)", y_title=unit, height=280)
    for place, track in enumerate(tracks):
        _add_line(figure, track, scale, place)
    every = [point for track in tracks for point in track.points]
    _add_flawed(figure, [one for one in every if one.value is not None and one.night.flaw], scale)
    _add_open(figure, [one for one in every if one.more_than is not None], scale)
    _add_limits(figure, limits, scale)
    _add_changes(figure, changes)
    figure.update_xaxes(type="date")
    figure.update_layout(showlegend=len(figure.data) > 1)
    return figure


def _add_line(figure: go.Figure, track: Track, scale: float, place: int) -> None:
    colour = CYCLE[place % len(CYCLE)]
    points: list[Point | None] = []
    for stretch in track.stretches():
        points += [*stretch, None]  # a gap before the next
    values = [None if one is None or one.value is None else one.value * scale for one in points]
    ends = [None if one is None else one.limits for one in points]
    figure.add_scatter(
        x=[None if one is None else one.night.at for one in points],
        y=values,
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [
                None if value is None or limits is None else limits[1] * scale - value
                for value, limits in zip(values, ends, strict=True)
            ],
            "arrayminus": [
                None if value is None or limits is None else value - limits[0] * scale
                for value, limits in zip(values, ends, strict=True)
            ],
            "color": GREY,
            "thickness": 1,
            "width": 2,
        },
        mode="lines+markers",
        line={"width": 1.5, "color": colour},
        marker={"size": 7, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        customdata=["" if one is None else _words(one) for one in points],
        hovertemplate="%{customdata}<extra></extra>",
        name=plain(track.side),
    )


def _words(point: Point) -> str:
    metric = point.metric
    limits = between(point.limits, metric.unit)
    sure = "" if limits is None else f" ({limits})"
    what = f"{quantity(point.value, metric.unit)}{sure}"
    return plain(f"{point.night.at:%Y-%m-%d %H:%M} {point.night.name}: {what}")


def _add_flawed(figure: go.Figure, points: Sequence[Point], scale: float) -> None:
    if not points:
        return
    figure.add_scatter(
        x=[one.night.at for one in points],
        y=[(one.value or 0.0) * scale for one in points],
        mode="markers",
        marker={"symbol": "x", "size": 9, "color": VERMILION},
        customdata=[f"{_words(one)}, {plain(one.night.flaw)}" for one in points],
        hovertemplate="%{customdata}<extra></extra>",
        name="invalid or not complete",
    )


def _add_open(figure: go.Figure, points: Sequence[Point], scale: float) -> None:
    if not points:
        return
    figure.add_scatter(
        x=[one.night.at for one in points],
        y=[(one.more_than or 0.0) * scale for one in points],
        mode="markers",
        marker={"symbol": "triangle-up-open", "size": 11, "color": VERMILION},
        customdata=[
            plain(f"{one.night.name}: > {quantity(one.more_than, one.metric.unit)}")
            for one in points
        ],
        hovertemplate="%{customdata}<extra></extra>",
        name="known only to be more",
    )


def _add_limits(figure: go.Figure, limits: Sequence[Limit], scale: float) -> None:
    for limit in limits:
        figure.add_hline(
            y=limit.number * scale,
            line={"color": VERMILION, "width": 1.5, "dash": "dash"},
            annotation={
                "text": plain(f"limit: {limit.figure} {limit.operator} {limit.number:g}"),
                "font": {"size": 11},
            },
            annotation_position="top left",
        )


def _add_changes(figure: go.Figure, changes: Mapping[datetime, str]) -> None:
    if not changes:
        return
    for at in changes:
        figure.add_vline(x=at, line={"color": GREY, "width": 1, "dash": "dot"}, layer="below")
    figure.add_scatter(
        x=list(changes),
        y=[0.02] * len(changes),
        yaxis="y2",
        mode="markers",
        marker={"symbol": "diamond-tall", "size": 9, "color": GREY},
        customdata=[plain(text) for text in changes.values()],
        hovertemplate="%{customdata}<extra></extra>",
        name="something else changed",
    )
    figure.update_layout(
        yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    )
