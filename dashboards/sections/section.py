"""The content of a page's section: pictures and tables, or the reason why there are none."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, TypeVar

import plotly.graph_objects as go

from dashboards.figures.ladders import ladders
from harness.export.library import Run
from harness.formatting import DASH, bounded, figure_of
from harness.records import Metric

Of = TypeVar("Of")  # what a section is of: a run, a run with arms, a comparison
CLIENT_TIMES: Final = (
    ("ttft_s", "first token (TTFT)"),
    ("ttft_from_intended_s", "... from the intended start"),
    ("itl_s", "between tokens (ITL)"),
    ("tpot_s", "per token (TPOT)"),
    ("e2e_s", "whole answer (E2E)"),
    ("e2e_from_intended_s", "... of it from the intended start"),
)
MOST_SIDES: Final = 24  # with a row in a picture
_FIGURE: Final = re.compile(r"[<>≤≥]? ?[-+\N{MINUS SIGN}]?\d")
_LONGEST_FIGURE: Final = 36  # characters: a longer text is a sentence that begins with a figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    name: str
    figure: go.Figure
    alt: str
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """A text with its unit in small type, and more lines and a warning (`flag`) under it."""

    text: str
    unit: str | None = None
    flag: str | None = None
    under: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    shows: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | TableCell, ...], ...]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers: most of its known cells, and no sentence. The first
        column names the rows.
        """
        cells = [[row[at] for row in self.rows if at < len(row)] for at in range(len(self.columns))]
        return [False, *map(_is_numeric, cells[1:])]


def _is_numeric(cells: Iterable[str | TableCell]) -> bool:
    texts = [one if isinstance(one, str) else one.text for one in cells]
    known = [text for text in texts if text not in ("", DASH)]
    figures = [text for text in known if _FIGURE.match(text)]
    return 0 < len(known) <= 2 * len(figures) and max(map(len, known)) <= _LONGEST_FIGURE


Part = Picture | Table | str  # a text is the reason for what is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One heading, an explanation (`shows`), how good looks, and the pictures or the `reason` for
    their absence; `tables` hold the figures that a picture cannot show.
    """

    name: str
    title: str
    shows: str
    good: str
    pictures: tuple[Picture, ...]
    tables: tuple[Table, ...] = ()
    reason: str | None = None


def section(
    name: str, title: str, shows: str, *, good: str
) -> Callable[[Callable[[Of], Iterable[Part]]], Callable[[Of], Section]]:
    """Makes a section from the words here and the parts that the function yields."""

    def from_parts(parts_of: Callable[[Of], Iterable[Part]]) -> Callable[[Of], Section]:
        def build(of: Of) -> Section:
            parts = list(parts_of(of))
            return Section(
                name=name,
                title=title,
                shows=shows,
                good=good,
                pictures=tuple(one for one in parts if isinstance(one, Picture)),
                tables=tuple(one for one in parts if isinstance(one, Table)),
                reason=next((one for one in parts if isinstance(one, str)), None),
            )

        return build

    return from_parts


def first_picture(sections: Sequence[Section]) -> tuple[list[Section], list[Section]]:
    """The section of the first picture with that alone, for the first screen, and the others: what
    is left of the first is one of them.
    """
    first = next((one for one in sections if one.pictures), None)
    if first is None:
        return [], [*sections]
    alone = replace(first, pictures=first.pictures[:1], tables=(), reason=None)
    rest = replace(
        first,
        name=f"{first.name}-more",
        title=f"{first.title}: more",
        pictures=first.pictures[1:],
    )
    left = [rest if one is first else one for one in sections]
    return [alone], [one for one in left if one.pictures or one.tables or one.reason]


def why_not(run: Run, names: Sequence[str], otherwise: str) -> str:
    if not run.whole.outcomes.get("abandoned"):
        return "No user left early in this run."
    reasons = run.whole.not_measurable
    return next((reasons[name] for name in names if name in reasons), otherwise)


def median_and_p99(metric: Metric | None) -> str:
    if metric is None or not metric.n:
        return ""
    return f"Median {bounded(metric, 'p50')}, 99th percentile {bounded(metric, 'p99')}."


def ladder_pictures(
    labels: Iterable[tuple[str, str]],
    by_side: Mapping[str, Mapping[str, Metric]],
    otherwise: str,
    *,
    prefix: str = "",
    intervals: bool = False,
) -> Iterator[Part]:
    has_any, of = False, len(by_side)
    by_side = dict(islice(by_side.items(), MOST_SIDES))
    more = f"; the first {MOST_SIDES} of {of:,}" if of > MOST_SIDES else ""
    for metric, label in labels:
        known = {side: of[metric] for side, of in by_side.items() if metric in of}
        if any(one.n and (one.p50 is not None or one.lower_bounds) for one in known.values()):
            has_any = True
            medians = "; ".join(f"{side}: {figure_of(one, 'p50')}" for side, one in known.items())
            yield Picture(
                name=f"{prefix}{metric}",
                figure=ladders(list(known.items()), intervals=intervals),
                note=f"{label}{more}",
                alt=f"{label}, a ladder of quantiles for each. Medians: {medians}",
            )
    if not has_any:
        yield otherwise
