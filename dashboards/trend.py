"""From a folder of runs to one HTML file: each figure from run to run."""

from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go

from dashboards.figures.look import (
    CYCLE,
    GREY,
    MARKS_AXIS,
    POINT_TEXT,
    SCALES,
    VERMILION,
    Properties,
    axis,
    note,
    plain,
    styled,
    vertical_line,
    whiskers,
)
from dashboards.page import document, save
from dashboards.run_history import PastRun, Point, RunGroup, Track, read_history, tracks
from dashboards.sections.section import Picture, Section, Table
from harness.errors import ConfigError
from harness.formatting import DASH, between, bounded, quantity
from harness.gate.limits import RUN, Limit, workload_limits
from harness.metrics import METRICS, spoken, titled
from harness.store.run_folder import is_run

WRITTEN: Final = "%Y-%m-%d %H:%M"
SYMBOLS: Final = ("circle", "diamond", "square", "triangle-up", "star", "hexagon")
Key = tuple[str, str]  # metric and figure


def write_trend(folder: Path, output: Path) -> None:
    groups, skipped = read_history(folder)
    if not groups:
        raise ConfigError(_why_no_run(folder, skipped))
    trends = [_trend(group, f"group{number}") for number, group in enumerate(groups)]
    html = document(
        "trend.html.j2",
        {trend["anchor"]: trend["sections"] for trend in trends},
        folder=folder.resolve().name,
        num_runs=quantity(sum(len(group.runs) for group in groups), "runs"),
        trends=trends,
        skipped=skipped,
    )
    save(html, output)


def _why_no_run(folder: Path, skipped: Sequence[tuple[str, str]]) -> str:
    if is_run(folder):
        return f"{folder}: is a run itself; name the folder that holds this run and others"
    if not skipped:
        return f"{folder}: holds no folder of a run; name the folder that holds the runs"
    name, why = skipped[0]
    return f"{folder}: holds no run that can be drawn; the first of {len(skipped)}, {name}: {why}"


def _trend(group: RunGroup, anchor: str) -> dict[str, Any]:
    found, changes = tracks(group.runs), group.changes()
    limits = _limits(group.runs[-1])
    flawed = [(run.name, run.flaw) for run in group.runs if run.flaw is not None]
    beside = (
        (flawed, f"{quantity(len(flawed), 'runs')} not joined"),
        (changes, f"{quantity(len(changes), 'changes')} of what was run"),
    )
    return {
        "anchor": anchor,
        "title": f"{group.workload} on {group.engine}, {group.model}",
        "sentence": _sentence(group),
        "flawed": flawed,
        "changes": [(f"{run.at:{WRITTEN}} {run.name}", text) for run, text in changes],
        "beside": ", ".join(text for those, text in beside if those),
        "sections": [
            _section(key, of, _limits_on(limits, key, found), changes) for key, of in found.items()
        ],
        "table": _table(group, found, {run.name for run, _ in changes}),
    }


def _sentence(group: RunGroup) -> str:
    newest, n = group.runs[-1], len(group.runs)
    if n == 1:
        return f"One run, of {newest.at:{WRITTEN}}: the first point of a trend."
    since = f"{n} runs from {group.runs[0].at:{WRITTEN}} to {newest.at:{WRITTEN}}."
    if newest.flaw is not None:
        return f"{since} The newest says nothing about the server: {newest.flaw}."
    return since


def _limits(run: PastRun) -> list[Limit]:
    try:
        found = workload_limits(run.workload)
    except ConfigError:
        return []  # the gate says what is wrong; here there is no line to draw
    return [limit for limit in found if limit.against is None]


def _limits_on(limits: Sequence[Limit], key: Key, keys: Mapping[Key, object]) -> list[Limit]:
    """The limits to draw over a figure: its own and, over the metric's first figure, the limits on
    the metric's figures that have no picture.
    """
    metric, figure = key
    first = next(other for other in keys if other[0] == metric)
    return [
        limit
        for limit in limits
        if limit.metric == metric
        and (limit.key == figure or (key == first and (metric, limit.key) not in keys))
    ]


def _section(
    key: Key, of: Sequence[Track], limits: Sequence[Limit], changes: Sequence[tuple[PastRun, str]]
) -> Section:
    metric, figure = key
    name, about = spoken(metric, figure), METRICS[metric]
    newest = "; ".join(
        ("" if track.side == RUN else f"{track.side}: ") + bounded(track.points[-1].metric, figure)
        for track in of
    )
    picture = Picture(
        name=f"{metric}-{figure}",
        figure=over_runs(of, limits, {run.at: text for run, text in changes}),
        alt=f"{name} of each run over time. The newest: {newest}",
        note=f"The newest: {newest}",
    )
    return Section(
        name=f"{metric}-{figure}",
        title=titled(metric, figure),
        shows=f"{about.shows} {_of_each(figure)}",
        good=about.good or "",
        pictures=(picture,),
    )


def _of_each(figure: str) -> str:
    if figure == "mean":
        return "A point is a run."
    share = {"p50": "half", "p99": "99 of 100"}[figure]
    return f"A point is a run: the value that {share} of its samples did not exceed."


