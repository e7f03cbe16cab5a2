"""The content of a page's section: pictures and tables, or the reason why there are none.

A section without data is not drawn empty. It gives the reason, if possible in the summary's words,
so that "not measurable here" is never mistaken for zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dashboards.figures.canvas import Figure
from dashboards.figures.ladders import ladders
from dashboards.source import Run
from harness.formatting import bounded, figure_of
from harness.records import Metric

CLIENT_TIMES = (
    ("ttft_s", "first token (TTFT)"),
    ("ttft_from_intended_s", "... from the intended start"),
    ("itl_s", "between tokens (ITL)"),
    ("tpot_s", "per token (TPOT)"),
    ("e2e_s", "whole answer (E2E)"),
    ("e2e_from_intended_s", "... of it from the intended start"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure, the text for readers that cannot see it, and an addition to its caption."""

    name: str
    figure: Figure
    alt: str
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A text with its unit in small type, and more lines and a warning (`flag`) under it."""

    text: str
    unit: str | None = None
    flag: str | None = None
    under: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`shows` explains the table; the first cell of a row names it."""

    title: str
    shows: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One heading, an explanation (`shows`), how good looks, and the pictures or the `reason` for
    their absence; `tables` hold the figures that a picture cannot show.
    """

    name: str
    title: str
    shows: str
    good: str
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    reason: str | None = None

    def drawn(self, *pictures: Picture, tables: tuple[Table, ...] = ()) -> "Section":
        return replace(self, pictures=pictures, tables=tables)

    def without(self, reason: str) -> "Section":
        return replace(self, reason=reason)


def why_not(run: Run, names: Sequence[str], otherwise: str) -> str:
    """The summary's reason for the first of these figures that it could not measure."""
    if not run.summary.outcomes.get("abandoned"):
        return "No user left early in this run."
    reasons = run.summary.not_measurable
    return next((reasons[name] for name in names if name in reasons), otherwise)


def median_and_p99(metric: Metric | None) -> str:
    if metric is None or not metric.n:
        return ""
    return f"Median {bounded(metric, 'p50')}, 99th percentile {bounded(metric, 'p99')}."


def ladder_picture(
    metric: str,
    label: str,
    by_side: Mapping[str, Mapping[str, Metric]],
    *,
    prefix: str = "",
    intervals: bool = False,
) -> Picture | None:
    known = {side: of[metric] for side, of in by_side.items() if metric in of}
    if not any(one.n and (one.p50 is not None or one.lower_bounds) for one in known.values()):
        return None
    medians = "; ".join(f"{side}: {figure_of(one, 'p50')}" for side, one in known.items())
    return Picture(
        name=f"{prefix}{metric}",
        figure=ladders(list(known.items()), intervals=intervals),
        note=label,
        alt=f"{label}, a ladder of quantiles for each. Medians: {medians}",
    )
