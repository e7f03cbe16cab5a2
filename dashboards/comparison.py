"""From the folders of a baseline and its candidates to one HTML file: the sure differences in
words, and the pictures of all runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dashboards.compared_runs import ComparedArm, ComparedRun, ComparedRuns, read_compared
from dashboards.figures import dots
from dashboards.figures.bars import WasteBar, waste_bars
from dashboards.figures.curves import cancel_curves, rising_note
from dashboards.figures.dots import Ratio
from dashboards.page import document, save
from dashboards.sections.section import (
    Picture,
    Section,
    Table,
    ladder_picture,
    median_and_p99,
)
from dashboards.sections.waste import PARTS as WASTE_PARTS
from harness.analysis.compare import Limits, Pair, Standing, standing
from harness.analysis.stats import Curve
from harness.export.comparison import (
    Comparison,
    cells,
    name_of,
    not_compared,
    steps_differ,
    times,
)
from harness.formatting import DASH, between, bounded, quantity, shift_in_words
from harness.metrics import CANCEL_LATENCY, METRICS, headline_figures, spoken
from harness.records import Metric, Remark, num_slots

MOST_NAMED: Final = 4  # figures in a sentence; the others are counted
BOTH_WAYS: Final = (
    "Their steps differ, so a time is called better or worse only where it is so both as measured "
    "and in steps."
)
DETAILS: Final = (
    *("figure", "difference", "95 %", "times", "95 % of times"),
    *("in steps", "95 % in steps", "judged"),
)
WAITS: Final = (
    ("slot_recovery_s", "from leaving to the first token of a waiting request, seen by a client"),
    ("slot_refill_s", "from the slot coming free to the next request in it"),
    ("ttft_s", "first token of users who stayed"),
    ("itl_s", "between tokens of users who stayed"),
)
_IN_STEPS: Final = (
    "Times in steps of each engine. A time that does not wait for a step looks better here the "
    "longer the steps are: it counts as surely better or worse only where it is so as measured, "
    "too."
)
_BESIDE_STEPS: Final = (
    "As measured. A time that waits for a step looks worse the longer the steps are."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One candidate against the baseline, for the first screen. `not_compared`: the figures left
    out, by reason.
    """

    label: str
    sentence: str
    cautions: Sequence[Remark]
    remarks: Sequence[Remark]
    not_compared: Mapping[str, Sequence[str]]
    shifts: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmArticle:
    anchor: str
    arm: str
    answers: Sequence[Answer]
    tables: Sequence[Table]
    sections: Sequence[Section]


def write_comparison(baseline: Path, candidates: Sequence[Path], output: Path) -> None:
    """Raises `ConfigError` if there is nothing to compare, or the page cannot be written."""
    compared = read_compared(baseline, candidates)
    articles = [_article(arm, number) for number, arm in enumerate(compared.arms)]
    html = document(
        "comparison.html.j2",
        {one.anchor: one.sections for one in articles},
        title=_title(compared),
        question=str(compared.baseline.manifest.workload.get("question") or ""),
        workload=str(compared.baseline.summary.workload),
        refused=compared.refused,
        articles=articles,
        runs=_runs_table(compared),
    )
    save(html, output)


def _title(compared: ComparedRuns) -> str:
    labels = dict.fromkeys(one.label for arm in compared.arms for one, _ in arm.candidates)
    candidates = next(iter(labels)) if len(labels) == 1 else f"{len(labels)} candidates"
    return f"{candidates} against {compared.arms[0].baseline.label}"


def _article(arm: ComparedArm, number: int) -> ArmArticle:
    return ArmArticle(
        anchor=f"arm{number}",
        arm=arm.arm,
        answers=[_answer(arm, candidate, comparison) for candidate, comparison in arm.candidates],
        tables=[
            _side_by_side(arm),
            *(_details(candidate, comparison) for candidate, comparison in arm.candidates),
        ],
        sections=[_ratios(arm), _curves(arm), _waste(arm), _waits(arm)],
    )


