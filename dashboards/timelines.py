"""What happened over the run: frame in, figure out, one clock for all of them.

The time axis is seconds since the load began, for every picture, so they can be laid side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.downsample import Floats, Series, min_max
from dashboards.theme import (
    BLUE,
    CYCLE,
    DASHES,
    GREEN,
    GREY,
    HEIGHT_PX,
    ORANGE,
    PURPLE,
    VERMILION,
    canvas,
    plain,
)

MARKS = 400  # abandon marks that a line of usual width can show apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When the load began and ended and the watching ended, in monotonic nanoseconds."""

    started_ns: int
    ended_ns: int
    settled_ns: int

    def seconds(self, stamps: pd.Series) -> Floats:
        """Stamps as seconds since the load began."""
        return (stamps.to_numpy(dtype=np.float64) - self.started_ns) / 1e9

    @property
    def length_s(self) -> float:
        """How long the load ran."""
        return (self.ended_ns - self.started_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A figure over time and what its caption must add about down-sampling."""

    figure: go.Figure
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """When users left and requests were preempted, in seconds since the load began."""

    abandons: Floats
    preemptions: Floats


def over_time(clock: Clock, *, y_title: str, height: int = 260) -> go.Figure:
    """An empty figure over the whole run, with a line where the load ended."""
    figure = canvas(x_title="seconds since the load began", y_title=y_title, height=height)
    length_s, watched_s = clock.length_s, (clock.settled_ns - clock.started_ns) / 1e9
    figure.update_xaxes(range=[0, max(watched_s, length_s)])
    if length_s < watched_s:
        figure.add_vline(
            x=length_s,
            line={"color": GREY, "width": 1, "dash": "dot"},
            annotation={"text": "load ends", "textangle": 90, "font": {"color": GREY, "size": 11}},
            annotation_position="bottom right",
        )
    return figure


def batch_slots(running: Series, waiting: Series | None, marks: Marks, clock: Clock) -> Timeline:
    """Occupied slots and the queue, with a mark for each abandon and each preemption."""
    figure = over_time(clock, y_title="requests", height=HEIGHT_PX)
    _steps(figure, running, name="running (in a slot)", colour=BLUE)
    if waiting is not None:
        _steps(figure, waiting, name="waiting", colour=ORANGE, dash="dot")
    _add_marks(figure, marks, clock)
    series = [running, *([waiting] if waiting else [])]
    return Timeline(figure=figure, note=_notes(series, marks))


def _add_marks(figure: go.Figure, marks: Marks, clock: Clock) -> None:
    """Abandons along the foot of the picture, preemptions along its head."""
    foot = {"symbol": "line-ns-open", "size": 12, "color": VERMILION, "line_width": 1.5}
    head = {"symbol": "triangle-down", "size": 9, "color": PURPLE}
    for stamps, height, marker, name in (
        (marks.abandons, 0.03, foot, "a user left"),
        (marks.preemptions, 0.97, head, "preempted"),
    ):
        drawn = thin_marks(stamps, clock.length_s)
        if len(drawn):
            figure.add_scatter(
                x=drawn,
                y=np.full(len(drawn), height),
                yaxis="y2",
                mode="markers",
                marker=marker,
                name=name,
                hovertemplate=name + " at %{x:.2f} s<extra></extra>",
            )
    figure.update_layout(
        yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    )


def thin_marks(stamps: Floats, length_s: float) -> Floats:
    """At most `MARKS` marks: those in the same sliver of the axis share the first one's."""
    stamps = np.sort(stamps)
    if len(stamps) <= MARKS or length_s <= 0:
        return stamps
    slivers = np.floor(stamps / (length_s / MARKS))
    _, first = np.unique(slivers, return_index=True)
    return stamps[first]


def kv_blocks(
    used: Series, marks: Marks, clock: Clock, *, unit: str, total: int | None
) -> Timeline:
    """KV cache in use over time. `total`, where known, is named in the axis title."""
    title = unit if total is None else f"{unit} (of {total:,})"
    figure = over_time(clock, y_title=title)
    _steps(figure, used, name=unit, colour=GREEN)
    _add_marks(figure, marks, clock)
    return Timeline(figure=figure, note=_notes([used], marks))


def lines(series: Mapping[str, Series], clock: Clock, *, y_title: str) -> Timeline:
    """One line for each named series."""
    figure = over_time(clock, y_title=y_title)
    looks = zip(cycle(CYCLE), cycle(DASHES), strict=False)
    for (name, one), (colour, dash) in zip(series.items(), looks, strict=False):
        figure.add_scatter(
            x=one.x,
            y=one.y,
            mode="lines",
            line={"width": 1.6, "color": colour, "dash": dash},
            name=plain(name),
            hovertemplate="%{y:.3~g} at %{x:.2f} s",
        )
    figure.update_layout(showlegend=len(series) > 1)
    return Timeline(figure=figure, note=_notes(list(series.values())))


def column_series(frame: pd.DataFrame, column: str, clock: Clock, *, scale: float = 1.0) -> Series:
    """One column of a frame of samples, ready to draw."""
    ordered = frame.sort_values("t_ns")
    values = ordered[column].to_numpy(dtype=np.float64, na_value=np.nan) * scale
    return min_max(clock.seconds(ordered["t_ns"]), values)


def _steps(
    figure: go.Figure, series: Series, *, name: str, colour: str, dash: str = "solid"
) -> None:
    figure.add_scatter(
        x=series.x,
        y=series.y,
        mode="lines",
        line={"shape": "hv", "width": 1.8, "color": colour, "dash": dash},
        name=name,
        hovertemplate="%{y:,} at %{x:.2f} s",
    )


def _notes(series: Sequence[Series], marks: Marks | None = None) -> str | None:
    said = [one.note for one in series if one.note is not None][:1]
    if marks is not None and max(len(marks.abandons), len(marks.preemptions)) > MARKS:
        said.append("marks too close to be told apart share one")
    return "; ".join(said) or None
