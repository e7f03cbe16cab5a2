"""The common look of all pictures: one palette, one empty canvas.

The colours are Okabe and Ito's, which people with any common colour blindness can tell apart. The
page colours text, axes and grid lines, so one figure serves light, dark and paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
SCALES: Final = {"s": (1e3, "milliseconds"), "ratio": (1e2, "percent")}  # of an axis, by unit


@dataclass(frozen=True, slots=True)
class Figure:
    """`data` holds the traces, `layout` the rest, in Plotly's own terms."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]

    def add(
        self,
        kind: str,
        x: Any,
        y: Any,
        hover: str | Sequence[str] | None,
        *,
        name: str | None = None,
        **trace: Any,
    ) -> None:
        """A trace of Plotly's `kind`. `hover`: its template for all points, or the plain text of
        each; None is silent. A trace without a `name` stays out of the legend.
        """
        if hover is None:
            trace["hoverinfo"] = "skip"
        elif isinstance(hover, str):
            trace["hovertemplate"] = hover
        else:
            trace["customdata"] = [plain(text) for text in hover]
            trace["hovertemplate"] = "%{customdata}" + ("<extra></extra>" if name is None else "")
        shown = {"showlegend": False} if name is None else {"name": plain(name)}
        self.data.append({"type": kind, "x": x, "y": y, **shown, **trace})

    def add_dots(
        self, x: Any, y: Any, hover: str | Sequence[str] | None, marker: Any, **trace: Any
    ) -> None:
        self.add("scatter", x, y, hover, mode="markers", marker=marker, **trace)

    def add_line(
        self, x: Any, y: Any, hover: str | Sequence[str] | None, line: Any, **trace: Any
    ) -> None:
        self.add("scatter", x, y, hover, line=line, **{"mode": "lines", **trace})

    def add_bars(
        self,
        x: Any,
        y: Any,
        hover: str | Sequence[str] | None,
        *,
        colour: str,
        shapes: str | list[str] = "",
        **trace: Any,
    ) -> None:
        look = {"fillmode": "overlay", "fgcolor": HATCH, "size": 7, "solidity": 0.25}
        marker = {"color": colour, "pattern": {"shape": shapes, **look}}
        self.add("bar", x, y, hover, marker=marker, **trace)

    def set_layout(self, **values: Any) -> None:
        self.layout.update(values)

    def set_x(self, **values: Any) -> None:
        self.layout["xaxis"].update(values)

    def set_y(self, **values: Any) -> None:
        self.layout["yaxis"].update(values)

    def add_shape(self, **shape: Any) -> None:
        self.layout.setdefault("shapes", []).append(shape)

    def add_vertical(self, x: object, **more: Any) -> None:
        place = {"x0": x, "x1": x, "xref": "x", "y0": 0, "y1": 1, "yref": "y domain"}
        self.add_shape(type="line", line=DOTTED, **place, **more)

    def add_text(self, text: str, **place: Any) -> None:
        label = {"text": text, "showarrow": False, **place}
        self.layout.setdefault("annotations", []).append(label)

    def add_second_y(self) -> None:
        axis = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
        self.set_layout(yaxis2=axis)


def canvas(*, x_title: str, y_title: str, height: int = HEIGHT_PX) -> Figure:
    layout = {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": list(CYCLE),
        "font": {"size": 13},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "hovermode": "closest",
        "xaxis": _axis(x_title),
        "yaxis": {**_axis(y_title), "rangemode": "tozero"},
    }
    return Figure([], layout)


def _axis(title: str) -> dict[str, Any]:
    """Without zooming: a drag over a picture scrolls the page, above all on a phone."""
    text = {"text": title, "font": {"size": 13}}
    return {"title": text, "automargin": True, "zeroline": False, "fixedrange": True}


def whiskers(
    values: Sequence[float | None],
    ends: Sequence[Limits | None],
    *,
    scale: float = 1.0,
    colour: str = GREY,
    **look: int,
) -> dict[str, Any]:
    both = list(zip(values, ends, strict=True))
    above = [None if end is None else (end[1] - (value or 0)) * scale for value, end in both]
    below = [None if end is None else ((value or 0) - end[0]) * scale for value, end in both]
    arrays = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return {**arrays, "color": colour, "thickness": 2, "width": 5, **look}


def plain(text: object) -> str:
    """Escape text from outside where Plotly would read markup."""
    return escape(str(text), quote=False)
