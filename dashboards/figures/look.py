"""The common look of all figures: one palette, one layout.

The colours are Okabe and Ito's, which people with any common colour blindness can tell apart. The
page colours text, axes and grid lines, so one figure serves light, dark and paper.
"""

from collections.abc import Sequence
from html import escape
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

Floats = npt.NDArray[np.float64]
Limits = tuple[float, float]

BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILION: Final = "#D55E00"
SKY: Final = "#56B4E9"
PURPLE: Final = "#CC79A7"
GREY: Final = "#8A8F98"
HATCH: Final = "#14171A"
CYCLE: Final = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY)
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")  # with a colour
DOTTED: Final = {"color": GREY, "width": 1, "dash": "dot"}

HEIGHT_PX: Final = 320
POINT_TEXT: Final = "%{customdata}"  # a hover template: each point has its text
NO_NAME: Final = "<extra></extra>"  # at its end: without the name of the trace
MARKS_AXIS: Final = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
SCALES: Final = {"s": (1e3, "milliseconds"), "ratio": (1e2, "percent")}  # of an axis, by unit
LEGEND: Final = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
LAYOUT: Final = {
    "template": {},  # Plotly's own would bring 6 kB into the page with each figure
    "height": HEIGHT_PX,
    "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "colorway": CYCLE,
    "font": {"size": 13},
    "legend": LEGEND,
    "hovermode": "closest",
}

Trace: TypeAlias = go.Scatter | go.Bar
Properties = dict[str, Any]  # of an axis, a shape, a marker ..., by their names in Plotly


def styled(traces: Sequence[Trace], *, x: Properties, y: Properties, **layout: Any) -> go.Figure:
    """A figure in the common look. It is made at once: a later change takes nearly as long."""
    axes = {"xaxis": x, "yaxis": {"rangemode": "tozero", **y}}
    return go.Figure(data=[*traces], layout={**LAYOUT, **axes, **layout})


def axis(title: str, **values: Any) -> Properties:
    """An axis without zooming: a drag over a picture scrolls the page, above all on a phone."""
    text = {"text": title, "font": {"size": 13}}
    return {"title": text, "automargin": True, "zeroline": False, "fixedrange": True, **values}


def vertical_line(x: object, **more: Any) -> Properties:
    place = {"x0": x, "x1": x, "xref": "x", "y0": 0, "y1": 1, "yref": "y domain"}
    return {"type": "line", "line": DOTTED, **place, **more}


def note(text: str, **place: Any) -> Properties:
    return {"text": text, "showarrow": False, **place}


def hatched(colour: str, shapes: str | list[str]) -> Properties:
    look = {"fillmode": "overlay", "fgcolor": HATCH, "size": 7, "solidity": 0.25}
    return {"color": colour, "pattern": {"shape": shapes, **look}}


def whiskers(
    values: Sequence[float | None],
    ends: Sequence[Limits | None],
    *,
    scale: float = 1.0,
    colour: str = GREY,
    **look: int,
) -> Properties:
    both = list(zip(values, ends, strict=True))
    above = [None if end is None else (end[1] - (value or 0)) * scale for value, end in both]
    below = [None if end is None else ((value or 0) - end[0]) * scale for value, end in both]
    arrays = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return {**arrays, "color": colour, "thickness": 2, "width": 5, **look}


def plain(text: object) -> str:
    """Escape text from outside where Plotly would read markup."""
    return escape(str(text), quote=False)
