"""The sections of a comparison: its ratios, and the curves, waste and waits of each run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from dashboards.figures import dots
from dashboards.figures.bars import WasteBar, waste_bars
from dashboards.figures.curves import cancel_curves, rising_note
from dashboards.figures.dots import Ratio
from dashboards.sections.section import (
    Part,
    Picture,
    Section,
    ladder_pictures,
    median_and_p99,
    section,
)
from dashboards.sections.waste import PARTS as WASTE_PARTS
from harness.analysis.cancel_figures import latency_sample
from harness.compare.comparison import Comparison, singles, steps_differ
from harness.compare.pairs import Limits, Pair, Standing, standing
from harness.errors import ConfigError
from harness.export.library import Run
from harness.formatting import between, bounded, times
from harness.metrics import CANCEL_LATENCY, METRICS, titled
from harness.records import Metric
from harness.stats import Curve

MOST_CANDIDATES: Final = 8  # in a picture of ratios
WAITS: Final = ("slot_recovery_s", "slot_refill_s", "ttft_s", "itl_s")
_IN_STEPS: Final = (
    "Times in steps of each engine. A time that does not wait for a step looks better here the "
    "longer the steps are: it counts as better or worse only if it is so as measured, too."
)
_BESIDE_STEPS: Final = (
    "As measured. A time that waits for a step looks worse the longer the steps are."
)


@dataclass(frozen=True, slots=True)
class Side:
    """A run, or one arm of it ("" without arms), under its name on the page. The baseline's side
    has no `comparison`.
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


def sections(sides: Sides) -> list[Section]:
    return [_ratios(sides), _curves(sides), _waste(sides), _waits(sides)]


def against(sides: Sides) -> Against:
    return [(one, one.comparison) for one in sides if one.comparison is not None]


@section(
    "ratios",
    "Every figure against the baseline",
    "Each mark is a figure of the candidate divided by the same figure of the baseline, with its "
    "95 % interval where there is one: \N{BLACK CIRCLE} better, \N{HEAVY MULTIPLICATION X} worse, "
    "\N{WHITE CIRCLE} no clear difference, \N{WHITE DIAMOND} not judged. With several candidates, "
    "the number to the right of a mark is its candidate's.",
    good="left of 1, except for figures whose names say that more is better.",
)
def _ratios(sides: Sides) -> Iterator[Part]:
    as_measured = list(_dots(sides, lambda pair: (pair.ratio, pair.ratio_ci95)))
    drawn = [("ratios", as_measured, "As measured.")]
    if any(steps_differ(comparison) for _, comparison in against(sides)):
        in_steps = _dots(sides, lambda pair: (pair.ratio_in_steps, pair.ratio_in_steps_ci95))
        drawn = [
            ("ratios-in-steps", list(in_steps), _IN_STEPS),
            ("ratios", as_measured, _BESIDE_STEPS),
        ]
    if not any(ratios for _, ratios, _ in drawn):
        yield "No figure is above 0 in both runs, so there is no ratio."
    candidates = [one.label for one, _ in against(sides)]
    for name, ratios, note in drawn:
        yield from _pictures(name, ratios, note, candidates)


def _pictures(
    name: str, ratios: Sequence[Ratio], note: str, candidates: Sequence[str]
) -> Iterator[Picture]:
    if not ratios:
        return
    scale = dots.fold_axis(ratios)
    for number, (what, drawn, numbers) in enumerate(_in_sight(ratios, candidates), start=1):
        said = " ".join(f"{one.text}." for one in drawn)
        yield Picture(
            name=name if number == 1 else f"{name}-{number}",
            figure=dots.ratios(drawn, numbers if len(candidates) > 1 else {}, scale),
            alt=f"{what}: ratios to the baseline with intervals. {said}",
            note=f"{what}. {note}{_named(numbers)}",
        )


def _in_sight(
    ratios: Sequence[Ratio], candidates: Sequence[str]
) -> Iterator[tuple[str, Sequence[Ratio], Mapping[str, int]]]:
    """The clear differences first, and so few rows in a picture that its scale stays in sight."""
    clear = {one.figure for one in ratios if one.standing in (Standing.BETTER, Standing.WORSE)}
    rows = list(dict.fromkeys(one.figure for one in ratios))
    groups = {
        "Clear differences": [one for one in rows if one in clear],
        "The other figures": [one for one in rows if one not in clear],
    }
    for shown in _parts(candidates, MOST_CANDIDATES):
        numbers = {one: candidates.index(one) + 1 for one in shown}
        for what, group in groups.items():
            for part in _parts(group, dots.rows_in_sight(len(shown))):
                of = [one for one in ratios if one.figure in part and one.candidate in numbers]
                if of:
                    yield what, of, numbers


def _parts(names: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), most):
        yield names[start : start + most]


def _named(numbers: Mapping[str, int]) -> str:
    if len(numbers) < 2:
        return ""
    return f" Candidates: {', '.join(f'{n} {label}' for label, n in numbers.items())}."


def _dots(
    sides: Sides, ratio_of: Callable[[Pair], tuple[float | None, Limits | None]]
) -> Iterator[Ratio]:
    for candidate, comparison in against(sides):
        for pair in comparison.pairs:
            ratio, limits = ratio_of(pair)
            if ratio is None:
                continue
            name, stands = titled(pair.metric, pair.figure), standing(pair)
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
            alt="The same curves, with each run's time in steps of its own engine.",
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
    labels = [(name, f"{titled(name)}: {METRICS[name].shows.removesuffix('.')}") for name in WAITS]
    return ladder_pictures(labels, metrics, otherwise, intervals=True)
