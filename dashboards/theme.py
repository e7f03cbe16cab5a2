"""How every picture looks: one palette, one empty canvas.

The colours are Okabe and Ito's, which people with any common colour blindness can tell apart, in
an order that alternates light and dark; dashes and patterns tell the same without any colour. A
picture carries no ink colour of its own: text, axes and grid lines get theirs from the page when it
is shown, so one figure serves light, dark and paper.
"""

from html import escape
from typing import Any, Final

import plotly.graph_objects as go

BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILION: Final = "#D55E00"
SKY: Final = "#56B4E9"
PURPLE: Final = "#CC79A7"
GREY: Final = "#8A8F98"
HATCH: Final = "#14171A"
CYCLE: Final = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY)
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")  # beside a colour

HEIGHT_PX: Final = 320


def canvas(*, x_title: str, y_title: str, height: int = HEIGHT_PX) -> go.Figure:
    """An empty figure with our margins, legend and axes, transparent, without ink colours."""
    return go.Figure(
        layout={
            "template": go.layout.Template(),
            "height": height,
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(CYCLE),
            "font": {"size": 13},
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1.02,
                "yanchor": "bottom",
            },
            "hovermode": "closest",
            "xaxis": _axis(x_title),
            "yaxis": {**_axis(y_title), "rangemode": "tozero"},
        }
    )


def _axis(title: str) -> dict[str, Any]:
    """Fixed: a drag over a picture scrolls the page, on a phone above all."""
    text = {"text": title, "font": {"size": 13}}
    return {"title": text, "automargin": True, "zeroline": False, "fixedrange": True}


def pattern(shape: str | list[str]) -> dict[str, Any]:
    """Hatching over the colour of a bar: `""` is none."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": HATCH, "size": 7, "solidity": 0.25}


def plain(text: object) -> str:
    """Text from outside, for a place where plotly would read markup."""
    return escape(str(text), quote=False)
