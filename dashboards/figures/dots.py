"""Dots for figures of several arms or runs: ratios to a baseline, rounds, chunk sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dashboards.figures.canvas import (
    BLUE,
    CYCLE,
    GREY,
    SCALES,
    VERMILION,
    Figure,
    Limits,
    canvas,
    plain,
    whiskers,
)
from harness.analysis.compare import FEWEST_ROUNDS, Standing
from harness.analysis.stats import mean_ci95
from harness.formatting import number, quantity

SYMBOLS: Final = {
    Standing.BETTER: "circle",
    Standing.WORSE: "x",
    Standing.UNSURE: "circle-open",
    Standing.NOT_JUDGED: "diamond-open",
}
GAP: Final = "\N{NO-BREAK SPACE}"
ROW_PX: Final = 44  # with its name, of one candidate
NEXT_PX: Final = 14  # each other candidate below the first
NAME_PX: Final = 12  # a row's name above its first dot
FOLDS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10)
DECADES: Final = (1e-4, 1e-3, 0.01, 0.1, 1, 10, 100, 1e3, 1e4)
WIDE: Final = 30  # from the lowest to the highest; beyond it only decades are marked
QUANTILES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("p50", "median", {"line": {"color": BLUE}, "marker": {"symbol": "circle", "size": 8}}),
    (
        "p99",
        "p99",
        {"line": {"color": VERMILION, "dash": "dash"}, "marker": {"symbol": "square", "size": 8}},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One dot: a candidate's figure divided by the baseline's."""

    candidate: str
    figure: str
    ratio: float
    limits: Limits | None
    standing: Standing
    text: str


def ratios(dots: Sequence[Ratio]) -> Figure:
    """A row a figure, its name above a dot and its interval for each candidate, on a log axis.

    The form of a dot shows its verdict. With several candidates each dot has its candidate's
    number.
    """
    rows = list(dict.fromkeys(dot.figure for dot in dots))
    candidates = list(dict.fromkeys(dot.candidate for dot in dots))
    below_px = NEXT_PX * (len(candidates) - 1)
    row_px = ROW_PX + below_px
    figure = canvas(x_title="times the baseline (log)", y_title="", height=90 + row_px * len(rows))
    for place, name in enumerate(candidates):
        of = [dot for dot in dots if dot.candidate == name]
        shift = (NEXT_PX * place - below_px / 2) / row_px
        at = [rows.index(dot.figure) + shift for dot in of]
        count = f"{place + 1} " if len(candidates) > 1 else ""
        _add_candidate(figure, of, at, place, called=f"{count}{name}")
        if count:
            _number_dots(figure, of, at, count)
    figure.add_vertical(1)
    _name_rows(figure, rows, above=(NAME_PX + below_px / 2) / row_px)
    _fold_axis(figure, [end for dot in dots for end in (dot.ratio, *(dot.limits or ()))])
    figure.set_layout(showlegend=len(candidates) > 1)
    return figure


def _add_candidate(
    figure: Figure, dots: Sequence[Ratio], rows: Sequence[float], place: int, *, called: str
) -> None:
    """The baseline has the first colour in every picture, so the candidates begin at the second."""
    colour = CYCLE[(place + 1) % len(CYCLE)]
    figure.add_scatter(
        x=[None], y=[None], mode="markers", marker={"color": colour}, name=plain(called)
    )
    placed = list(zip(dots, rows, strict=True))
    for has_limits in (False, True):  # Plotly draws a missing interval as a whisker of length 0
        of = [(dot, row) for dot, row in placed if (dot.limits is not None) == has_limits]
        ends = [(dot.ratio, dot.limits) for dot, _ in of]
        figure.add_scatter(
            x=[dot.ratio for dot, _ in of],
            y=[row for _, row in of],
            mode="markers",
            marker={
                "color": colour,
                "size": 10,
                "symbol": [SYMBOLS[dot.standing] for dot, _ in of],
            },
            **({"error_x": whiskers(ends, colour=colour)} if has_limits else {}),
            customdata=[plain(dot.text) for dot, _ in of],
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
        )


def _number_dots(figure: Figure, dots: Sequence[Ratio], rows: Sequence[float], count: str) -> None:
    figure.add_scatter(
        x=[dot.limits[1] if dot.limits else dot.ratio for dot in dots],
        y=list(rows),
        mode="text",
        text=[f"{'' if dot.limits else GAP}{GAP}{count}" for dot in dots],
        textposition="middle right",
        textfont={"size": 11},
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )


