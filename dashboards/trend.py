"""From a folder of runs to one HTML file: what got worse since when, and each figure over time."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from dashboards.figures.over_runs import WRITTEN, TrendContext, over_runs, signs
from dashboards.page import document, save
from dashboards.run_history import PastRun, RunGroup, Track, read_history, tracks
from dashboards.sections.section import Picture, Section, Table
from dashboards.turns import Key, TrendTurn, broken_limits, can_be_judged, turns
from harness.compare.change import FEWEST_RUNS
from harness.errors import ConfigError
from harness.formatting import DASH, bounded, quantity
from harness.gate.limits import RUN, Limit, workload_limits
from harness.metrics import METRICS, spoken, titled
from harness.store.run_folder import is_run

LOOKED_FOR: Final = "folders that `walkaway run` wrote (each with manifest.json and summary.json)"


def write_trend(
    folder: Path, output: Path, *, watch: Callable[[int, int], object] = lambda _done, _num: None
) -> None:
    """`watch`: as of `read_history`."""
    groups, skipped = read_history(folder, watch=watch)
    if not groups:
        raise ConfigError(_why_no_run(folder, skipped))
    found = [_trend(group, f"group{number}") for number, group in enumerate(groups)]
    num_runs = quantity(sum(len(group.runs) for group in groups), "runs")
    html = document(
        "trend.html.j2",
        {one["anchor"]: one["sections"] for one in found},
        folder=folder.resolve().name,
        num_runs=num_runs,
        headline=_headline([turn for one in found for turn in one["turns"]], found, num_runs),
        trends=found,
        skipped=skipped,
    )
    save(html, output)


def _why_no_run(folder: Path, skipped: Sequence[tuple[str, str]]) -> str:
    if is_run(folder):
        return f"{folder}: is a run itself; name the folder that holds this run and others"
    if not skipped:
        return (
            f"{folder}: holds no folder of a run; looked for {LOOKED_FOR}; name the folder that "
            "holds the runs"
        )
    name, why = skipped[0]
    return f"{folder}: holds no run that can be drawn; the first of {len(skipped)}, {name}: {why}"


def _headline(
    turned: Sequence[TrendTurn], found: Sequence[Mapping[str, Any]], num_runs: str
) -> str:
    if not any(one["is_judged"] for one in found):
        return f"{num_runs}: too few for a trend"
    counts = _counts(turned)
    return f"{counts} in {num_runs}" if counts else f"Nothing got worse in {num_runs}"


def _counts(turned: Sequence[TrendTurn]) -> str:
    num_worse = sum(one.is_worse for one in turned)
    num_better = len(turned) - num_worse
    worse = f"{quantity(num_worse, 'figures')} got worse" if num_worse else "No figure got worse"
    if not num_better:
        return worse if num_worse else ""
    better = f"{num_better}" if num_worse else quantity(num_better, "figures")
    return f"{worse}, {better} got better"


def _trend(group: RunGroup, anchor: str) -> dict[str, Any]:
    found, changes, limits = tracks(group.runs), group.changes(), _limits(group.runs[-1])
    turned, broken = turns(found), broken_limits(group.runs, limits)
    sides = list(dict.fromkeys(track.side for of in found.values() for track in of))
    by_time = {run.at: text for run, text in changes}
    around = TrendContext(sides=sides, broken=broken, changes=by_time)
    sections = {
        key: _section(key, found[key], _limits_on(limits, key, found), turned, around)
        for key in dict.fromkeys([*(one.key for one in turned), *found])
    }
    return {
        "anchor": anchor,
        "title": f"{group.workload} on {group.engine}, {group.model}",
        "sentence": " ".join(_sentences(group, found, broken)),
        "is_judged": can_be_judged(found),
        "counts": _counts(turned) or "Nothing got worse, nothing better",
        "turns": turned,
        "turn_rows": [_turn_row(one, by_time) for one in turned],
        "has_limits": bool(limits),
        "signs": signs([one.pictures[0].figure for one in sections.values()], sides),
        "sections": [*sections.values()],
        "where": {one.name: _where(found[key], group.runs[-1]) for key, one in sections.items()},
        "words": {one.name: _words_of(one.name, turned) for one in sections.values()},
        "meanings": list(dict.fromkeys(METRICS[metric] for metric, _ in found)),
        "table": _table(group, found, {run.name for run, _ in changes}),
        **_not_joined(group, changes),
    }


def _where(of: Sequence[Track], newest: PastRun) -> str:
    last = max((track.points[-1].run for track in of), key=lambda run: run.at)
    which = "the newest run" if last.name == newest.name else "the newest run that has it"
    return f"in {which}" if last.flaw is None else f"in {which}: {last.flaw.partition(':')[0]}"


def _words_of(name: str, turned: Sequence[TrendTurn]) -> list[tuple[str, str]]:
    return [(_mark(one), _in_words(one)) for one in turned if one.name == name]


def _not_joined(group: RunGroup, changes: Sequence[tuple[PastRun, str]]) -> dict[str, Any]:
    flawed = [(run.name, run.flaw) for run in group.runs if run.flaw is not None]
    beside = (
        (flawed, f"{quantity(len(flawed), 'runs')} not joined"),
        (changes, f"{quantity(len(changes), 'changes')} of what was run"),
    )
    return {
        "flawed": flawed,
        "changes": [(f"{run.at:{WRITTEN}} {run.name}", text) for run, text in changes],
        "beside": ", ".join(text for of, text in beside if of),
    }


def _sentences(
    group: RunGroup,
    found: Mapping[Key, Sequence[Track]],
    broken: Mapping[str, Sequence[Limit]],
) -> Iterator[str]:
    newest, n = group.runs[-1], len(group.runs)
    if n == 1:
        yield f"One run, of {newest.at:{WRITTEN}}: the first point of a trend."
    else:
        yield f"{n} runs from {group.runs[0].at:{WRITTEN}} to {newest.at:{WRITTEN}}."
    if newest.flaw is not None:
        yield f"The newest says nothing about the server: {newest.flaw}."
    if n > 1 and not can_be_judged(found):
        yield (
            f"What got worse can be said from {FEWEST_RUNS} comparable runs on; `walkaway compare` "
            "compares two."
        )
    if broken:
        is_newest = "the newest among them" if newest.name in broken else "not the newest"
        runs = quantity(len(broken), "runs")
        yield f"Beyond a limit of the gate: {runs}, {is_newest}."


def _mark(turn: TrendTurn) -> str:
    return "bad" if turn.is_worse else "good"


def _turn_row(turn: TrendTurn, changes: Mapping[datetime, str]) -> dict[str, Any]:
    before, since = turn.levels
    first = turn.since[0].run
    return {
        "mark": _mark(turn),
        "word": turn.word,
        "name": turn.name,
        "figure": turn.title,
        "since": f"{first.at:{WRITTEN}}",
        "run": first.name,
        "changed": changes.get(first.at),
        "runs": quantity(len(turn.since), "runs"),
        "before": before,
        "now": since,
        "times": turn.times,
    }


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
    key: Key,
    of: Sequence[Track],
    limits: Sequence[Limit],
    turned: Sequence[TrendTurn],
    around: TrendContext,
) -> Section:
    metric, figure = key
    turned = [one for one in turned if one.key == key]
    newest = "; ".join(
        ("" if track.side == RUN else f"{track.side}: ") + bounded(track.points[-1].metric, figure)
        for track in of
    )
    said = "".join(f" {_in_words(one)}." for one in turned)
    picture = Picture(
        name=f"{metric}-{figure}",
        figure=over_runs(of, limits, turned, around),
        alt=f"{spoken(metric, figure)} of each run over time. The newest: {newest}.{said}",
        note=newest,
    )
    return Section(
        name=f"{metric}-{figure}",
        title=titled(metric, figure),
        shows=METRICS[metric].shows,
        good=METRICS[metric].good or "",
        pictures=(picture,),
    )


def _in_words(turn: TrendTurn) -> str:
    arm = "" if turn.track.side == RUN else f"{turn.track.side}: "
    before, since = turn.levels
    return f"{arm}{turn.word} since {turn.since[0].run.at:%Y-%m-%d}, {before} to {since}"


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
        shows="The newest first. The changes since the previous run stand above.",
        columns=("run", "written (UTC)", "is", *(titled(*key) for key in found)),
        rows=tuple(rows),
    )
