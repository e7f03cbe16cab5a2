"""From a folder of runs to one HTML file: how figures moved from night to night."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dashboards.nights import Group, Night, read_nights
from dashboards.page import document, save
from dashboards.section import Picture, Section
from dashboards.tables import PlainTable
from dashboards.tracks import Track, tracks
from dashboards.trend_figures import over_nights
from harness.analysis.compare import FEWEST_EARLIER, Limits
from harness.errors import ConfigError
from harness.formatting import DASH, between, bounded, quantity
from harness.gate.limits import RUN, Limit, parse_limits
from harness.metrics import METRICS, spoken

NIGHT: Final = "%Y-%m-%d %H:%M"
Key = tuple[str, str]  # metric and figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """What the page says of one group."""

    anchor: str
    title: str
    sentence: str
    flawed: Sequence[tuple[str, str]]
    changes: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    table: PlainTable

    @property
    def beside(self) -> str:
        """How much a reader must know beside the pictures."""
        parts = (
            (self.flawed, f"{quantity(len(self.flawed), 'runs')} not joined"),
            (self.changes, f"{quantity(len(self.changes), 'changes')} of what was run"),
        )
        return ", ".join(words for those, words in parts if those)


def write_trend(folder: Path, output: Path) -> None:
    """Raises `ConfigError` where the folder cannot be read or the page not be written."""
    nights = read_nights(folder)
    trends = [_trend(group, f"group{number}") for number, group in enumerate(nights.groups)]
    html = document(
        "trend.html.j2",
        {trend.anchor: trend.sections for trend in trends},
        folder=folder.resolve().name,
        num_runs=quantity(sum(len(group.nights) for group in nights.groups), "runs"),
        trends=trends,
        skipped=nights.skipped,
    )
    save(html, output)


def _trend(group: Group, anchor: str) -> Trend:
    found, changes = tracks(group), group.changes()
    limits = _limits(group.nights[-1])
    return Trend(
        anchor=anchor,
        title=f"{group.workload} on {group.engine}, {group.model}",
        sentence=_sentence(group, found),
        flawed=[(night.name, night.flaw) for night in group.nights if night.flaw is not None],
        changes=[(f"{night.at:{NIGHT}} {night.name}", text) for night, text in changes],
        sections=[
            _section(key, of, _limits_on(limits, key, found), changes) for key, of in found.items()
        ],
        table=_table(group, found, {night.name for night, _ in changes}),
    )


def _sentence(group: Group, found: Mapping[Key, Sequence[Track]]) -> str:
    newest, n = group.nights[-1], len(group.nights)
    if n == 1:
        return f"One run, of {newest.at:{NIGHT}}: the first point of a trend."
    since = f"{n} runs from {group.nights[0].at:{NIGHT}} to {newest.at:{NIGHT}}."
    if newest.flaw is not None:
        return f"{since} The newest says nothing of the server: {newest.flaw}."
    judged = [
        (track, expected)
        for of in found.values()
        for track in of
        if (expected := track.expected()) is not None
    ]
    if not judged:
        return (
            f"{since} The newest is not judged: it takes {FEWEST_EARLIER} earlier runs that it can "
            "be compared with."
        )
    outside = [_unexpected(track, limits) for track, limits in judged if _is_outside(track, limits)]
    if not outside:
        return (
            f"{since} The newest is what the earlier lead one to expect, in {len(judged)} figures."
        )
    return f"{since} Unexpected in the newest, of {len(judged)} figures: {'; '.join(outside)}."


def _is_outside(track: Track, limits: Limits) -> bool:
    value = track.points[-1].value
    return value is not None and not limits[0] <= value <= limits[1]


def _unexpected(track: Track, limits: Limits) -> str:
    of = "" if track.side == RUN else f" of {track.side}"
    value = quantity(track.points[-1].value, track.unit)
    return f"{spoken(track.metric, track.figure)}{of} {value}, {_expected_words(track, limits)}"


def _expected_words(track: Track, limits: Limits) -> str:
    low, high = limits
    shown = quantity(low, track.unit) if low == high else between(limits, track.unit)
    return f"expected {shown}"


def _limits(night: Night) -> list[Limit]:
    """Those of the newest run's workload that are on a figure by itself."""
    workload = night.workload
    arms = [arm["name"] for arm in workload.get("arms") or []]
    try:
        lines = (workload.get("gate") or {}).get("limits") or []
        found = parse_limits(lines, source=night.name, arms=arms)
    except ConfigError:
        return []  # whoever runs the gate is told; here there is no line to draw
    return [limit for limit in found if limit.against is None]


def _limits_on(limits: Sequence[Limit], key: Key, keys: Mapping[Key, object]) -> list[Limit]:
    """Those to draw over a figure: on it, or (on its first figure) on one that has no picture."""
    metric, figure = key
    first = next(other for other in keys if other[0] == metric)
    return [
        limit
        for limit in limits
        if limit.metric == metric
        and (limit.key == figure or (key == first and (metric, limit.key) not in keys))
    ]


def _section(
    key: Key, of: Sequence[Track], limits: Sequence[Limit], changes: Sequence[tuple[Night, str]]
) -> Section:
    metric, figure = key
    name, info = spoken(metric, figure), METRICS[metric]
    newest = "; ".join(
        f"{'' if track.side == RUN else f'{track.side}: '}{_latest(track)}" for track in of
    )
    picture = Picture(
        name=f"{metric}-{figure}",
        figure=over_nights(of, limits, {night.at: text for night, text in changes}),
        alt=f"{name} of each run over time. The newest: {newest}",
        note=f"The newest: {newest}",
    )
    return Section(
        name=f"{metric}-{figure}",
        title=name[0].upper() + name[1:],
        shows=f"{info.shows} {_of_each(figure)}",
        good=info.good or "",
        pictures=(picture,),
    )


def _of_each(figure: str) -> str:
    """What a point is, of all that was measured in its run."""
    if figure == "mean":
        return "A point is a run."
    share = {"p50": "half", "p99": "99 of 100"}[figure]
    return f"A point is a run: what {share} in it did not exceed."


def _latest(track: Track) -> str:
    point, expected = track.points[-1], track.expected()
    said = bounded(point.metric, track.figure)
    return said if expected is None else f"{said}, {_expected_words(track, expected)}"


def _table(
    group: Group, found: Mapping[Key, Sequence[Track]], changed: Container[str]
) -> PlainTable:
    return PlainTable(
        title="Every run",
        shows="The newest first. What changed since the run before stands under the pictures.",
        columns=("run", "written (UTC)", "is", *(" ".join(key) for key in found)),
        rows=tuple(
            row for night in reversed(group.nights) for row in _rows(night, list(found), changed)
        ),
    )


def _rows(night: Night, keys: Sequence[Key], changed: Container[str]) -> Iterator[tuple[str, ...]]:
    state = "valid" if night.flaw is None else night.flaw.partition(":")[0]
    for side, of in night.measured.sides.items():
        yield (
            night.name if side == RUN else f"{night.name}, {side}",
            f"{night.at:{NIGHT}}",
            f"{state}, changed" if night.name in changed else state,
            *(
                bounded(of.metrics[metric], figure) if metric in of.metrics else DASH
                for metric, figure in keys
            ),
        )
