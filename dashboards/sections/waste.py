"""Unread tokens, by abandon point and by phase."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from dashboards.figures.bars import WasteBar, waste_bars
from dashboards.sections.cancel import PHASES
from dashboards.sections.section import Part, Picture, Table, median_and_p99, section, why_not
from harness.analysis.cancellations import is_unfinished
from harness.export.library import Run
from harness.formatting import quantity

MOST_BARS: Final = 10
PARTS: Final = ["wasted_in_flight_tokens", "wasted_after_close_tokens"]
_SPENT: Final = ["slot_seconds", "gpu_seconds"]
_LOWER: Final = "≥: a lower bound; some requests were still held when the watching ended."


@section(
    "waste",
    "Unread tokens",
    "Mean tokens per abandoned request that were generated and never read, by how many the user "
    "had read before leaving, and by what the server was doing then.",
    good="small bars of one height wherever the user leaves; after the close no more than the one "
    "step in flight.",
)
def waste(run: Run) -> Iterator[Part]:
    points = run.whole.breakdown.get("waste_by_abandon_point") or []
    cancels = run.cancellations
    unfinished = cancels.loc[is_unfinished(cancels), "planned_abandon"]
    bars = point_bars(points, unfinished=set(unfinished.dropna()))
    phases = phase_bars(cancels)
    if not bars and not phases:
        names = (*reversed(PARTS), "wasted_tokens")
        yield why_not(run, names, "This server does not report each request's generated tokens.")
        return
    if bars:
        grouped = (
            f"{len(points):,} abandon points, in {len(bars)} groups of about as many requests."
        )
        notes = [grouped] if len(points) > len(bars) else []
        yield Picture(
            name="waste",
            figure=waste_bars(bars, x_title="tokens the user was to read before leaving"),
            alt="Stacked bars of wasted tokens for each abandon point. "
            + median_and_p99(run.metrics.get("wasted_tokens")),
            note=" ".join([*notes, *_about_bounds(bars)]) or None,
        )
    if phases:
        said = "; ".join(f"{bar.label}: {bar.text}" for bar in phases)
        yield Picture(
            name="waste-phase",
            figure=waste_bars(phases, x_title="where the request was when its user left"),
            alt=f"Stacked bars of mean wasted tokens for each phase. {said}.",
            note=" ".join(_about_bounds(phases)) or None,
        )
    yield from _time_table(cancels)


def _about_bounds(bars: Sequence[WasteBar]) -> list[str]:
    return [_LOWER] if any(bar.text.startswith("≥") for bar in bars) else []


def point_bars(
    points: Sequence[Mapping[str, Any]], most: int = MOST_BARS, unfinished: Collection[int] = ()
) -> list[WasteBar]:
    """A bar for each abandon point; beyond `most`, neighbours are merged so that each bar stands
    for about as many requests. A point in `unfinished` gives a lower bound.
    """
    counts = np.array([point["n"] for point in points])
    groups = np.arange(len(points))
    if len(points) > most:
        groups = np.minimum((np.cumsum(counts) - counts / 2) * most // counts.sum(), most - 1)
    bars = []
    for group in np.unique(groups):
        alike = [point for point, of in zip(points, groups, strict=True) if of == group]
        first, last = alike[0]["planned_abandon"], alike[-1]["planned_abandon"]
        weights = [point["n"] for point in alike]
        in_flight, after_close = (
            float(np.average([point[name] for point in alike], weights=weights))
            for name in ("in_flight_mean", "after_close_mean")
        )
        is_lower = any(point["planned_abandon"] in unfinished for point in alike)
        label = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        bars.append(_bar(label, sum(weights), in_flight, after_close, is_lower=is_lower))
    return bars


def phase_bars(cancels: pd.DataFrame) -> list[WasteBar]:
    return [
        _bar(
            f"{label} ({len(rows):,})",
            len(rows),
            *(float(rows[name].mean()) for name in PARTS),
            is_lower=bool(is_unfinished(rows).any()),
        )
        for label, rows in _by_label(cancels.dropna(subset=PARTS))
    ]


def _by_label(cancels: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    found = [(label, cancels[cancels["phase"] == phase]) for phase, label in PHASES.items()]
    return [(label, rows) for label, rows in found if len(rows)]


def _bar(label: str, n: int, in_flight: float, after_close: float, *, is_lower: bool) -> WasteBar:
    total = in_flight + after_close
    return WasteBar(
        label=label,
        n=n,
        total=total,
        parts=(in_flight, after_close),
        text=_shown(total, "", is_lower=is_lower),
    )


def _shown(value: float, unit: str, *, is_lower: bool) -> str:
    return ("≥ " if is_lower else "") + quantity(value, unit)


def _time_table(cancels: pd.DataFrame) -> Iterator[Table]:
    rows = []
    for label, of_label in _by_label(cancels.dropna(subset=_SPENT)):
        is_lower = bool(is_unfinished(of_label).any())
        means = [_shown(float(of_label[name].mean()), "s", is_lower=is_lower) for name in _SPENT]
        rows.append((label, f"{len(of_label):,}", *means))
    if rows:
        yield Table(
            title="Time spent after the user had left, by phase",
            shows="Means per abandoned request, after its user had left: how long it kept its "
            "batch slot, and its share of the time of the engine's steps.",
            columns=("left", "requests", "slot time", "step time"),
            rows=tuple(rows),
        )
