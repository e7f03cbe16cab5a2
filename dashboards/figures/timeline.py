"""Pictures over time, all on one clock: seconds since the load began.

A long series is cut into intervals, each of which keeps its lowest and its highest sample, so that
a spike of one sample is still drawn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.look import (
    CYCLE,
    DASHES,
    GREY,
    MARKS_AXIS,
    NO_NAME,
    PURPLE,
    VERMILION,
    Floats,
    Trace,
    axis,
    note,
    plain,
    styled,
    vertical_line,
)
from harness.export.library import Clock
from harness.formatting import number

MARKS: Final = 400  # abandon marks that a line of usual width can show apart
INTERVALS: Final = 600  # of a long series


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points to draw, the number of samples behind them, and the levels of all samples: the
    highest, the mean by time and the last; no levels without samples.
    """

    x: Floats
    y: Floats
    samples: int
    intervals: int | None  # None: every sample is drawn
    levels: tuple[float, float, float] | None

    @property
    def note(self) -> str | None:
        if self.intervals is None:
            return None
        return (
            f"{self.samples:,} samples, drawn as the lowest and highest "
            f"of each of {self.intervals:,} intervals"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    abandons: Floats
    preemptions: Floats

    @property
    def text(self) -> str:
        return (
            f"Marked: users who left, {len(self.abandons):,}; "
            f"preemptions, {len(self.preemptions):,}."
        )


def min_max(x: Floats, y: Floats, *, intervals: int = INTERVALS) -> Series:
    """Keep at most two samples (the lowest and the highest) of each interval. `x` must ascend."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    levels = _levels(x, y)
    if len(x) <= 2 * intervals:
        return Series(x=x, y=y, samples=len(x), intervals=None, levels=levels)
    edges = np.linspace(x[0], x[-1], intervals + 1)
    starts = np.unique(np.searchsorted(x, edges[:-1]))
    keep: list[int] = []
    for start, end in pairwise([*starts.tolist(), len(x)]):
        part = y[start:end]
        keep.extend(sorted({start + int(part.argmin()), start + int(part.argmax())}))
    return Series(x=x[keep], y=y[keep], samples=len(x), intervals=intervals, levels=levels)


def _levels(x: Floats, y: Floats) -> tuple[float, float, float] | None:
    if not len(y):
        return None
    held = np.diff(x)
    mean = np.average(y[:-1], weights=held) if held.sum() > 0 else y.mean()
    return float(y.max()), float(mean), float(y[-1])


def column_series(frame: pd.DataFrame, column: str, clock: Clock, *, scale: float = 1.0) -> Series:
    ordered = frame.sort_values("t_ns")
    values = ordered[column].to_numpy(dtype=np.float64, na_value=np.nan) * scale
    return min_max(clock.seconds(ordered["t_ns"]), values)


def levels_in_words(series: Mapping[str, Series]) -> str:
    said = [
        f"{name}: highest {number(highest)}, mean {number(mean)}, at the end {number(last)}"
        for name, one in series.items()
        if one.levels is not None
        for highest, mean, last in [one.levels]
    ]
    return f"{'; '.join(said)}."


def notes(series: Sequence[Series], marks: Marks | None = None) -> str | None:
    said = [one.note for one in series if one.note is not None][:1]
    if marks is not None and max(len(marks.abandons), len(marks.preemptions)) > MARKS:
        said.append("marks too close to distinguish share one")
    return "; ".join(said) or None


def over_time(
    traces: Sequence[Trace], clock: Clock, *, y_title: str, height: int = 260, **layout: Any
) -> go.Figure:
    length_s, watched_s = clock.length_s, (clock.settled_ns - clock.started_ns) / 1e9
    if length_s < watched_s:
        place = {"x": length_s, "xanchor": "left", "y": 0, "yanchor": "bottom", "yref": "y domain"}
        look = {"textangle": 90, "font": {"color": GREY, "size": 11}}
        layout["shapes"] = [vertical_line(length_s)]
        layout["annotations"] = [note("load ends", xref="x", **place, **look)]
    x = axis("seconds since the load began", range=[0, max(watched_s, length_s)])
    return styled(traces, x=x, y=axis(y_title), height=height, **layout)


def levels(
    series: Mapping[str, tuple[Series, str, str]], marks: Marks, clock: Clock, **look: Any
) -> go.Figure:
    steps = [
        go.Scatter(
            mode="lines",
            x=one.x,
            y=one.y,
            line={"shape": "hv", "width": 1.8, "color": colour, "dash": dash},
            name=plain(name),
            hovertemplate="%{y:,} at %{x:.2f} s",
        )
        for name, (one, colour, dash) in series.items()
    ]
    return over_time([*steps, *_drawn(marks, clock)], clock, **look, yaxis2=MARKS_AXIS)


def lines(series: Mapping[str, Series], clock: Clock, *, y_title: str) -> go.Figure:
    looks = zip(cycle(CYCLE), cycle(DASHES), strict=False)
    traces = [
        go.Scatter(
            mode="lines",
            x=one.x,
            y=one.y,
            line={"width": 1.6, "color": colour, "dash": dash},
            name=plain(name),
            hovertemplate="%{y:.3~g} at %{x:.2f} s",
        )
        for (name, one), (colour, dash) in zip(series.items(), looks, strict=False)
    ]
    return over_time(traces, clock, y_title=y_title, showlegend=len(series) > 1)


def _drawn(marks: Marks, clock: Clock) -> Iterator[go.Scatter]:
    foot = {"symbol": "line-ns-open", "size": 12, "color": VERMILION, "line": {"width": 1.5}}
    head = {"symbol": "triangle-down", "size": 9, "color": PURPLE}
    for stamps, height, marker, name in (
        (marks.abandons, 0.03, foot, "a user left"),
        (marks.preemptions, 0.97, head, "preempted"),
    ):
        x = thin_marks(stamps, clock.length_s)
        if len(x):
            yield go.Scatter(
                mode="markers",
                x=x,
                y=np.full(len(x), height),
                yaxis="y2",
                marker=marker,
                name=name,
                hovertemplate=f"{name} at %{{x:.2f}} s{NO_NAME}",
            )


def thin_marks(stamps: Floats, length_s: float) -> Floats:
    stamps = np.sort(stamps)
    if len(stamps) <= MARKS or length_s <= 0:
        return stamps
    slivers = np.floor(stamps / (length_s / MARKS))
    _, first = np.unique(slivers, return_index=True)
    return stamps[first]
