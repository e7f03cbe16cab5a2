"""The section about tokens for nobody: by when a user left, and by what the request was doing."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.section import Picture, Section, median_and_p99, why_not
from dashboards.source import Run
from dashboards.tables import PlainTable
from dashboards.theme import SKY, VERMILION, canvas, pattern
from harness.analysis.cancellation import is_unfinished
from harness.formatting import quantity

MOST_BARS: Final = 10
PHASES: Final = {"waiting": "in the queue", "prefill": "in prefill", "decode": "in decode"}
_SPENT: Final = (("slot_seconds", "s"), ("gpu_seconds", "s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Mean unread tokens of `n` requests: sampled before their users left, and after.

    A lower bound (`is_lower`) where some were still held when the watching ended.
    """

    label: str
    n: int
    in_flight: float
    after_close: float
    is_lower: bool = False

    @property
    def text(self) -> str:
        """The sum, with the sign of its bound."""
        return _shown(self.in_flight + self.after_close, "", is_lower=self.is_lower)


def waste(run: Run) -> Section:
    """By abandon point and by phase, and what else was spent on nobody."""
    section = Section(
        name="waste",
        title="Tokens for nobody",
        shows="Mean tokens per abandoned request that were generated and never read, by how many "
        "the user had read before leaving, and by what the server was doing then.",
        good="the same small bars wherever the user leaves; after the close no more than the one "
        "step in flight.",
    )
    pictures = [*_by_point(run), *_by_phase(run)]
    if not pictures:
        names = ("wasted_after_close_tokens", "wasted_in_flight_tokens", "wasted_tokens")
        return section.without(
            why_not(run, names, "This server does not tell what it generated for each request.")
        )
    return section.drawn(*pictures, tables=_tables(run.cancels))


def _by_point(run: Run) -> list[Picture]:
    points = run.summary.breakdown.get("waste_by_abandon_point") or []
    is_open = is_unfinished(run.cancels)
    bars = point_bars(points, unfinished=set(run.cancels.loc[is_open, "planned_abandon"].dropna()))
    if not bars:
        return []
    said = []
    if len(points) > len(bars):
        said.append(
            f"{len(points):,} abandon points, in {len(bars)} groups of about as many requests."
        )
    return [
        Picture(
            name="waste",
            figure=waste_bars(bars, x_title="tokens the user was to read before leaving"),
            alt="Stacked bars of wasted tokens for each abandon point. "
            + median_and_p99(run.metrics.get("wasted_tokens")),
            note=" ".join([*said, *_about_bounds(bars)]) or None,
        )
    ]


def _by_phase(run: Run) -> list[Picture]:
    bars = phase_bars(run.cancels)
    if not bars:
        return []
    words = "; ".join(f"{bar.label}: {bar.text}" for bar in bars)
    return [
        Picture(
            name="waste-phase",
            figure=waste_bars(bars, x_title="where the request was when its user left"),
            alt=f"Stacked bars of mean wasted tokens for each phase. {words}.",
            note=" ".join(_about_bounds(bars)) or None,
        )
    ]


def _about_bounds(bars: Sequence[Bar]) -> list[str]:
    if not any(bar.is_lower for bar in bars):
        return []
    return ["≥: at least so many; some requests were still held when the watching ended."]


def _shown(value: float, unit: str, *, is_lower: bool) -> str:
    return ("≥ " if is_lower else "") + quantity(value, unit)


def point_bars(
    points: Sequence[Mapping[str, Any]],
    most: int = MOST_BARS,
    unfinished: Collection[int] = (),
) -> list[Bar]:
    """A bar for each abandon point; of more than `most`, neighbours are put together so that each
    bar is of about as many requests. Of the points in `unfinished` a lower bound is known."""
    if not points:
        return []
    counts = np.array([point["n"] for point in points])
    if len(points) <= most:
        groups = np.arange(len(points))
    else:
        groups = np.minimum((np.cumsum(counts) - counts / 2) * most // counts.sum(), most - 1)
    bars = []
    for group in np.unique(groups):
        those = [point for point, of in zip(points, groups, strict=True) if of == group]
        n = np.array([point["n"] for point in those])
        first, last = those[0]["planned_abandon"], those[-1]["planned_abandon"]
        bars.append(
            Bar(
                label=f"{first:,}" if first == last else f"{first:,} to {last:,}",
                n=int(n.sum()),
                in_flight=_mean([point["in_flight_mean"] for point in those], n),
                after_close=_mean([point["after_close_mean"] for point in those], n),
                is_lower=any(point["planned_abandon"] in unfinished for point in those),
            )
        )
    return bars


def _mean(values: Sequence[float], weights: Any) -> float:
    return float(np.average(values, weights=weights))


def phase_bars(cancels: pd.DataFrame) -> list[Bar]:
    """A bar for each phase in which somebody left, of the requests whose waste is known."""
    names = ["wasted_in_flight_tokens", "wasted_after_close_tokens"]
    known = cancels.dropna(subset=names)
    return [
        Bar(
            label=f"{label} ({len(rows):,})",
            n=len(rows),
            in_flight=float(rows[names[0]].mean()),
            after_close=float(rows[names[1]].mean()),
            is_lower=bool(is_unfinished(rows).any()),
        )
        for phase, label in PHASES.items()
        if len(rows := known[known["phase"] == phase])
    ]


def waste_bars(bars: Sequence[Bar], *, x_title: str) -> go.Figure:
    """Stacked: tokens generated before and after the user left, unread; the sum on top."""
    figure = canvas(x_title=x_title, y_title="tokens for nobody, mean", height=280)
    names = [bar.label for bar in bars]
    parts = (
        ([bar.in_flight for bar in bars], "on the way when the user left", SKY, ""),
        ([bar.after_close for bar in bars], "generated after the user had left", VERMILION, "/"),
    )
    for values, label, colour, shape in parts:
        figure.add_bar(
            name=label,
            x=names,
            y=values,
            customdata=[(bar.n, bar.text) for bar in bars],
            marker={"color": colour, "pattern": pattern(shape)},
            hovertemplate="%{y:.3~g} tokens (of %{customdata[1]}), mean of %{customdata[0]} "
            f"requests<extra>{label}</extra>",
        )
    figure.update_traces(
        selector=-1,
        text=[bar.text for bar in bars],
        textposition="outside",
        textangle=0,
        cliponaxis=False,
    )
    figure.update_layout(barmode="stack", bargap=0.4, legend_traceorder="normal")
    figure.update_xaxes(type="category")
    return figure


def _tables(cancels: pd.DataFrame) -> tuple[PlainTable, ...]:
    """What one abandoned request went on holding and costing, by phase."""
    known = cancels.dropna(subset=[name for name, _ in _SPENT])
    rows = [
        (
            label,
            f"{len(those):,}",
            *(
                _shown(float(those[name].mean()), unit, is_lower=bool(is_unfinished(those).any()))
                for name, unit in _SPENT
            ),
        )
        for phase, label in PHASES.items()
        if len(those := known[known["phase"] == phase])
    ]
    if not rows:
        return ()
    return (
        PlainTable(
            title="Time for nobody, by where the request was",
            shows="Means per abandoned request, after its user had left: how long it kept its "
            "batch slot, and its share of the time of the engine's steps.",
            columns=("left", "requests", "slot time", "step time"),
            rows=tuple(rows),
        ),
    )