def _name_rows(figure: Figure, rows: Sequence[str], *, above: float) -> None:
    """Inside the picture: beside it, a phone would have no room for the dots."""
    for place, row in enumerate(rows):
        where = {"x": 0, "xref": "paper", "xanchor": "left"}
        where |= {"y": place - above, "yanchor": "bottom"}
        figure.add_text(plain(row), font={"size": 12}, **where)
    figure.set_y(
        tickvals=list(range(len(rows))),
        showticklabels=False,
        range=[len(rows) - 0.5, -0.8],
        rangemode="normal",
    )


def _fold_axis(figure: Figure, ends: Sequence[float]) -> None:
    low, high = min(*ends, 0.8), max(*ends, 1.25)
    folds = FOLDS if high < WIDE * low else DECADES
    figure.set_x(
        type="log",
        range=[float(np.log10(low)) - 0.05, float(np.log10(high)) + 0.05],
        tickvals=list(folds),
        ticktext=[f"{number(fold)}x" for fold in folds],
    )


def per_round(values: Mapping[str, Sequence[float | None]], *, unit: str) -> Figure:
    scale, shown_unit = SCALES.get(unit, (1.0, unit))
    figure = canvas(x_title="", y_title=shown_unit, height=280)
    values = {plain(arm): those for arm, those in values.items()}
    known = {arm: [one for one in those if one is not None] for arm, those in values.items()}
    known = {arm: those for arm, those in known.items() if those}
    figure.add_scatter(
        x=[arm for arm, those in known.items() for _ in those],
        y=[one * scale for those in known.values() for one in those],
        mode="markers",
        marker={"size": 8, "color": BLUE, "opacity": 0.6},
        customdata=[quantity(one, unit) for those in known.values() for one in those],
        hovertemplate="%{x}: %{customdata}<extra>a round</extra>",
        name="a round",
    )
    means = {arm: float(np.mean(those)) for arm, those in known.items()}
    halves = [_half_width(those) * scale for those in known.values()]
    figure.add_scatter(
        x=list(means),
        y=[mean * scale for mean in means.values()],
        error_y={"type": "data", "array": halves, "color": GREY, "thickness": 2, "width": 8},
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 22, "color": GREY, "line": {"width": 3}},
        customdata=[quantity(mean, unit) for mean in means.values()],
        hovertemplate="%{x}: %{customdata}<extra>mean</extra>",
        name="mean and its 95 % interval",
    )
    figure.set_x(type="category", categoryorder="array", categoryarray=list(values))
    return figure


def _half_width(values: Sequence[float]) -> float:
    limits = mean_ci95(np.array(values)) if len(values) >= FEWEST_ROUNDS else None
    return 0.0 if limits is None else (limits[1] - limits[0]) / 2


def frontier(points: Sequence[tuple[int, float, float]]) -> Figure:
    """Points are (chunk size, the others' wait, the long prompt's wait); waits in ms."""
    figure = canvas(
        x_title="bystanders: between two tokens (p99), ms",
        y_title="long prompt: first token, ms",
    )
    figure.add_scatter(
        x=[x for _, x, _ in points],
        y=[y for _, _, y in points],
        text=[f"{size:,}" for size, _, _ in points],
        mode="lines+markers+text",
        textposition="top right",
        marker={"size": 11, "color": BLUE},
        line={"color": GREY, "width": 1.5},
        cliponaxis=False,
        hovertemplate="chunks of %{text}: %{x:.3~g} ms, %{y:.3~g} ms<extra></extra>",
        showlegend=False,
    )
    figure.set_x(rangemode="tozero")
    return figure


def cancel_by_chunk(by_figure: Mapping[str, Mapping[int, float]]) -> Figure:
    """Cancel latencies in milliseconds, by figure and chunk size."""
    figure = canvas(x_title="chunk size, tokens a step", y_title="cancel latency, ms")
    for key, name, look in QUANTILES:
        figure.add_scatter(
            x=list(by_figure[key]),
            y=list(by_figure[key].values()),
            mode="lines+markers",
            **look,
            name=name,
            hovertemplate="chunks of %{x}: %{y:.3~g} ms<extra>" + name + "</extra>",
        )
    sizes = list(by_figure["p50"])
    figure.set_x(type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes])
    return figure
