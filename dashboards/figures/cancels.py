"""Each cancel against one engine step: the picture of a report's first screen.

A dot for each user who left, in the order of leaving, as high as the server took to let go. A
request without that end has no height: it stands at the upper edge, by another shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.curves import LOG_FROM
from dashboards.figures.ladders import log_time_axis
from dashboards.figures.look import (
    BLUE,
    GREEN,
    GREY,
    NO_NAME,
    VERMILION,
    Floats,
    Properties,
    axis,
    styled,
)
from dashboards.figures.timeline import INTERVALS, thin_marks
from harness.formatting import number, quantity
from harness.metrics import CANCEL_LATENCY
from harness.stats import Ints

HEIGHT_PX: Final = 430
ROOM: Final = 1.18  # of the height in use: above it is the edge for cancels without an end
EDGE: Final = 1.09
TICKS: Final = 5
TITLE_PX: Final = 8
FEW: Final = 8  # users: each has a tick
_LET_GO: Final[Properties] = {"color": BLUE, "size": 7}
_GHOST: Final[Properties] = {"symbol": "x", "size": 11, "color": VERMILION}
_UNKNOWN: Final[Properties] = {"symbol": "triangle-up-open", "size": 11, "color": GREY}
_STEP_LINE: Final[Properties] = {"color": GREEN, "width": 2, "dash": "dash"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancels:
    """Abandoned requests in the order of leaving: which were let go of and when, which never were
    (`ghosts`), and which were watched for too short a time to say. `step_s`: of the engine, None if
    not known."""

    of: int
    let_go: Floats
    seconds: Floats
    ghosts: Floats
    unknown: Floats
    step_s: float | None

    @classmethod
    def of_run(cls, cancels: pd.DataFrame, step_s: float | None) -> "Cancels":
        """`cancels`: at least one, each with a cancel latency."""
        place = np.arange(1.0, len(cancels) + 1)
        is_open = cancels["censored"].to_numpy(dtype=bool)
        is_ghost = is_open & cancels["ghost"].fillna(value=False).to_numpy(dtype=bool)
        return cls(
            of=len(cancels),
            let_go=place[~is_open],
            seconds=cancels[CANCEL_LATENCY].to_numpy(dtype=float)[~is_open],
            ghosts=place[is_ghost],
            unknown=place[is_open & ~is_ghost],
            step_s=step_s,
        )

    @property
    def drawn(self) -> Ints:
        """Which of them are drawn: all, or the first and the slowest of each interval. The fastest
        and the slowest alone would be two bands with nothing between them.
        """
        n = len(self.seconds)
        if n <= 2 * INTERVALS:
            return np.arange(n)
        starts = np.linspace(0, n, INTERVALS, endpoint=False).astype(np.int64)
        ends = [*starts[1:].tolist(), n]
        slowest = [
            start + int(self.seconds[start:end].argmax())
            for start, end in zip(starts.tolist(), ends, strict=True)
        ]
        return np.union1d(starts, slowest)

    @property
    def note(self) -> str | None:
        if len(self.drawn) == len(self.seconds):
            return None
        users = f"{len(self.seconds):,} users who were let go"
        return f"{users}, drawn as the first and the slowest of each of {INTERVALS} intervals"

    @property
    def is_any_open(self) -> bool:
        return bool(len(self.ghosts) or len(self.unknown))

    @property
    def within_a_step(self) -> int | None:
        return None if self.step_s is None else int((self.seconds <= self.step_s).sum())


def each_cancel(of: Cancels) -> go.Figure:
    y, edge = _time_axis(of)
    drawn = of.drawn
    dots = go.Scatter(
        mode="markers",
        x=of.let_go[drawn],
        y=of.seconds[drawn] * 1e3,
        marker=_LET_GO,
        name=f"let go: {len(of.let_go):,}",
        hovertemplate="%{y:.3~g} ms" + NO_NAME,
    )
    x, step = _order_axis(of.of), [] if of.step_s is None else [of.step_s]
    return styled(
        [dots, *_at_the_edge(of, edge), *(_step_line(seconds, x) for seconds in step)],
        x=x,
        y=y,
        height=HEIGHT_PX,
        showlegend=True,
        shapes=[_step_band(seconds, y) for seconds in step],
    )


def _at_the_edge(of: Cancels, edge: float) -> Iterator[go.Scatter]:
    for name, places, marker in (
        ("never let go", of.ghosts, _GHOST),
        ("watched too short a time", of.unknown, _UNKNOWN),
    ):
        x = thin_marks(places, of.of)
        if len(x):
            yield go.Scatter(
                mode="markers",
                x=x,
                y=np.full(len(x), edge),
                marker=marker,
                name=f"{name}: {len(places):,}",
                hovertemplate=name + NO_NAME,
            )


def _order_axis(of: int) -> Properties:
    few: Properties = {"dtick": 1} if of <= FEW else {"nticks": 6}
    ends = [0.5, of + 0.5] if of <= FEW else [0, of + 1]
    return axis("users, in the order of leaving", range=ends, showgrid=False, **few)


def _time_axis(of: Cancels) -> tuple[Properties, float]:
    """The axis, and the height of its upper edge, both in milliseconds. It begins at 0, or is
    logarithmic where that would hide the middle. Its ticks end below the edge, which is no time.
    """
    known = 1e3 * np.array([*of.seconds[of.seconds > 0], *([of.step_s] if of.step_s else [])])
    highest = float(known.max()) if len(known) else 1.0
    is_log = len(known) > 0 and highest > LOG_FROM * float(np.median(known))
    low = float(np.log10(known.min())) - 0.1 if is_log else 0.0
    span = np.log10(highest) - low if is_log else highest
    edge = float(10 ** (low + EDGE * span)) if is_log else EDGE * span
    look = log_time_axis(known / 1e3, title="") if is_log else _even_ticks(highest)
    ticks = dict(zip(look["tickvals"], look["ticktext"], strict=True))
    ticks = {tick: text for tick, text in ticks.items() if len(known) and tick <= highest}
    if of.is_any_open:
        ticks[edge] = "not let go"
    title = "time until let go (log)" if is_log else "milliseconds until let go"
    look = axis(
        title,
        type="log" if is_log else "linear",
        range=[low, low + (ROOM if of.is_any_open else EDGE) * span],
        rangemode="normal",
        tickvals=list(ticks),
        ticktext=list(ticks.values()),
    )
    look["title"]["standoff"] = TITLE_PX  # beyond the longest name of a tick
    return look, edge


def _even_ticks(highest: float) -> Properties:
    size = 10.0 ** np.floor(np.log10(highest / TICKS))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= highest / TICKS)
    ticks = [step * place for place in range(int(highest / step) + 1)]
    return {"tickvals": ticks, "ticktext": [number(tick) for tick in ticks]}


def _step_band(step_s: float, y: Properties) -> Properties:
    bottom = 10 ** y["range"][0] if y.get("type") == "log" else 0
    place: Properties = {"x0": 0, "x1": 1, "xref": "x domain", "y0": bottom, "y1": step_s * 1e3}
    look: Properties = {"fillcolor": GREEN, "opacity": 0.14, "line": {"width": 0}}
    return {"type": "rect", **place, **look, "layer": "below"}


def _step_line(step_s: float, x: Properties) -> go.Scatter:
    """The upper edge of the band. Its name stands in the legend: over the line it would hide
    dots."""
    return go.Scatter(
        mode="lines",
        x=x["range"],
        y=[step_s * 1e3] * 2,
        line=_STEP_LINE,
        name=f"one engine step: {quantity(step_s, 's')}",
        hoverinfo="skip",
    )
