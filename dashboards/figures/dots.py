"""Dots for figures of several arms or runs: ratios to a baseline, rounds, chunk sizes, shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from dashboards.figures.canvas import (
    BLUE,
    CYCLE,
    DASHES,
    GREY,
    HEIGHT_PX,
    SCALES,
    VERMILION,
    Figure,
    Limits,
    canvas,
    plain,
    whiskers,
)
from harness.compare.pairs import FEWEST_ROUNDS, Standing
from harness.formatting import number, quantity
from harness.stats import mean_ci95

SYMBOLS: Final = {
    Standing.BETTER: "circle",
    Standing.WORSE: "x",
    Standing.UNSURE: "circle-open",
    Standing.NOT_JUDGED: "diamond-open",
}
KIND_LOOKS: Final = (("circle", "top right"), ("diamond", "top right"), ("x", "top left"))
TICKS: Final = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
GAP: Final = "\N{NO-BREAK SPACE}"
ROW_PX: Final = 44  # with its name, of one candidate
NEXT_PX: Final = 14  # each other candidate below the first
NAME_PX: Final = 12  # a row's name above its first dot
FOLDS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10)
DECADES: Final = (1e-4, 1e-3, 0.01, 0.1, 1, 10, 100, 1e3, 1e4)
WIDE: Final = 30  # from the lowest to the highest; beyond it only decades are marked
TALL_PX: Final = 440
QUANTILES: Final = (
    ("p50", "median", {"color": BLUE}, "circle"),
    ("p99", "p99", {"color": VERMILION, "dash": "dash"}, "square"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    candidate: str
    figure: str
    ratio: float
    limits: Limits | None
    standing: Standing
    text: str


def ratios(dots: Sequence[Ratio]) -> Figure:
    """A row for each figure: its name, below it a dot and interval for each candidate; log axis."""
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
        # The baseline has the first colour in every picture: the candidates begin at the second.
        colour = CYCLE[(place + 1) % len(CYCLE)]
        figure.add_dots([None], [None], "", {"color": colour}, name=f"{count}{name}")
        _add_ratios(figure, of, at, colour)
        if count:
            _number_dots(figure, of, at, count)
    figure.add_vertical(1)
    _name_rows(figure, rows, above=(NAME_PX + below_px / 2) / row_px)
    _fold_axis(figure, [end for dot in dots for end in (dot.ratio, *(dot.limits or ()))])
    figure.set_layout(showlegend=len(candidates) > 1)
    return figure


def _add_ratios(figure: Figure, dots: Sequence[Ratio], rows: Sequence[float], colour: str) -> None:
    placed = list(zip(dots, rows, strict=True))
    for has_limits in (False, True):  # Plotly draws a missing interval as a whisker of length 0
        of = [(dot, row) for dot, row in placed if (dot.limits is not None) == has_limits]
        values, limits = [dot.ratio for dot, _ in of], [dot.limits for dot, _ in of]
        figure.add_dots(
            values,
            [row for _, row in of],
            [dot.text for dot, _ in of],
            {"color": colour, "size": 10, "symbol": [SYMBOLS[dot.standing] for dot, _ in of]},
            **({"error_x": whiskers(values, limits, colour=colour)} if has_limits else {}),
        )


def _number_dots(figure: Figure, dots: Sequence[Ratio], rows: Sequence[float], count: str) -> None:
    ends = [dot.limits[1] if dot.limits else dot.ratio for dot in dots]
    texts = [f"{'' if dot.limits else GAP}{GAP}{count}" for dot in dots]
    trace = {"mode": "text", "text": texts, "textposition": "middle right", "cliponaxis": False}
    figure.add("scatter", ends, rows, None, name=None, textfont={"size": 11}, **trace)


def _name_rows(figure: Figure, rows: Sequence[str], *, above: float) -> None:
    """Inside the picture: with the names next to it, a phone would have no room for the dots."""
    for place, row in enumerate(rows):
        where = {"x": 0, "xref": "paper", "xanchor": "left"}
        where |= {"y": place - above, "yanchor": "bottom"}
        figure.add_text(plain(row), font={"size": 12}, **where)
    ticks = {"tickvals": list(range(len(rows))), "showticklabels": False}
    figure.set_y(**ticks, range=[len(rows) - 0.5, -0.8], rangemode="normal")


def _fold_axis(figure: Figure, ends: Sequence[float]) -> None:
    low, high = min(*ends, 0.8), max(*ends, 1.25)
    folds = FOLDS if high < WIDE * low else DECADES
    around = [float(np.log10(low)) - 0.05, float(np.log10(high)) + 0.05]
    texts = [f"{number(fold)}x" for fold in folds]
    figure.set_x(type="log", range=around, tickvals=list(folds), ticktext=texts)


def per_round(values: Mapping[str, Sequence[float | None]], *, unit: str) -> Figure:
    scale, shown_unit = SCALES.get(unit, (1.0, unit))
    figure = canvas(x_title="", y_title=shown_unit, height=280)
    by_arm = {
        plain(arm): [one for one in those if one is not None] for arm, those in values.items()
    }
    rounds = [(arm, one) for arm, those in by_arm.items() for one in those]
    figure.add_dots(
        [arm for arm, _ in rounds],
        [one * scale for _, one in rounds],
        [f"{arm}: {quantity(one, unit)}" for arm, one in rounds],
        {"size": 8, "color": BLUE, "opacity": 0.6},
        name="a round",
    )
    known = {arm: those for arm, those in by_arm.items() if those}
    means = {arm: float(np.mean(those)) for arm, those in known.items()}
    halves = [_half_width(those) * scale for those in known.values()]
    figure.add_dots(
        list(means),
        [mean * scale for mean in means.values()],
        [f"{arm}: {quantity(mean, unit)}" for arm, mean in means.items()],
        {"symbol": "line-ew-open", "size": 22, "color": GREY, "line": {"width": 3}},
        name="mean and its 95 % interval",
        error_y={"type": "data", "array": halves, "color": GREY, "thickness": 2, "width": 8},
    )
    figure.set_x(type="category", categoryorder="array", categoryarray=list(by_arm))
    return figure


def _half_width(values: Sequence[float]) -> float:
    limits = mean_ci95(np.array(values)) if len(values) >= FEWEST_ROUNDS else None
    return 0.0 if limits is None else (limits[1] - limits[0]) / 2


class FrontierPoint(NamedTuple):
    """With chunks of one size, the waits in milliseconds: `gap` of the bystanders, `first` of the
    long prompt. `kind`: the setting that limits the chunk.
    """

    kind: str
    label: str
    gap: float
    first: float


def frontier(points: Sequence[FrontierPoint]) -> Figure:
    """Points of one kind are joined in their order."""
    x_title, y_title = "bystanders: between two tokens (p99), ms", "long prompt: first token, ms"
    figure = canvas(x_title=x_title, y_title=y_title)
    kinds = list(dict.fromkeys(point.kind for point in points))
    for kind, (symbol, position), colour in zip(kinds, KIND_LOOKS, CYCLE, strict=False):
        of_kind = [point for point in points if point.kind == kind]
        figure.add_line(
            [point.gap for point in of_kind],
            [point.first for point in of_kind],
            "chunks of %{text}: %{x:.3~g} ms, %{y:.3~g} ms<extra></extra>",
            {"color": GREY, "width": 1.5},
            mode="lines+markers+text",
            marker={"size": 11, "color": colour, "symbol": symbol},
            text=[point.label for point in of_kind],
            textposition=position,
            cliponaxis=False,
            name=kind,
        )
    figure.set_layout(showlegend=len(kinds) > 1)
    gaps = [point.gap for point in points]
    if max(gaps) > WIDE * min(gaps):
        figure.set_x(type="log", tickvals=TICKS, ticktext=[f"{tick:,}" for tick in TICKS])
    else:
        figure.set_x(rangemode="tozero")
    return figure


def saved_by_share(
    by_task: Mapping[str, Mapping[float, float]], source: Mapping[str, float], *, y_title: str
) -> Figure:
    """Saved shares by the share of text after the answer; `source` stands at the left edge."""
    height = TALL_PX if source else HEIGHT_PX  # for its names
    figure = canvas(x_title="share after the answer (input)", y_title=y_title, height=height)
    for place, (task, points) in enumerate(by_task.items()):
        colour, dash = CYCLE[place % len(CYCLE)], DASHES[place % len(DASHES)]
        figure.add_line(
            list(points),
            list(points.values()),
            f"{plain(task)}: %{{y:.1%}} at %{{x:.0%}}<extra></extra>",
            {"color": colour, "dash": dash},
            mode="lines+markers",
            name=task,
        )
        if task in source:
            hover = f"{plain(task)}, source: %{{y:.0%}}<extra></extra>"
            look = {"symbol": "diamond-open", "size": 11, "color": colour, "line": {"width": 2}}
            figure.add_line(
                [0],
                [source[task]],
                hover,
                {},
                mode="markers+text",
                marker=look,
                text=[f"{GAP}{plain(task)}"],
                textposition="middle right",
            )
    if not source:
        figure.add_line([0, 1], [0, 1], None, {"color": GREY, "dash": "dot"}, name="all of it")
    figure.set_x(tickformat=".0%", range=[-0.03, 1.04])
    figure.set_y(tickformat=".0%", range=[0, 1.04])
    return figure


def cancel_by_chunk(by_figure: Mapping[str, Mapping[str, float]]) -> Figure:
    """Cancel latencies in milliseconds, by figure and chunk size."""
    figure = canvas(x_title="chunk size, tokens a step", y_title="cancel latency, ms")
    for key, name, line, symbol in QUANTILES:
        figure.add_line(
            list(by_figure[key]),
            list(by_figure[key].values()),
            "chunks of %{x}: %{y:.3~g} ms",
            line,
            mode="lines+markers",
            marker={"symbol": symbol, "size": 8},
            name=name,
        )
    figure.set_x(type="category", categoryorder="array", categoryarray=list(by_figure["p50"]))
    return figure
