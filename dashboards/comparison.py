"""From a baseline and its candidates to one HTML file: sure differences, and pictures arm by arm.

A candidate that cannot be compared is left out with the reason.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from dashboards.figures import dots
from dashboards.figures.bars import WasteBar, waste_bars
from dashboards.figures.curves import cancel_curves, rising_note
from dashboards.figures.dots import Ratio
from dashboards.page import document, save
from dashboards.sections.section import (
    Part,
    Picture,
    Table,
    ladder_pictures,
    median_and_p99,
    section,
)
from dashboards.sections.waste import PARTS as WASTE_PARTS
from harness.analysis.cancel import latency_sample
from harness.analysis.compare import Limits, Pair, Standing, standing
from harness.analysis.stats import Curve
from harness.analysis.tokens import COUNTED_BY
from harness.errors import ConfigError
from harness.export.comparison import (
    BASELINE,
    CANDIDATE,
    Comparison,
    cells,
    compare_each,
    name_of,
    not_compared,
    singles,
    steps_differ,
    times,
)
from harness.export.library import Run, load_run
from harness.formatting import DASH, between, bounded, quantity, shift_in_words
from harness.metrics import CANCEL_LATENCY, METRICS, headline_figures, spoken
from harness.records import Metric, num_slots

MOST_NAMED: Final = 4  # figures in a sentence; the others are counted
BOTH_WAYS: Final = (
    "Their steps differ, so a time is called better or worse only where it is so both as measured "
    "and in steps."
)
DETAILS: Final = (
    *("figure", "difference", "95 %", "times", "95 % of times"),
    *("in steps", "95 % in steps", "judged"),
)
WAITS: Final = ("slot_recovery_s", "slot_refill_s", "ttft_s", "itl_s")
_IN_STEPS: Final = (
    "Times in steps of each engine. A time that does not wait for a step looks better here the "
    "longer the steps are: it counts as surely better or worse only where it is so as measured, "
    "too."
)
_BESIDE_STEPS: Final = (
    "As measured. A time that waits for a step looks worse the longer the steps are."
)


@dataclass(frozen=True, slots=True)
class Side:
    """A run, or one arm of it ("" without arms), under its name on the page. The baseline's has no
    `comparison`.
    """

    label: str
    run: Run
    arm: str
    metrics: Mapping[str, Metric]
    comparison: Comparison | None

    def cancel_curve(self) -> Curve | None:
        try:
            parts = [one.cancellations for one in singles(self.run, self.arm)]
        except ConfigError:
            return None
        sample = latency_sample(pd.concat(parts))
        return sample.curve() if len(sample.values) else None


Sides = Sequence[Side]  # of one arm, the baseline's first
Against = Sequence[tuple[Side, Comparison]]


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


def _against(sides: Sides) -> Against:
    return [(one, one.comparison) for one in sides if one.comparison is not None]


def _article(sides: Sides, anchor: str) -> dict[str, Any]:
    return {
        "anchor": anchor,
        "arm": sides[0].arm,
        "answers": [_answer(*one, sides[0].label) for one in _against(sides)],
        "tables": [_side_by_side(sides), *(_details(*one) for one in _against(sides))],
        "sections": [_ratios(sides), _curves(sides), _waste(sides), _waits(sides)],
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


def _details(candidate: Side, comparison: Comparison) -> Table:
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


@section(
    "ratios",
    "Every figure against the baseline",
    "Each dot is a figure of the candidate as so many times that of the baseline, with its 95 % "
    "interval where there is one. A filled circle is surely better, a cross surely worse, a hollow "
    "circle could be either; a hollow diamond is not judged. With several candidates, the number "
    "behind a dot is its candidate's.",
    good="left of 1, but for figures of which more is better, whose names say so.",
)
def _ratios(sides: Sides) -> Iterator[Part]:
    as_measured = list(_dots(sides, lambda pair: (pair.ratio, pair.ratio_ci95)))
    drawn = [("ratios", as_measured, "As measured.")]
    if any(steps_differ(comparison) for _, comparison in _against(sides)):
        in_steps = _dots(sides, lambda pair: (pair.ratio_in_steps, pair.ratio_in_steps_ci95))
        drawn = [
            ("ratios-in-steps", list(in_steps), _IN_STEPS),
            ("ratios", as_measured, _BESIDE_STEPS),
        ]
    if not any(ratios for _, ratios, _ in drawn):
        yield "No figure is above 0 in both runs, so there is no ratio."
    for name, ratios, note in drawn:
        if ratios:
            said = " ".join(f"{one.text}." for one in ratios)
            alt = f"Ratios to the baseline with intervals. {said}"
            yield Picture(name=name, figure=dots.ratios(ratios), alt=alt, note=note)


def _dots(
    sides: Sides, ratio_of: Callable[[Pair], tuple[float | None, Limits | None]]
) -> Iterator[Ratio]:
    for candidate, comparison in _against(sides):
        for pair in comparison.pairs:
            ratio, limits = ratio_of(pair)
            if ratio is None:
                continue
            name, stands = name_of(pair), standing(pair)
            sure = "" if limits is None else f" ({between(limits, '')})"
            more = " (more is better)" if METRICS[pair.metric].better == "more" else ""
            yield Ratio(
                candidate=candidate.label,
                figure=f"{name}{more}",
                ratio=ratio,
                limits=limits,
                standing=stands,
                text=f"{candidate.label}: {name} {times(ratio)}{sure}, {stands}",
            )


@section(
    "cancel-latency",
    "How long until each server let go",
    "The share of abandoned requests whose slot and blocks were free again, by time since the user "
    "left. A curve that does not reach 100 % has ghosts: requests that were never stopped.",
    good="the steeper and the further left, the better.",
)
def _curves(sides: Sides) -> Iterator[Part]:
    found = [(one, curve) for one in sides if (curve := one.cancel_curve()) is not None]
    if not found:
        yield "No run has a log of single cancels."
        return
    curves = {}
    for one, curve in found:
        never = f" ({curve.n_censored:,} of {curve.n:,} never)" if curve.n_censored else ""
        curves[f"{one.label}{never}"] = curve
    said = (f"{one.label}: {median_and_p99(one.metrics.get(CANCEL_LATENCY))}" for one, _ in found)
    yield Picture(
        name="curves",
        figure=cancel_curves(curves, units=dict.fromkeys(curves, 1e-3), of="milliseconds"),
        alt=f"Curves of cancel latency. {' '.join(said)}",
        note=rising_note(max(curve.n for curve in curves.values())),
    )
    steps = [one.metrics["step_s"].p50 or 0.0 for one, _ in found if "step_s" in one.metrics]
    if all(steps) and len(steps) == len(found) and len(set(steps)) > 1:
        of_steps = dict(zip(curves, steps, strict=True))
        yield Picture(
            name="curves-in-steps",
            figure=cancel_curves(curves, units=of_steps, of="steps of each engine"),
            alt="Those curves with each run's time in steps of its own engine.",
            note="In steps: each run's times divided by the median of its step time.",
        )
    with_curve = {one.label for one, _ in found}
    if missing := [one.label for one in sides if one.label not in with_curve]:
        yield f"No log of single cancels in: {', '.join(missing)}."


@section(
    "waste",
    "Unread tokens",
    "Mean of the abandoned requests; the whisker is the 95 % interval of the sum.",
    good="one or two: the token on its way and the step in flight.",
)
def _waste(sides: Sides) -> Iterator[Part]:
    bars = {one.label: bar for one in sides if (bar := _waste_bar(one)) is not None}
    if not bars:
        yield "No run shows how many tokens abandoned requests generated."
        return
    said = "; ".join(f"{bar.label}: {bar.text}" for bar in bars.values())
    figure = waste_bars(list(bars.values()), x_title="")
    yield Picture(name="waste", figure=figure, alt=f"Bars of wasted tokens. {said}.")
    if missing := [one.label for one in sides if one.label not in bars]:
        yield f"Not measurable in: {', '.join(missing)}."


def _waste_bar(one: Side) -> WasteBar | None:
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


@section(
    "waits",
    "Waits of the other users",
    "Median with its 95 % interval (dot), 90th (diamond) and 99th percentile (bar).",
    good="the further left, the better.",
)
def _waits(sides: Sides) -> Iterator[Part]:
    metrics = {one.label: one.metrics for one in sides}
    otherwise = "No run recorded a request that waited."
    labels = [(name, f"{name}: {METRICS[name].shows.removesuffix('.')}") for name in WAITS]
    return ladder_pictures(labels, metrics, otherwise, intervals=True)