def _answer(arm: ComparedArm, candidate: ComparedRun, comparison: Comparison) -> Answer:
    label, baseline = candidate.label, arm.baseline.label
    said = (
        shift_in_words(metric, label, baseline, shift, "s")
        for metric, shift in comparison.shifts.items()
    )
    return Answer(
        label=label if not arm.arm else f"{label}, arm {arm.arm}",
        sentence=_sentence(comparison, baseline),
        cautions=[one for one in comparison.remarks if one.level != "info"],
        remarks=[one for one in comparison.remarks if one.level == "info"],
        not_compared=not_compared(comparison.pairs),
        shifts=[text for text in said if text is not None],
    )


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


def _side_by_side(arm: ComparedArm) -> Table:
    metrics = {one.label: one.metrics for one in arm.runs}
    return Table(
        title="Side by side",
        shows="Each figure of each run; behind a time stands how many steps of its engine it is.",
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


def _details(candidate: ComparedRun, comparison: Comparison) -> Table:
    return Table(
        title=f"{candidate.label} against the baseline, figure by figure",
        shows="Difference: candidate less baseline. Times: candidate by baseline. In steps: that "
        "ratio, each time in steps of its own engine. A time is surely better or worse where it is "
        "so by both. One in twenty equal figures is called a sure difference by chance.",
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


def _runs_table(compared: ComparedRuns) -> Table:
    runs: dict[str, ComparedRun] = {}
    for one in (one for arm in compared.arms for one in arm.runs):
        runs.setdefault(one.label, one)
    facts = {label: dict(_facts(one)) for label, one in runs.items()}
    names = dict.fromkeys(name for of in facts.values() for name in of)
    return Table(
        title="Workload and server",
        shows="As each run's manifest says; the baseline first.",
        columns=("", *facts),
        rows=tuple((name, *(of.get(name, DASH) for of in facts.values())) for name in names),
    )


def _facts(one: ComparedRun) -> Iterator[tuple[str, str]]:
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
    yield "tokens counted by", getattr(summary, "token_counting", None) or DASH
    yield "walkaway", manifest.versions.get("walkaway", DASH)
    yield "seed", str(manifest.seed)


def _ratios(arm: ComparedArm) -> Section:
    section = Section(
        name="ratios",
        title="Every figure against the baseline",
        shows="Each dot is a figure of the candidate as so many times that of the baseline, with "
        "its 95 % interval where there is one. A filled circle is surely better, a cross surely "
        "worse, a hollow circle could be either; a hollow diamond is not judged. With several "
        "candidates, the number behind a dot is its candidate's.",
        good="left of 1, but for figures of which more is better, whose names say so.",
    )
    if any(steps_differ(comparison) for _, comparison in arm.candidates):
        pictures = [
            _ratio_picture("ratios-in-steps", list(_dots(arm, _in_steps)), _IN_STEPS),
            _ratio_picture("ratios", list(_dots(arm, _as_measured)), _BESIDE_STEPS),
        ]
    else:
        pictures = [_ratio_picture("ratios", list(_dots(arm, _as_measured)), "As measured.")]
    drawn = [picture for picture in pictures if picture is not None]
    if not drawn:
        return section.without("No figure is above 0 in both runs, so there is no ratio.")
    return section.drawn(*drawn)


def _ratio_picture(name: str, ratios: list[Ratio], note: str) -> Picture | None:
    if not ratios:
        return None
    alt = f"Ratios to the baseline with intervals. {' '.join(f'{one.text}.' for one in ratios)}"
    return Picture(name=name, figure=dots.ratios(ratios), alt=alt, note=note)


def _as_measured(pair: Pair) -> tuple[float | None, Limits | None]:
    return pair.ratio, pair.ratio_ci95


def _in_steps(pair: Pair) -> tuple[float | None, Limits | None]:
    return pair.ratio_in_steps, pair.ratio_in_steps_ci95


def _dots(
    arm: ComparedArm, ratio_of: Callable[[Pair], tuple[float | None, Limits | None]]
) -> Iterator[Ratio]:
    for candidate, comparison in arm.candidates:
        for pair in comparison.pairs:
            ratio, limits = ratio_of(pair)
            if ratio is None:
                continue
            name, stands = name_of(pair), standing(pair)
            sure = "" if limits is None else f" ({between(limits, '')})"
            yield Ratio(
                candidate=candidate.label,
                figure=f"{name}{_direction(pair.metric)}",
                ratio=ratio,
                limits=limits,
                standing=stands,
                text=f"{candidate.label}: {name} {times(ratio)}{sure}, {stands}",
            )


def _direction(metric: str) -> str:
    return " (more is better)" if METRICS[metric].better == "more" else ""


def _curves(arm: ComparedArm) -> Section:
    section = Section(
        name="cancel-latency",
        title="How long until each server let go",
        shows="The share of abandoned requests whose slot and blocks were free again, by time "
        "since the user left. A curve that does not reach 100 % has ghosts: requests that were "
        "never stopped.",
        good="the steeper and the further left, the better.",
    )
    found = {one.label: (one, curve) for one in arm.runs if (curve := one.cancel_curve())}
    if not found:
        return section.without("No run has a log of single cancels.")
    curves = {_with_ghosts(label, curve): curve for label, (_, curve) in found.items()}
    said = " ".join(
        f"{label}: {median_and_p99(one.metrics.get(CANCEL_LATENCY))}"
        for label, (one, _) in found.items()
    )
    pictures = [
        Picture(
            name="curves",
            figure=cancel_curves(curves, units=dict.fromkeys(curves, 1e-3), of="milliseconds"),
            alt=f"Curves of cancel latency. {said}",
            note=rising_note(max(curve.n for curve in curves.values())),
        )
    ]
    steps = [one.metrics["step_s"].p50 for one, _ in found.values() if "step_s" in one.metrics]
    if all(steps) and len(steps) == len(found) and len(set(steps)) > 1:
        of_steps = dict(zip(curves, (step or 1.0 for step in steps), strict=True))
        pictures.append(
            Picture(
                name="curves-in-steps",
                figure=cancel_curves(curves, units=of_steps, of="steps of each engine"),
                alt="Those curves with each run's time in steps of its own engine.",
                note="In steps: each run's times divided by the median of its step time.",
            )
        )
    missing = [one.label for one in arm.runs if one.label not in found]
    if missing:
        section = section.without(f"No log of single cancels in: {', '.join(missing)}.")
    return section.drawn(*pictures)


def _with_ghosts(label: str, curve: Curve) -> str:
    ghosts = curve.n_censored
    return f"{label} ({ghosts:,} of {curve.n:,} never)" if ghosts else label


def _waste(arm: ComparedArm) -> Section:
    section = Section(
        name="waste",
        title="Unread tokens",
        shows="Mean of the abandoned requests; the whisker is the 95 % interval of the sum.",
        good="one or two: the token on its way and the step in flight.",
    )
    bars = {one.label: bar for one in arm.runs if (bar := _waste_bar(one)) is not None}
    if not bars:
        return section.without("No run shows how many tokens abandoned requests generated.")
    missing = [one.label for one in arm.runs if one.label not in bars]
    if missing:
        section = section.without(f"Not measurable in: {', '.join(missing)}.")
    said = "; ".join(f"{bar.label}: {bar.text}" for bar in bars.values())
    return section.drawn(
        Picture(
            name="waste",
            figure=waste_bars(list(bars.values()), x_title=""),
            alt=f"Bars of wasted tokens. {said}.",
        )
    )


def _waste_bar(one: ComparedRun) -> WasteBar | None:
    wasted = one.metrics.get("wasted_tokens")
    if wasted is None or wasted.mean is None:
        return None
    parts = [one.metrics[name].mean or 0.0 for name in WASTE_PARTS if name in one.metrics]
    return WasteBar(
        label=one.label + {"lower": " (at least)", "upper": " (at most)"}.get(wasted.bound, ""),
        n=wasted.n,
        total=wasted.mean,
        parts=(parts[0], parts[1]) if len(parts) == len(WASTE_PARTS) else None,
        text=bounded(wasted, "mean", unit=""),
        limits=wasted.mean_ci95,
    )


def _waits(arm: ComparedArm) -> Section:
    section = Section(
        name="waits",
        title="Waits of the other users",
        shows="Median with its 95 % interval (dot), 90th (diamond) and 99th percentile (bar).",
        good="the further left, the better.",
    )
    metrics = {one.label: one.metrics for one in arm.runs}
    found = [
        ladder_picture(name, f"{name}: {waited}", metrics, intervals=True) for name, waited in WAITS
    ]
    pictures = [one for one in found if one is not None]
    if not pictures:
        return section.without("No run recorded a request that waited.")
    return section.drawn(*pictures)
