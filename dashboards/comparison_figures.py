"""Pictures of runs beside each other: values in, figure out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import plotly.graph_objects as go

from dashboards.theme import BLUE, CYCLE, DASHES, GREY, SKY, VERMILION, canvas, pattern, plain
from harness.analysis.compare import Limits, Standing
from harness.analysis.stats import Curve, Floats
from harness.formatting import number, quantity
from harness.records import Metric

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
MOST_POINTS: Final = 400  # of a curve: every quarter of a percent
LOG_FROM: Final = 30  # times the shortest median: beyond it a linear axis would hide it
FOLDS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10)
DECADES: Final = (1e-4, 1e-3, 0.01, 0.1, 1, 10, 100, 1e3, 1e4)
WIDE: Final = 30  # from the lowest to the highest; beyond it only decades are marked
WASTE: Final = (
    ("wasted_in_flight_tokens", "on the way when the user left", SKY, ""),
    ("wasted_after_close_tokens", "generated after the user had left", VERMILION, "/"),
)
RUNGS: Final = (("p50", "circle", 11), ("p90", "diamond", 10), ("p99", "line-ns-open", 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One dot: a figure of a candidate, as so many times that of the baseline."""

    candidate: str
    figure: str
    ratio: float
    limits: Limits | None
    standing: Standing
    words: str


