"""From a folder of runs to one HTML file: each figure from run to run."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dashboards.figures.history import over_runs
from dashboards.page import document, save
from dashboards.run_history import Group, PastRun, Track, read_history, tracks
from dashboards.sections.section import Picture, Section, Table
from dashboards.verdict import workload_limits
from harness.errors import ConfigError
from harness.formatting import DASH, bounded, quantity
from harness.gate.limits import RUN, Limit
from harness.metrics import METRICS, spoken

WRITTEN: Final = "%Y-%m-%d %H:%M"
Key = tuple[str, str]  # metric and figure


def write_trend(folder: Path, output: Path) -> None:
    groups, skipped = read_history(folder)
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


def _trend(group: Group, anchor: str) -> dict[str, Any]:
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


def _sentence(group: Group) -> str:
    newest, n = group.runs[-1], len(group.runs)
    if n == 1:
        return f"One run, of {newest.at:{WRITTEN}}: the first point of a trend."
    since = f"{n} runs from {group.runs[0].at:{WRITTEN}} to {newest.at:{WRITTEN}}."
    if newest.flaw is not None:
        return f"{since} The newest says nothing about the server: {newest.flaw}."
    return since


def _limits(run: PastRun) -> list[Limit]:
    lines = (run.workload.get("gate") or {}).get("limits") or []
    try:
        found = workload_limits(lines, run.workload)
    except ConfigError:
        return []  # the gate says what is wrong; here there is no line to draw
    return [limit for limit in found if limit.against is None]


def _limits_on(limits: Sequence[Limit], key: Key, keys: Mapping[Key, object]) -> list[Limit]:
    """The limits to draw over a figure: its own and, over the metric's first figure, those on
    figures without a picture.
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
        title=name[0].upper() + name[1:],
        shows=f"{about.shows} {_of_each(figure)}",
        good=about.good or "",
        pictures=(picture,),
    )


def _of_each(figure: str) -> str:
    if figure == "mean":
        return "A point is a run."
    share = {"p50": "half", "p99": "99 of 100"}[figure]
    return f"A point is a run: the value that {share} in it did not exceed."


def _table(group: Group, found: Mapping[Key, Sequence[Track]], changed: Container[str]) -> Table:
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
        shows="The newest first. What changed since the run before stands under the pictures.",
        columns=("run", "written (UTC)", "is", *(" ".join(key) for key in found)),
        rows=tuple(rows),
    )
