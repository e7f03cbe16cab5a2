"""Runs side by side: a baseline against each candidate, arm by arm if there are arms.

`harness.compare.comparable` says what may be compared, `harness.compare.pairs` how.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from harness.analysis.remarks import in_level_order
from harness.compare.comparable import (
    figure_remarks,
    manifest_remarks,
    summary_remarks,
    why_not_arms,
    why_not_runs,
)
from harness.compare.pairs import Pair, is_sure, pair_of
from harness.compare.pool import of_each_request, shifts_between
from harness.errors import ConfigError
from harness.export.library import Run, load_run
from harness.formatting import DASH, between, bounded, quantity, times, unit_in_figure
from harness.metrics import headline_figures
from harness.records import ArmSummary, Metric, Remark, Shift, Summary

BASELINE: Final = "baseline"
CANDIDATE: Final = "candidate"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate against the baseline, in one arm ("" for runs without arms).

    `baseline` and `candidate` are the runs' names. `shifts` compares single requests, by metric;
    `metrics` has all figures of both.
    """

    baseline: str
    candidate: str
    arm: str
    remarks: list[Remark]
    pairs: list[Pair]
    shifts: dict[str, Shift]
    metrics: dict[str, dict[str, Metric]]


def compare_runs(baseline: Run, candidate: Run) -> list[Comparison]:
    """Compare in each common arm. Raises ConfigError if two runs ask different questions or have no
    arm in common."""
    return [_compare(baseline, candidate, arm) for arm in _common_arms(baseline, candidate)]


def compare_each(
    baseline: Run, candidates: Sequence[Path]
) -> Iterator[tuple[Run, list[Comparison]] | ConfigError]:
    """Read and compare one after the other. A candidate that cannot be read or compared yields its
    error, and the next one follows."""
    for path in candidates:
        try:
            candidate = load_run(path)
            yield candidate, compare_runs(baseline, candidate)
        except ConfigError as error:
            yield error


def _common_arms(baseline: Run, candidate: Run) -> list[str]:
    manifests = [msgspec.to_builtins(one.manifest) for one in (baseline, candidate)]
    why = why_not_runs(*manifests) or why_not_arms(baseline.arms, candidate.arms)
    if why is not None:
        raise ConfigError(f"{baseline.path} and {candidate.path} cannot be compared: {why}")
    return [arm for arm in baseline.arms if arm in candidate.arms] or [""]


def _compare(baseline: Run, candidate: Run, arm: str) -> Comparison:
    runs = (baseline, candidate)
    first, second = (run.arms[arm] if arm else run.whole for run in runs)
    manifests = (msgspec.to_builtins(singles(run, arm)[0].manifest) for run in runs)
    remarks = [
        *manifest_remarks(*manifests),
        *summary_remarks(baseline.summary, candidate.summary),
        *figure_remarks(first, second),
    ]
    try:
        shifts = _shifts(*runs, arm)
    except ConfigError as error:
        text = f"requests are not compared one by one: {error}"
        shifts, remarks = {}, [*remarks, Remark(level="info", text=text)]
    return Comparison(
        baseline=baseline.path.resolve().name,
        candidate=candidate.path.resolve().name,
        arm=arm,
        remarks=in_level_order(remarks),
        pairs=list(_pairs(first, second)),
        shifts=shifts,
        metrics={BASELINE: first.metrics, CANDIDATE: second.metrics},
    )


def _pairs(baseline: Summary | ArmSummary, candidate: Summary | ArmSummary) -> Iterator[Pair]:
    first, second = baseline.metrics, candidate.metrics
    counting = baseline.token_counting, candidate.token_counting
    steps = first.get("step_s"), second.get("step_s")
    steps_s = [None if step is None else step.p50 for step in steps]
    for name, figure in headline_figures({BASELINE: first, CANDIDATE: second}):
        if name in first and name in second:
            both = first[name], second[name]
            yield pair_of(name, figure, *both, steps_s=steps_s, counting=counting)
        else:
            which, has = (BASELINE, first) if name in first else (CANDIDATE, second)
            note = f"only the {which} has it"
            yield Pair(metric=name, figure=figure, unit=has[name].unit, note=note)


def _shifts(baseline: Run, candidate: Run, arm: str) -> dict[str, Shift]:
    theirs, ours = (
        of_each_request((one.outline.requests, one.cancellations) for one in singles(run, arm))
        for run in (baseline, candidate)
    )
    return shifts_between(ours, theirs)


def singles(run: Run, arm: str) -> list[Run]:
    return [one for name, one in run.rounds.items() if name.partition("-")[2] == arm] or [run]


CERTAIN: Final = "*"
TELLING: Final = 0.02  # steps that differ by less change no third digit that means anything


def name_of(pair: Pair) -> str:
    return pair.metric if pair.figure == "mean" else f"{pair.metric} {pair.figure}"


def cells(comparison: Comparison, pair: Pair) -> dict[str, str]:
    unit = unit_in_figure(pair.unit)
    sides = {
        side: bounded(metrics[pair.metric], pair.figure, unit=unit)
        if pair.metric in metrics
        else DASH
        for side, metrics in comparison.metrics.items()
    }
    sign = "+" if pair.difference is not None and pair.difference > 0 else ""
    mark = CERTAIN if is_sure(pair) else ""
    return {
        "figure": name_of(pair),
        **sides,
        "difference": f"{sign}{quantity(pair.difference, unit)}{mark}",
        "95 %": between(pair.difference_ci95, unit) or DASH,
        "times": times(pair.ratio),
        "in steps": times(pair.ratio_in_steps),
    }


def steps_differ(comparison: Comparison) -> bool:
    return any(
        pair.ratio and pair.ratio_in_steps and abs(pair.ratio_in_steps / pair.ratio - 1) > TELLING
        for pair in comparison.pairs
    )


def not_compared(
    pairs: Iterable[Pair], named: Callable[[Pair], str] = name_of
) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.note is not None:
            reasons.setdefault(pair.note, []).append(named(pair))
    return reasons
