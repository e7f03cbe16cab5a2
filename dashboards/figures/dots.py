"""Dots for figures of several arms or runs: ratios to a baseline, rounds, chunk sizes, shares."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import plotly.graph_objects as go

from dashboards.figures.look import (
    BLUE,
    CYCLE,
    DASHES,
    GREEN,
    GREY,
    HEIGHT_PX,
    NO_NAME,
    POINT_TEXT,
    SCALES,
    VERMILION,
    Limits,
    Properties,
    axis,
    note,
    plain,
    styled,
    vertical_line,
    whiskers,
)
from harness.compare.pairs import FEWEST_ROUNDS, Standing
from harness.formatting import number, quantity
from harness.stats import mean_ci95

LOOKS: Final = {  # symbol, colour, size
    Standing.NOT_JUDGED: ("diamond-open", GREY, 10),
    Standing.UNSURE: ("circle-open", GREY, 10),
    Standing.BETTER: ("circle", GREEN, 12),
    Standing.WORSE: ("x", VERMILION, 12),
}
KIND_LOOKS: Final = (("circle", "top right"), ("diamond", "top right"), ("x", "top left"))
TICKS: Final = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
GAP: Final = "\N{NO-BREAK SPACE}"
ROW_PX: Final = 44  # with its name, of one candidate
NEXT_PX: Final = 14  # each other candidate below the first
IN_SIGHT_PX: Final = 560
NAME_PX: Final = 12  # a row's name above its first dot
DECADES: Final = (1e-4, 1e-3, 0.01, 0.1, 1, 10, 100, 1e3, 1e4)
FOLDS: Final = {  # by the most from the lowest to the highest: a phone has room for their names
    3: (0.5, 0.65, 0.8, 1, 1.25, 1.5, 2),
    8: (0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7),
    30: (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20),
    1000: (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
}
WIDE: Final = 30  # from the lowest to the highest; beyond it a scale is logarithmic
TALL_PX: Final = 440
MOST_NAMED: Final = 12  # arms
LONGEST_NAME: Final = 18
_ERROR: Final = {  # by whether there are few
    True: {"type": "data", "color": GREY, "thickness": 2, "width": 8},
    False: {"type": "data", "color": GREY, "thickness": 0.7, "width": 0},
}
_MEAN: Final = {"symbol": "line-ew-open", "color": GREY, "line": {"width": 3}}
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


def ratios(dots: Sequence[Ratio], numbers: Mapping[str, int], scale: Properties) -> go.Figure:
    """A row for each figure: its name, below it a dot and interval for each candidate. `numbers`:
    of the candidates, where there are several; `scale`: by `fold_axis`, above the rows.
    """
    rows = list(dict.fromkeys(dot.figure for dot in dots))
    below_px = NEXT_PX * (max(1, len(numbers)) - 1)
    row_px = ROW_PX + below_px
    place_of = {name: place for place, name in enumerate(numbers)}
    at = [
        rows.index(dot.figure) + (NEXT_PX * place_of.get(dot.candidate, 0) - below_px / 2) / row_px
        for dot in dots
    ]
    traces = list(_ratio_traces(dots, at))
    if numbers:
        traces.append(_numbers(dots, at, numbers))
    ticks = {"tickvals": list(range(len(rows))), "showticklabels": False}
    return styled(
        traces,
        x=scale,
        y=axis("", **ticks, range=[len(rows) - 0.5, -0.8], rangemode="normal"),
        height=90 + row_px * len(rows),
        showlegend=False,
        shapes=[vertical_line(1)],
        annotations=_row_names(rows, above=(NAME_PX + below_px / 2) / row_px),
    )


def rows_in_sight(num_candidates: int) -> int:
    """How many rows fit on a screen below their scale."""
    return max(1, IN_SIGHT_PX // (ROW_PX + NEXT_PX * (num_candidates - 1)))


def _ratio_traces(dots: Sequence[Ratio], rows: Sequence[float]) -> Iterator[go.Scatter]:
    placed = list(zip(dots, rows, strict=True))
    for stands, (symbol, colour, size) in LOOKS.items():
        for has_limits in (False, True):  # Plotly draws a missing interval as one of length 0
            of = [
                (dot, row)
                for dot, row in placed
                if dot.standing is stands and (dot.limits is not None) == has_limits
            ]
            if not of:
                continue
            values, limits = [dot.ratio for dot, _ in of], [dot.limits for dot, _ in of]
            yield go.Scatter(
                mode="markers",
                x=values,
                y=[row for _, row in of],
                error_x=whiskers(values, limits, colour=colour) if has_limits else None,
                marker={"color": colour, "size": size, "symbol": symbol},
                name=str(stands),
                customdata=[plain(dot.text) for dot, _ in of],
                hovertemplate=POINT_TEXT + NO_NAME,
            )


def _numbers(
    dots: Sequence[Ratio], rows: Sequence[float], numbers: Mapping[str, int]
) -> go.Scatter:
    return go.Scatter(
        mode="text",
        x=[dot.limits[1] if dot.limits else dot.ratio for dot in dots],
        y=rows,
        text=[f"{'' if dot.limits else GAP}{GAP}{numbers[dot.candidate]}" for dot in dots],
        textposition="middle right",
        textfont={"size": 11},
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )


def _row_names(rows: Sequence[str], *, above: float) -> list[Properties]:
    """Names stand inside the picture: next to it, they would leave a phone no room for the dots."""
    left = {"x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom", "font": {"size": 12}}
    return [note(plain(row), y=place - above, **left) for place, row in enumerate(rows)]


def fold_axis(dots: Sequence[Ratio]) -> Properties:
    """The scale for all of them, to be shared by several pictures."""
    ends = [end for dot in dots for end in (dot.ratio, *(dot.limits or ()))]
    low, high = min(*ends, 0.8), max(*ends, 1.25)
    folds = next((marked for most, marked in FOLDS.items() if high < most * low), DECADES)
    around = [float(np.log10(low)) - 0.05, float(np.log10(high)) + 0.05]
    texts = [f"{number(fold)}x" for fold in folds]
    look = {"type": "log", "range": around, "tickvals": folds, "ticktext": texts, "side": "top"}
    return axis("times the baseline (log)", **look)


def per_round(values: Mapping[str, Sequence[float | None]], *, title: str, unit: str) -> go.Figure:
    scale, shown_unit = SCALES.get(unit, (1.0, unit))
    by_arm = {plain(arm): [one for one in own if one is not None] for arm, own in values.items()}
    rounds = [(arm, one) for arm, own in by_arm.items() for one in own]
    dots = go.Scatter(
        mode="markers",
        x=[arm for arm, _ in rounds],
        y=[one * scale for _, one in rounds],
        marker={"size": 8, "color": BLUE, "opacity": 0.6},
        name="a round",
        customdata=[f"{arm}: {quantity(one, unit)}" for arm, one in rounds],
        hovertemplate=POINT_TEXT,
    )
    is_few = len(by_arm) <= MOST_NAMED
    known = {arm: values for arm, values in by_arm.items() if values}
    means = {arm: float(np.mean(values)) for arm, values in known.items()}
    bars = go.Scatter(
        mode="markers",
        x=list(means),
        y=[mean * scale for mean in means.values()],
        error_y={**_ERROR[is_few], "array": [_half_width(one) * scale for one in known.values()]},
        marker={**_MEAN, "size": 22 if is_few else 7},
        name="mean and its 95 % interval",
        customdata=[f"{arm}: {quantity(mean, unit)}" for arm, mean in means.items()],
        hovertemplate=POINT_TEXT,
    )
    x_title = "" if is_few else f"{len(by_arm):,} arms, in the order of the table"
    x = axis(x_title, showgrid=is_few, **_names(by_arm))
    y = axis(title if title.endswith(shown_unit) else f"{title}, {shown_unit}")
    return styled([dots, bars], x=x, y=y, height=280)


def _names(arms: Collection[str]) -> Properties:
    """Names that would leave no room for the dots are cut short, or left to the table."""
    categories = {"type": "category", "categoryorder": "array", "categoryarray": list(arms)}
    if len(arms) > MOST_NAMED:
        return {**categories, "showticklabels": False}
    if max(map(len, arms), default=0) <= LONGEST_NAME:
        return categories
    texts = [one if len(one) <= LONGEST_NAME else f"{one[: LONGEST_NAME - 1]}…" for one in arms]
    return {**categories, "tickvals": list(arms), "ticktext": texts}


def _half_width(values: Sequence[float]) -> float:
    limits = mean_ci95(np.array(values)) if len(values) >= FEWEST_ROUNDS else None
    return 0.0 if limits is None else (limits[1] - limits[0]) / 2


class FrontierPoint(NamedTuple):
    """The waits with chunks of one size, in milliseconds: `gap` of the bystanders, `first` of the
    long prompt. `kind`: the setting that limits the chunk."""

    kind: str
    label: str
    gap: float
    first: float


def frontier(points: Sequence[FrontierPoint]) -> go.Figure:
    """Points of one kind are joined in their order."""
    kinds = list(dict.fromkeys(point.kind for point in points))
    traces = []
    for kind, (symbol, position), colour in zip(kinds, KIND_LOOKS, CYCLE, strict=False):
        of_kind = [point for point in points if point.kind == kind]
        line = go.Scatter(
            mode="lines+markers+text",
            x=[point.gap for point in of_kind],
            y=[point.first for point in of_kind],
            line={"color": GREY, "width": 1.5},
            marker={"size": 11, "color": colour, "symbol": symbol},
            text=[point.label for point in of_kind],
            textposition=position,
            cliponaxis=False,
            name=plain(kind),
            hovertemplate="chunks of %{text}: %{x:.3~g} ms, %{y:.3~g} ms" + NO_NAME,
        )
        traces.append(line)
    gaps = [point.gap for point in points]
    look: Properties = {"rangemode": "tozero"}
    if max(gaps) > WIDE * min(gaps):
        look = {"type": "log", "tickvals": TICKS, "ticktext": [f"{tick:,}" for tick in TICKS]}
    x = axis("bystanders: between two tokens (p99), ms", **look)
    y = axis("long prompt: first token, ms")
    return styled(traces, x=x, y=y, showlegend=len(kinds) > 1)


def saved_by_share(
    by_task: Mapping[str, Mapping[float, float]], source: Mapping[str, float], *, y_title: str
) -> go.Figure:
    """Saved shares by the share of text after the answer; `source` stands at the left edge."""
    traces = []
    for place, (task, points) in enumerate(by_task.items()):
        colour, dash, name = CYCLE[place % len(CYCLE)], DASHES[place % len(DASHES)], plain(task)
        line = go.Scatter(
            mode="lines+markers",
            x=list(points),
            y=list(points.values()),
            line={"color": colour, "dash": dash},
            name=name,
            hovertemplate=f"{name}: %{{y:.1%}} at %{{x:.0%}}{NO_NAME}",
        )
        traces.append(line)
        if task in source:
            traces.append(_of_the_source(name, source[task], colour))
    if not source:
        look = {"mode": "lines", "line": {"color": GREY, "dash": "dot"}, "hoverinfo": "skip"}
        traces.append(go.Scatter(x=[0, 1], y=[0, 1], name="all of it", **look))
    return styled(
        traces,
        x=axis("share after the answer (input)", tickformat=".0%", range=[-0.03, 1.04]),
        y=axis(y_title, tickformat=".0%", range=[0, 1.04]),
        height=TALL_PX if source else HEIGHT_PX,  # for its names
    )


def _of_the_source(name: str, share: float, colour: str) -> go.Scatter:
    return go.Scatter(
        mode="markers+text",
        x=[0],
        y=[share],
        marker={"symbol": "diamond-open", "size": 11, "color": colour, "line": {"width": 2}},
        text=[f"{GAP}{name}"],
        textposition="middle right",
        showlegend=False,
        hovertemplate=f"{name}, source: %{{y:.0%}}{NO_NAME}",
    )


def cancel_by_chunk(by_figure: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Cancel latencies in milliseconds, by figure and chunk size."""
    lines = [
        go.Scatter(
            mode="lines+markers",
            x=list(by_figure[key]),
            y=list(by_figure[key].values()),
            line=line,
            marker={"symbol": symbol, "size": 8},
            name=name,
            hovertemplate="chunks of %{x}: %{y:.3~g} ms",
        )
        for key, name, line, symbol in QUANTILES
    ]
    chunks = {"type": "category", "categoryorder": "array", "categoryarray": list(by_figure["p50"])}
    x = axis("chunk size, tokens a step", **chunks)
    return styled(lines, x=x, y=axis("cancel latency, ms"))
