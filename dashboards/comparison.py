"""From a baseline and its candidates to one HTML file: sure differences, and pictures arm by arm.

A candidate that cannot be compared is left out with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dashboards.page import document, save
from dashboards.sections.comparison import Side, Sides, against, sections
from dashboards.sections.section import Table
from harness.analysis.tokens import COUNTED_BY
from harness.compare.comparison import (
    BASELINE,
    CANDIDATE,
    Comparison,
    cells,
    compare_each,
    not_compared,
    steps_differ,
    times,
)
from harness.compare.pairs import Pair, Standing, standing
from harness.errors import ConfigError
from harness.export.library import Run, load_run
from harness.formatting import DASH, between, bounded, quantity, shift_in_words
from harness.metrics import METRICS, headline_figures, spoken
from harness.records import Metric, num_slots

MOST_NAMED: Final = 4  # figures in a sentence; the others are counted
BOTH_WAYS: Final = (
    "The runs differ in step time, so a time is called better or worse only if it is so both as "
    "measured and in steps."
)
DETAILS: Final = (
    *("figure", "difference", "95 %", "times", "95 % of times"),
    *("in steps", "95 % in steps", "judged"),
)


def write_comparison(baseline: Path, candidates: Sequence[Path], output: Path) -> None:
    run = load_run(baseline)
    by_arm, refused = _compared(run, labels_of([baseline, *candidates]), candidates)
    articles = [_article(sides, f"arm{place}") for place, sides in enumerate(by_arm)]
    labels = list(dict.fromkeys(one.label for sides in by_arm for one in sides[1:]))
    named = labels[0] if len(labels) == 1 else f"{len(labels)} candidates"
    html = document(
        "comparison.html.j2",
        {one["anchor"]: one["sections"] for one in articles},
        title=f"{named} against {by_arm[0][0].label}",
        question=str(run.manifest.workload.get("question") or ""),
        workload=str(run.summary.workload),
        refused=refused,
        articles=articles,
        runs=_runs_table([one for sides in by_arm for one in sides]),
    )
    save(html, output)


def _compared(
    baseline: Run, labels: Sequence[str], candidates: Sequence[Path]
) -> tuple[list[list[Side]], list[tuple[str, str]]]:
    by_arm: dict[str, list[Side]] = {}
    refused = []
    for label, found in zip(labels[1:], compare_each(baseline, candidates), strict=True):
        if isinstance(found, ConfigError):
            refused.append((label, str(found)))
            continue
        run, comparisons = found
        for one in comparisons:
            first = Side(labels[0], baseline, one.arm, one.metrics[BASELINE], None)
            sides = by_arm.setdefault(one.arm, [first])
            sides.append(Side(label, run, one.arm, one.metrics[CANDIDATE], one))
        for arm in {**baseline.arms, **run.arms}:
            if arm not in run.arms or arm not in baseline.arms:
                which = CANDIDATE if arm in run.arms else BASELINE
                refused.append((label, f"arm {arm}: only the {which} has it"))
    if not by_arm:
        raise ConfigError("\n".join(reason for _, reason in refused))
    return list(by_arm.values()), refused


def labels_of(paths: Sequence[Path]) -> list[str]:
    names = [path.resolve().name for path in paths]
    counts = Counter(names)
    labels = []
    for place, (name, path) in enumerate(zip(names, paths, strict=True)):
        label = name if counts[name] == 1 else str(path)
        before = paths[:place].count(path)
        labels.append(f"{label} ({before + 1})" if before else label)
    return labels


def _article(sides: Sides, anchor: str) -> dict[str, Any]:
    return {
        "anchor": anchor,
        "arm": sides[0].arm,
        "answers": [_answer(*one, sides[0].label) for one in against(sides)],
        "tables": [_side_by_side(sides), *(_details(*one) for one in against(sides))],
        "sections": sections(sides),
    }


def _answer(candidate: Side, comparison: Comparison, baseline: str) -> dict[str, Any]:
    label = candidate.label
    shifts = (
        shift_in_words(metric, label, baseline, shift, "s")
        for metric, shift in comparison.shifts.items()
    )
    return {
        "label": f"{label}, arm {candidate.arm}" if candidate.arm else label,
        "sentence": _sentence(comparison, baseline),
        "cautions": [one for one in comparison.remarks if one.level != "info"],
        "remarks": [one for one in comparison.remarks if one.level == "info"],
        "not_compared": not_compared(comparison.pairs),
        "shifts": [text for text in shifts if text is not None],
    }


def _sentence(comparison: Comparison, baseline: str) -> str:
    if any(one.level == "invalid" for one in comparison.remarks):
        return "One of the runs is invalid, so its figures say nothing about the server."
    by_standing: dict[Standing, list[Pair]] = {which: [] for which in Standing}
    for pair in comparison.pairs:
        if METRICS[pair.metric].part_of is None:
            by_standing[standing(pair)].append(pair)
    sure = [
        f"surely {which} at {_named(by_standing[which])}"
        for which in (Standing.WORSE, Standing.BETTER)
        if by_standing[which]
    ]
    judged = (Standing.WORSE, Standing.BETTER, Standing.UNSURE)
    num_judged = sum(len(by_standing[which]) for which in judged)
    if not num_judged:
        return f"No figure can be compared with {baseline}."
    both_ways = f" {BOTH_WAYS}" if steps_differ(comparison) else ""
    if not sure:
        return f"Against {baseline}: no sure difference in any of {num_judged} figures.{both_ways}"
    num_unsure = len(by_standing[Standing.UNSURE])
    rest = f"no sure difference in {num_unsure} of {num_judged} figures"
    return f"Against {baseline}: {'; '.join([*sure, rest])}.{both_ways}"


def _named(pairs: Sequence[Pair]) -> str:
    first = list({pair.metric: pair for pair in reversed(pairs)}.values())[::-1]
    shown = [f"{spoken(pair.metric, pair.figure)} ({_apart(pair)})" for pair in first[:MOST_NAMED]]
    more = len(first) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _apart(pair: Pair) -> str:
    if pair.ratio is None:
        return f"{quantity(pair.baseline, pair.unit)} to {quantity(pair.candidate, pair.unit)}"
    in_steps = "" if pair.ratio_in_steps is None else f", in steps {times(pair.ratio_in_steps)}"
    return f"{times(pair.ratio)}{in_steps}"


def _side_by_side(sides: Sides) -> Table:
    metrics = {one.label: one.metrics for one in sides}
    return Table(
        title="Side by side",
        shows="Each figure of each run; each time is followed by its length in steps of the run's "
        "engine.",
        columns=("figure", *metrics),
        rows=tuple(
            (
                name if key == "mean" else f"{name} {key}",
                *(_value(of, name, key) for of in metrics.values()),
            )
            for name, key in headline_figures(metrics)
        ),
    )


def _value(metrics: Mapping[str, Metric], name: str, key: str) -> str:
    if name not in metrics:
        return DASH
    metric, step = metrics[name], metrics.get("step_s")
    text, value = bounded(metric, key), getattr(metric, key)
    if metric.unit != "s" or value is None or step is None or not step.p50:
        return text
    return f"{text} = {quantity(value / step.p50, 'steps')}"


def _details(candidate: Side, comparison: Comparison) -> Table:
    return Table(
        title=f"{candidate.label} against the baseline, figure by figure",
        shows="Difference: candidate less baseline. Times: candidate divided by baseline. In "
        "steps: the same ratio, each time in steps of its own engine. A time is surely better or "
        "worse only if it is so by both ratios. One in twenty equal figures is called a sure "
        "difference by chance.",
        columns=DETAILS,
        rows=tuple(_detail(comparison, pair) for pair in comparison.pairs),
    )


def _detail(comparison: Comparison, pair: Pair) -> tuple[str, ...]:
    of, stands = cells(comparison, pair), standing(pair)
    return (
        *(of[name] for name in ("figure", "difference", "95 %", "times")),
        between(pair.ratio_ci95, "") or DASH,
        of["in steps"],
        between(pair.ratio_in_steps_ci95, "") or DASH,
        f"{stands}: {pair.note}" if stands is Standing.NOT_COMPARED else str(stands),
    )


def _runs_table(sides: Sides) -> Table:
    facts = {one.label: dict(_facts(one)) for one in reversed(sides)}  # the first arm's stay
    facts = {label: facts[label] for label in dict.fromkeys(one.label for one in sides)}
    names = dict.fromkeys(name for of in facts.values() for name in of)
    return Table(
        title="Workload and server",
        shows="As each run's manifest says; the baseline first.",
        columns=("", *facts),
        rows=tuple((name, *(of.get(name, DASH) for of in facts.values())) for name in names),
    )


def _facts(one: Side) -> Iterator[tuple[str, str]]:
    manifest, summary = one.run.manifest, one.run.summary
    hardware = manifest.hardware
    step = one.metrics.get("step_s")
    yield "run", str(summary.run_id)
    yield "written", manifest.created_at
    yield "status", str(summary.status).replace("_", " ")
    yield "server", str(summary.engine)
    yield "model", str(summary.model)
    if manifest.target is not None:
        yield "server's version", manifest.target.version or DASH
        slots = num_slots(manifest.target.config, manifest.target.slots_found)
        yield "slots", str(slots or DASH)
    yield "a step", DASH if step is None else quantity(step.p50, "s")
    yield "machine", f"{hardware.get('cpu')}, {hardware.get('cores')} cores"
    counting = str(getattr(summary, "token_counting", None) or DASH)
    yield "tokens counted by", COUNTED_BY.get(counting, counting)
    yield "walkaway", manifest.versions.get("walkaway", DASH)
    yield "seed", str(manifest.seed)
