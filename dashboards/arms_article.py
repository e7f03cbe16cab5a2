"""The content of a report on a run with several arms, for `article.html.j2`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dashboards.sections import arms, early_stop
from dashboards.sections.section import Table, TableCell
from dashboards.sections.tables import SIDE_BY_SIDE, every_figure, value_tables
from dashboards.verdict import trust_of_arms
from harness.compare.pairs import FEWEST_ROUNDS, headline_differences, is_certain
from harness.export.library import Run
from harness.formatting import bounded, quantity
from harness.metrics import headline_figures, spoken
from harness.records import ArmsSummary, Difference


def of_arms(run: Run) -> dict[str, Any]:
    summary = run.of_arms
    known = {name for metrics in summary.metrics.values() for name in metrics}
    reasons = [one for arm in summary.arms.values() for one in arm.not_measurable.items()]
    return {
        "sentence": _arms_sentence(run),
        "is_sentence_first": True,
        "stops": None,  # of several servers
        "cards": [],
        "more_cards": [],
        "facts": list(_arms_facts(run)),
        "trust": trust_of_arms(run),
        "not_measurable": {name: reason for name, reason in reasons if name not in known},
        "side_by_side": list(_side_by_side(summary)),
        "sections": [*early_stop.sections(run), *arms.sections(run)],
        "tables": [] if summary.value is None else value_tables(summary.value),
        "listing": None,
        "every_figure": every_figure(summary.arms),
    }


def _arms_sentence(run: Run) -> str:
    summary = run.of_arms
    if not any(sum(arm.outcomes.values()) for arm in summary.arms.values()):
        return "No request was made, so there is nothing to report."
    if arms.is_frontier(run.manifest.workload) and (said := arms.frontier_sentence(run)):
        return said
    rounds, compared = quantity(summary.rounds, "rounds"), headline_differences(summary)
    asked = [of for of in compared if of[0] in summary.headlines and of[2].n]
    if asked:
        return f"Against {summary.reference}, in {rounds}: {_changes(asked, summary.rounds)}."
    certain = sum(is_certain(one) for _, _, one in compared)
    return (
        f"{len(summary.arms)} arms in {rounds}: {certain} of their headline figures surely "
        f"differ from those of {summary.reference}."
    )


def _changes(compared: Sequence[tuple[str, str, Difference]], rounds: int) -> str:
    """What surely changed in each arm, and which arms show no clear difference. Of fewer rounds
    than an interval takes, all is said.
    """
    by_arm: dict[str, list[str]] = {}
    for name, key, one in compared:
        said = by_arm.setdefault(one.arm, [])
        if is_certain(one) or rounds < FEWEST_ROUNDS:
            said.append(f"{spoken(name, key)} {arms.change(name, one)}")
    changed = [f"{arm} has {', '.join(said)}" for arm, said in by_arm.items() if said]
    alike = [arm for arm, said in by_arm.items() if not said]
    figures = list(dict.fromkeys(spoken(name, key) for name, key, _ in compared))
    of = figures[0] if len(figures) == 1 else f"any of {len(figures)} figures"
    no_clear = f"no clear difference in {of} for {arms.listed(alike, ', ')}"
    return "; ".join(filter(None, [arms.listed(changed), no_clear if alike else ""]))


def _arms_facts(run: Run) -> Iterator[tuple[str, str]]:
    summary, seed = run.of_arms, run.manifest.seed
    counts = {name: sum(arm.outcomes.values()) for name, arm in summary.arms.items()}
    shown = (f"{count:,} of {name}" for name, count in counts.items())
    last = seed + summary.rounds
    seeds = f"seed {last}" if summary.rounds == 1 else f"seeds {seed + 1} to {last}"
    yield "arms", arms.listed(_arm_settings(arm) for arm in run.manifest.workload["arms"])
    yield "rounds", f"{summary.rounds}, {seeds}"
    yield "requests", f"{sum(counts.values()):,}: {arms.listed(shown, ', ')}"


def _arm_settings(arm: Mapping[str, Any]) -> str:
    changes = [
        f"{section}.{key} = {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for section in ("target", "engine", "load", "arrivals", "collect")
        for key, value in (arm.get(section) or {}).items()
        if value not in (None, [])
    ]
    return f"{arm['name']}: {', '.join(changes) or 'as the workload says'}"


def _side_by_side(summary: ArmsSummary) -> Iterator[Table]:
    pairs = headline_figures(summary.metrics, summary.headlines)
    asked = [pair for pair in pairs if pair[0] in summary.headlines]
    others = [pair for pair in pairs if pair not in asked]
    tables = (("The arms side by side", asked), ("More figures side by side", others))
    for title, of in tables:
        if of:
            columns, rows = _arms_cells(summary, of)
            yield Table(title=title, shows=SIDE_BY_SIDE, columns=columns, rows=rows)


def _arms_cells(
    summary: ArmsSummary, of: Sequence[tuple[str, str]]
) -> tuple[tuple[str, ...], tuple[tuple[str | TableCell, ...], ...]]:
    """A column for each arm; a row, if there are many."""
    names = [_figure_name(summary, name, key) for name, key in of]
    cells = [[_cell(summary, name, key, arm) for arm in summary.arms] for name, key in of]
    columns, titles = ("figure", *summary.arms), names
    if len(summary.arms) > arms.MOST_NAMED:
        columns, titles = ("arm", *names), [*summary.arms]
        cells = [list(of_arm) for of_arm in zip(*cells, strict=True)]
    return columns, tuple((title, *row) for title, row in zip(titles, cells, strict=True))


def _figure_name(summary: ArmsSummary, name: str, key: str) -> str:
    found = [metrics[name].of for metrics in summary.metrics.values() if name in metrics]
    of = f" ({found[0]})" if found and found[0] is not None else ""
    return f"{spoken(name, key)}{of}"


def _cell(summary: ArmsSummary, name: str, key: str, arm: str) -> TableCell:
    metric = summary.arms[arm].metrics.get(name)
    if metric is None:
        return TableCell(text="not measurable")
    under = "the reference" if arm == summary.reference else None
    if (one := summary.difference(name, key, arm)) is not None and under is None:
        is_known = one.difference is not None
        under = arms.change(name, one) if is_known else None if one.n else one.note
    return TableCell(text=bounded(metric, key), under=() if under is None else (under,))