def _table(group: RunGroup, found: Mapping[Key, Sequence[Track]], changed: Container[str]) -> Table:
    rows = []
    for run in reversed(group.runs):
        state = "valid" if run.flaw is None else run.flaw.partition(":")[0]
        state = f"{state}, changed" if run.name in changed else state
        for side, of in run.measured.sides.items():
            name = run.name if side == RUN else f"{run.name}, {side}"
            figures = (
                bounded(of.metrics[metric], figure) if metric in of.metrics else DASH
                for metric, figure in found
            )
            rows.append((name, f"{run.at:{WRITTEN}}", state, *figures))
    return Table(
        title="Every run",
        shows="The newest first. The changes since the previous run stand under the pictures.",
        columns=("run", "written (UTC)", "is", *(" ".join(key) for key in found)),
        rows=tuple(rows),
    )


def over_runs(
    tracks: Sequence[Track], limits: Sequence[Limit], changes: Mapping[datetime, str]
) -> go.Figure:
    scale, unit = SCALES.get(tracks[0].unit, (1.0, tracks[0].unit))
    every = [point for track in tracks for point in track.points]
    traces = [_line(track, scale, place) for place, track in enumerate(tracks)]
    traces += _points(
        [(one, one.value, f"{_text(one)}, {one.run.flaw}") for one in every if one.run.flaw],
        scale,
        {"symbol": "x", "size": 9, "color": VERMILION},
        "invalid or not complete",
    )
    traces += _points(
        [
            (one, one.more_than, f"{one.run.name}: > {quantity(one.more_than, one.metric.unit)}")
            for one in every
        ],
        scale,
        {"symbol": "triangle-up-open", "size": 11, "color": VERMILION},
        "known only to be more",
    )
    traces += _changed(changes)
    shapes = [_limit_line(limit, scale) for limit in limits]
    shapes += [vertical_line(at.isoformat(), layer="below") for at in changes]
    return styled(
        traces,
        x=axis("written (UTC)", type="date"),
        y=axis(unit),
        yaxis2=MARKS_AXIS,
        height=280,
        showlegend=len(traces) > 1,
        shapes=shapes,
        annotations=[_limit_note(limit, scale) for limit in limits],
    )


def _line(track: Track, scale: float, place: int) -> go.Scatter:
    points: list[Point | None] = []
    for stretch in track.stretches():
        points += [*stretch, None]  # a gap before the next
    values = [None if one is None else one.value for one in points]
    ends = [None if one is None else one.limits for one in points]
    return go.Scatter(
        mode="lines+markers",
        x=[None if one is None else one.run.at.isoformat() for one in points],
        y=[None if value is None else value * scale for value in values],
        error_y=whiskers(values, ends, scale=scale, thickness=1, width=2),
        line={"width": 1.5, "color": CYCLE[place % len(CYCLE)]},
        marker={"size": 7, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        name=plain(track.side),
        customdata=["" if one is None else plain(_text(one)) for one in points],
        hovertemplate=POINT_TEXT,
    )


def _text(point: Point) -> str:
    metric = point.metric
    limits = between(point.limits, metric.unit)
    sure = "" if limits is None else f" ({limits})"
    figure = f"{quantity(point.value, metric.unit)}{sure}"
    return f"{point.run.at:{WRITTEN}} {point.run.name}: {figure}"


def _points(
    points: Sequence[tuple[Point, float | None, str]],
    scale: float,
    marker: Mapping[str, object],
    name: str,
) -> Iterator[go.Scatter]:
    known = [(one.run.at, value * scale, text) for one, value, text in points if value is not None]
    if known:
        yield go.Scatter(
            mode="markers",
            x=[at.isoformat() for at, _, _ in known],
            y=[y for _, y, _ in known],
            marker=marker,
            name=name,
            customdata=[plain(text) for _, _, text in known],
            hovertemplate=POINT_TEXT,
        )


def _limit_line(limit: Limit, scale: float) -> Properties:
    y = limit.number * scale
    place = {"x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y, "yref": "y"}
    return {"type": "line", "line": {"color": VERMILION, "width": 1.5, "dash": "dash"}, **place}


def _limit_note(limit: Limit, scale: float) -> Properties:
    text = plain(f"limit: {limit.figure} {limit.operator} {limit.number:g}")
    at = {"y": limit.number * scale, "yref": "y", "yanchor": "bottom"}
    return note(text, font={"size": 11}, x=0, xanchor="left", xref="x domain", **at)


def _changed(changes: Mapping[datetime, str]) -> Iterator[go.Scatter]:
    if changes:
        yield go.Scatter(
            mode="markers",
            x=[at.isoformat() for at in changes],
            y=[0.02] * len(changes),
            yaxis="y2",
            marker={"symbol": "diamond-tall", "size": 9, "color": GREY},
            name="something else changed",
            customdata=[plain(text) for text in changes.values()],
            hovertemplate=POINT_TEXT,
        )
