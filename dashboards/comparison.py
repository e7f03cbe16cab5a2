"""From a baseline and its candidates to one HTML file: the verdicts, and pictures arm by arm.

A candidate that cannot be compared is left out with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dashboards.page import document, save
from dashboards.sections.comparison import Side, Sides, against, sections
from dashboards.sections.section import Table, TableCell
from harness.analysis.tokens import COUNTED_BY
from harness.compare.comparison import (
    BASELINE,
    CANDIDATE,
    Comparison,
    cells,
    compare_each,
    not_compared,
)
from harness.compare.overall import CLEAR, Overall, verdict_on
from harness.compare.pairs import Pair, Standing, standing
from harness.errors import ConfigError
from harness.export.library import Run, load_run
from harness.formatting import DASH, between, bounded, quantity, shift_in_words
from harness.metrics import headline_figures, spoken, titled
from harness.records import Metric, num_slots

MOST_LETTERS: Final = 30  # of a name
MOST_AT_ONCE: Final = 4  # verdicts on the first screen; more are a table there
MARK_OF: Final = {Standing.BETTER: "good", Standing.WORSE: "bad"}
MARKS: Final = {
    Overall.WORSE: "bad",
    Overall.MIXED: "mixed",
    Overall.BETTER: "good",
    Overall.UNCLEAR: "unknown",
    Overall.NOT_COMPARED: "unknown",
}
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
    answers = [answer for one in articles for answer in one["answers"]]
    html = document(
        "comparison.html.j2",
        {one["anchor"]: one["sections"] for one in articles},
        title=f"{named} against {by_arm[0][0].label}",
        question=str(run.manifest.workload.get("question") or ""),
        workload=str(run.summary.workload),
        lead=_lead(answers, by_arm[0][0].label) if len(answers) > 1 else None,
        clear=CLEAR,
        is_at_once=len(answers) <= MOST_AT_ONCE,
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
    """The names of the folders, each unique and short enough for a legend; the table of runs has
    them in full."""
    folders = [path.resolve() for path in paths]
    labels: list[str] = []
    seen: Counter[str] = Counter()
    for path, folder in zip(paths, folders, strict=True):
        is_one = len({one for one in folders if one.name == folder.name}) == 1
        label = _short(folder.name if is_one else str(path))
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return labels


def _short(name: str) -> str:
    half = MOST_LETTERS // 2
    return name if len(name) <= MOST_LETTERS else f"{name[:half]} ... {name[-half:]}"


def _article(sides: Sides, anchor: str) -> dict[str, Any]:
    candidates = enumerate(against(sides), start=1)
    return {
        "anchor": anchor,
        "arm": sides[0].arm,
        "answers": [_answer(n, *one, sides[0].label) for n, one in candidates],
        "tables": [_side_by_side(sides), *(_details(*one) for one in against(sides))],
        "sections": sections(sides),
    }


def _answer(n: int, candidate: Side, comparison: Comparison, baseline: str) -> dict[str, Any]:
    label = candidate.label
    shifts = (
        shift_in_words(titled(metric), label, baseline, shift, "s")
        for metric, shift in comparison.shifts.items()
    )
    named = f"{label}, arm {candidate.arm}," if candidate.arm else label
    verdict = verdict_on(comparison, named, baseline)
    return {
        "label": f"{label}, arm {candidate.arm}" if candidate.arm else label,
        "number": n,
        "verdict": verdict,
        "word": str(verdict.overall),
        "mark": MARKS[verdict.overall],
        "lines": [(MARK_OF[one.standing], one) for one in verdict.lines],
        "more": [f"{n} more {which}, in the tables below" for which, n in verdict.more],
        "cautions": [one for one in comparison.remarks if one.level != "info"],
        "remarks": [one for one in comparison.remarks if one.level == "info"],
        "not_compared": not_compared(comparison.pairs, lambda one: spoken(one.metric, one.figure)),
        "shifts": [text for text in shifts if text is not None],
    }


def _lead(answers: Sequence[Mapping[str, Any]], baseline: str) -> str:
    """The lead where there are several candidates or arms."""
    counts = Counter(one["word"] for one in answers)
    said = [f"{counts[str(which)]} {which}" for which in Overall if counts[str(which)]]
    return f"{len(answers)} comparisons with {baseline}: {', '.join(said)}."


def _side_by_side(sides: Sides) -> Table:
    metrics = {one.label: one.metrics for one in sides}
    return Table(
        title="Side by side",
        shows="Each figure of each run; each time is followed by its length in steps of the run's "
        "engine.",
        columns=("figure", *metrics),
        rows=tuple(
            (
                named_figure(name, key),
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
        "steps: the same ratio, each time in steps of its own engine. A time is better or "
        "worse only if it is so by both ratios. Expect one false mark in twenty figures that are "
        "equal.",
        columns=DETAILS,
        rows=tuple(_detail(comparison, pair) for pair in comparison.pairs),
    )


def named_figure(metric: str, figure: str) -> TableCell:
    """The figure in words; under them the name in summary.json, which a limit of the gate takes."""
    return TableCell(text=titled(metric, figure), under=(f"{metric}.{figure}",))


def _detail(comparison: Comparison, pair: Pair) -> tuple[str | TableCell, ...]:
    of, stands = cells(comparison, pair), standing(pair)
    return (
        named_figure(pair.metric, pair.figure),
        *(of[name] for name in ("difference", "95 %", "times")),
        between(pair.ratio_ci95, "") or DASH,
        of["in steps"],
        between(pair.ratio_in_steps_ci95, "") or DASH,
        f"{stands}: {pair.note}" if stands is Standing.NOT_COMPARED else stands.signed,
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
    yield "folder", one.run.path.resolve().name
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
