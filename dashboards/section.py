"""What a section of the report is: pictures, or the reason why there are none.

A section without data is not drawn empty: it says why, in the words of the summary where it has
some, so that "not measurable here" is never mistaken for zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import plotly.graph_objects as go

from dashboards.downsample import Series
from dashboards.source import Run
from dashboards.tables import PlainTable
from dashboards.timelines import Timeline
from harness.formatting import bounded, number
from harness.records import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure, its words for those who cannot see it, and what its caption must add."""

    name: str
    figure: go.Figure
    alt: str
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One heading: what it shows, what good looks like, and the pictures or the reason; `tables`
    hold the figures that a picture cannot show."""

    name: str
    title: str
    shows: str
    good: str
    pictures: tuple[Picture, ...] = ()
    tables: tuple[PlainTable, ...] = ()
    reason: str | None = None

    def drawn(self, *pictures: Picture, tables: tuple[PlainTable, ...] = ()) -> "Section":
        """The section with its pictures."""
        return replace(self, pictures=pictures, tables=tables)

    def without(self, reason: str) -> "Section":
        """The section with the reason why it has no picture, or lacks one."""
        return replace(self, reason=reason)


def over_time(timeline: Timeline, name: str, alt: str) -> Picture:
    """A picture of a timeline, its caption saying how it was down-sampled."""
    return Picture(name=name, figure=timeline.figure, alt=alt, note=timeline.note)


def levels_in_words(series: Mapping[str, Series]) -> str:
    """Lines as a sentence: "running: highest 8, mean 6.1, at the end 0; waiting: ..."."""
    said = [
        f"{name}: highest {number(one.levels.highest)}, mean {number(one.levels.mean)}, "
        f"at the end {number(one.levels.last)}"
        for name, one in series.items()
        if one.levels is not None
    ]
    return f"{'; '.join(said)}."


def why_not(run: Run, names: tuple[str, ...], otherwise: str) -> str:
    """Nobody left; or the summary's reason for the first figure it could not measure."""
    if not run.summary.outcomes.get("abandoned"):
        return "Nobody left early in this run."
    reasons = run.summary.not_measurable
    return next((reasons[name] for name in names if name in reasons), otherwise)


def median_and_p99(metric: Metric | None) -> str:
    """Two quantiles as a sentence for an alternative text; nothing where there is no metric."""
    if metric is None or not metric.n:
        return ""
    return f"Median {bounded(metric, 'p50')}, 99th percentile {bounded(metric, 'p99')}."