def ratios(dots: Sequence[Ratio]) -> go.Figure:
    """A row a figure, its name above a dot and its interval for each candidate, on a log axis.

    The form of a dot tells how it is judged, so of several candidates each dot bears the number.
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
        number = f"{place + 1} " if len(candidates) > 1 else ""
        _add_dots(figure, of, at, place, called=f"{number}{name}")
        if number:
            _number_dots(figure, of, at, number)
    figure.add_vline(x=1, line={"color": GREY, "width": 1, "dash": "dot"})
    _name_rows(figure, rows, above=(NAME_PX + below_px / 2) / row_px)
    _fold_axis(figure, [end for dot in dots for end in (dot.ratio, *(dot.limits or ()))])
    figure.update_layout(showlegend=len(candidates) > 1)
    return figure


def _number_dots(
    figure: go.Figure, dots: Sequence[Ratio], rows: Sequence[float], number: str
) -> None:
    """Behind each whisker, or dot without one."""
    figure.add_scatter(
        x=[dot.limits[1] if dot.limits else dot.ratio for dot in dots],
        y=list(rows),
        mode="text",
        text=[f"{'' if dot.limits else GAP}{GAP}{number}" for dot in dots],
        textposition="middle right",
        textfont={"size": 11},
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )


def _name_rows(figure: go.Figure, rows: Sequence[str], *, above: float) -> None:
    """In the picture and not beside it: on a phone there would be no room for the dots."""
    figure.update_layout(
        annotations=[
            {
                "text": plain(row),
                "font": {"size": 12},
                "showarrow": False,
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "y": place - above,
                "yanchor": "bottom",
            }
            for place, row in enumerate(rows)
        ]
    )
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        showticklabels=False,
        range=[len(rows) - 0.5, -0.8],
        rangemode="normal",
    )


def _fold_axis(figure: go.Figure, ends: Sequence[float]) -> None:
    low, high = min(*ends, 0.8), max(*ends, 1.25)
    folds = FOLDS if high < WIDE * low else DECADES
    figure.update_xaxes(
        type="log",
        range=[np.log10(low) - 0.05, np.log10(high) + 0.05],
        tickvals=list(folds),
        ticktext=[f"{number(fold)}x" for fold in folds],
    )


def _add_dots(
    figure: go.Figure, dots: Sequence[Ratio], rows: Sequence[float], place: int, *, called: str
) -> None:
    """The baseline has the first colour in every picture, so the candidates begin at the second."""
    colour = CYCLE[(place + 1) % len(CYCLE)]
    figure.add_scatter(
        x=[None], y=[None], mode="markers", marker={"color": colour}, name=plain(called)
    )
    for has_limits in (
        False,
        True,
    ):  # a dot without an interval gets no whisker, not one of length 0
        of = [
            (dot, row)
            for dot, row in zip(dots, rows, strict=True)
            if (dot.limits is not None) == has_limits
        ]
        figure.add_scatter(
            x=[dot.ratio for dot, _ in of],
            y=[row for _, row in of],
            mode="markers",
            marker={
                "color": colour,
                "size": 10,
                "symbol": [SYMBOLS[dot.standing] for dot, _ in of],
            },
            error_x=_whiskers([(dot.ratio, dot.limits) for dot, _ in of], colour)
            if has_limits
            else None,
            customdata=[plain(dot.words) for dot, _ in of],
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
        )


def cancel_curves(curves: Mapping[str, Curve], *, units: Mapping[str, float], of: str) -> go.Figure:
    """The share that each server had let go of, by time since the user left.

    `units`: how many seconds the unit of the x axis has, of each run; `of`: that unit's name.
    """
    figure = canvas(x_title=f"{of} since the user left", y_title="let go of")
    known = {label: _let_go(curve, units[label]) for label, curve in curves.items()}
    end = max(float(times[-1]) for times, _ in known.values())
    for place, (label, (times, done)) in enumerate(known.items()):
        _add_curve(figure, label, np.append(times, end), np.append(done, done[-1]), place)
    middles = [float(np.median(times)) for times, _ in known.values()]
    if 0 < LOG_FROM * min(middles) < end:
        figure.update_xaxes(type="log")
    else:
        figure.update_xaxes(range=[0, 1.03 * (end or 1.0)])
    figure.update_yaxes(tickformat=".0%", range=[0, 1.03])
    return figure


def _let_go(curve: Curve, unit_s: float) -> tuple[Floats, Floats]:
    """Times, in the unit, and shares: of those that were let go, evenly thinned out."""
    known = ~curve.censored
    if not known.any():
        return np.zeros(1), np.zeros(1)
    kept = _spread_out(int(known.sum()))
    return curve.times[known][kept] / unit_s, curve.done[known][kept]


def _add_curve(figure: go.Figure, label: str, times: Floats, done: Floats, place: int) -> None:
    figure.add_scatter(
        x=[0.0, *times.tolist()],
        y=[0.0, *done.tolist()],
        mode="lines",
        line={
            "shape": "hv",
            "width": 2.5,
            "color": CYCLE[place % len(CYCLE)],
            "dash": DASHES[place % len(DASHES)],
        },
        name=plain(label),
        hovertemplate="%{y:.1%} within %{x:.3~g}",
    )


def _spread_out(n: int) -> list[int]:
    """At most `MOST_POINTS` of n places, the first and the last among them."""
    places = np.linspace(0, n - 1, min(n, MOST_POINTS))
    return [int(place) for place in np.unique(places.round())]


def waste(runs: Mapping[str, Mapping[str, Metric]]) -> go.Figure:
    """Stacked bars: mean tokens for nobody, sampled before and after the user left; where the parts
    are not known, their sum. The whisker is the interval of the sum."""
    figure = canvas(x_title="", y_title="tokens for nobody, mean", height=300)
    for name, label, colour, shape in WASTE:
        figure.add_bar(
            x=[plain(run) for run in runs],
            y=[_mean(metrics.get(name)) if _has_parts(metrics) else 0 for metrics in runs.values()],
            name=label,
            marker={"color": colour, "pattern": pattern(shape)},
            hovertemplate="%{y:.3~g} tokens<extra>" + label + "</extra>",
        )
    if not all(_has_parts(metrics) for metrics in runs.values()):
        figure.add_bar(
            x=[plain(run) for run in runs],
            y=[0 if _has_parts(of) else _mean(of.get("wasted_tokens")) for of in runs.values()],
            name="together",
            marker={"color": GREY, "pattern": pattern("x")},
        )
    _add_whiskers(figure, {run: metrics["wasted_tokens"] for run, metrics in runs.items()})
    figure.update_layout(barmode="stack", bargap=0.45, legend_traceorder="normal")
    figure.update_xaxes(type="category")
    return figure


def _has_parts(metrics: Mapping[str, Metric]) -> bool:
    return all(name in metrics for name, *_ in WASTE)


def _mean(metric: Metric | None) -> float:
    return 0.0 if metric is None or metric.mean is None else metric.mean


def _add_whiskers(figure: go.Figure, totals: Mapping[str, Metric]) -> None:
    known = {run: one for run, one in totals.items() if one.mean is not None and one.mean_ci95}
    figure.add_scatter(
        x=[plain(run) for run in known],
        y=[one.mean for one in known.values()],
        mode="markers",
        marker={"size": 1, "color": GREY},
        error_y=_whiskers([(_mean(one), one.mean_ci95) for one in known.values()], GREY),
        showlegend=False,
        hoverinfo="skip",
    )


def ladders(runs: Mapping[str, Metric]) -> go.Figure:
    """A row a run: the median with its interval, the 90th and the 99th percentile."""
    figure = canvas(x_title="milliseconds", y_title="", height=110 + 36 * len(runs))
    for key, symbol, size in RUNGS:
        known = {run: one for run, one in runs.items() if getattr(one, key) is not None}
        values = [getattr(one, key) for one in known.values()]
        limits = [getattr(one, f"{key}_ci95", None) for one in known.values()]
        ends = [
            (value * 1e3, None if both is None else (both[0] * 1e3, both[1] * 1e3))
            for value, both in zip(values, limits, strict=True)
        ]
        figure.add_scatter(
            x=[value for value, _ in ends],
            y=[plain(run) for run in known],
            mode="markers",
            marker={"symbol": symbol, "size": size, "color": BLUE, "line": {"width": 2}},
            error_x=_whiskers(ends, GREY) if key == "p50" else None,
            name=key,
            customdata=[quantity(value, "s") for value in values],
            hovertemplate="%{y}: %{customdata}<extra>" + key + "</extra>",
        )
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=[plain(run) for run in reversed(list(runs))],
        rangemode="normal",
    )
    figure.update_xaxes(rangemode="tozero")
    return figure


def _whiskers(values: Sequence[tuple[float, Limits | None]], colour: str) -> dict[str, object]:
    """From values and their intervals; without an interval there is none."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [None if limits is None else limits[1] - value for value, limits in values],
        "arrayminus": [None if limits is None else value - limits[0] for value, limits in values],
        "color": colour,
        "thickness": 2,
        "width": 5,
    }
