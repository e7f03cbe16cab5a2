"""Runs side by side: a baseline against each candidate, arm by arm if there are arms.

`harness.analysis.comparable` says what may be compared, `harness.analysis.compare` how.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from harness.analysis.comparable import (
    counting_remark,
    manifest_remarks,
    step_remark,
    summary_remarks,
    why_not_runs,
)
from harness.analysis.compare import Pair, is_sure, pair_of
from harness.analysis.pool import of_each_request, shifts_between
from harness.analysis.remarks import in_level_order
from harness.errors import ConfigError
from harness.export.library import Run, load_run
from harness.formatting import DASH, SELF_EVIDENT_UNITS, between, bounded, number, quantity
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
    """Read and compare one after the other. A candidate that cannot be read or compared gives its
    error; the others go on."""
    for path in candidates:
        try:
            candidate = load_run(path)
            yield candidate, compare_runs(baseline, candidate)
        except ConfigError as error:
            yield error


def _common_arms(baseline: Run, candidate: Run) -> list[str]:
    where = f"{baseline.path} and {candidate.path} cannot be compared"
    manifests = [msgspec.to_builtins(one.manifest) for one in (baseline, candidate)]
    if (why := why_not_runs(*manifests)) is not None:
        raise ConfigError(f"{where}: {why}")
    if bool(baseline.arms) != bool(candidate.arms):
        raise ConfigError(f"{where}: only one of them has arms; name one of the runs in rounds/")
    if not baseline.arms:
        return [""]
    if common := [arm for arm in baseline.arms if arm in candidate.arms]:
        return common
    names = " and ".join(", ".join(one.arms) for one in (baseline, candidate))
    raise ConfigError(f"{where}: they have no arm in common ({names})")


def _compare(baseline: Run, candidate: Run, arm: str) -> Comparison:
    first, second = (_arm(run, arm) for run in (baseline, candidate))
    shifts, note = _shifts(baseline, candidate, arm)
    return Comparison(
        baseline=baseline.path.resolve().name,
        candidate=candidate.path.resolve().name,
        arm=arm,
        remarks=_remarks(baseline, candidate, arm, note),
        pairs=_pairs(first, second),
        shifts=shifts,
        metrics={BASELINE: first.metrics, CANDIDATE: second.metrics},
    )


def _arm(run: Run, arm: str) -> Summary | ArmSummary:
    return run.arms[arm] if arm else run.whole


def _pairs(baseline: Summary | ArmSummary, candidate: Summary | ArmSummary) -> list[Pair]:
    first, second = baseline.metrics, candidate.metrics
    counting = baseline.token_counting, candidate.token_counting
    steps_s = _step_s(first), _step_s(second)
    pairs = []
    for name, figure in headline_figures({BASELINE: first, CANDIDATE: second}):
        if name not in first or name not in second:
            has = first.get(name) or second[name]
            which = BASELINE if name in first else CANDIDATE
            note = f"only the {which} has it"
            pairs.append(Pair(metric=name, figure=figure, unit=has.unit, note=note))
        else:
            both = first[name], second[name]
            pairs.append(pair_of(name, figure, *both, steps_s=steps_s, counting=counting))
    return pairs


def _step_s(metrics: Mapping[str, Metric]) -> float | None:
    return metrics["step_s"].p50 if "step_s" in metrics else None


def _remarks(baseline: Run, candidate: Run, arm: str, note: Remark | None) -> list[Remark]:
    first, second = (_arm(run, arm) for run in (baseline, candidate))
    manifests = [
        msgspec.to_builtins(singles(run, arm)[0].manifest) for run in (baseline, candidate)
    ]
    said = [
        *manifest_remarks(*manifests),
        *summary_remarks(baseline.summary, candidate.summary),
        counting_remark(first.token_counting, second.token_counting),
        step_remark(first.metrics.get("step_s"), second.metrics.get("step_s")),
        note,
    ]
    return in_level_order([one for one in said if one is not None])


def _shifts(baseline: Run, candidate: Run, arm: str) -> tuple[dict[str, Shift], Remark | None]:
    """How far single requests lie apart; if a run has no rows, a remark that says why not."""
    try:
        theirs, ours = (
            of_each_request((one.outline.requests, one.cancellations) for one in singles(run, arm))
            for run in (baseline, candidate)
        )
    except ConfigError as error:
        text = f"requests are not compared one by one: {error}"
        return {}, Remark(level="info", text=text)
    return shifts_between(ours, theirs), None


def singles(run: Run, arm: str) -> list[Run]:
    """The runs of an arm, one a round; a run without arms by itself."""
    return [one for name, one in run.rounds.items() if name.partition("-")[2] == arm] or [run]


CERTAIN: Final = "*"
TELLING: Final = 0.02  # steps that differ by less change no third digit that means anything


def name_of(pair: Pair) -> str:
    """`cancel_latency_s p50`; for a mean the metric alone."""
    return pair.metric if pair.figure == "mean" else f"{pair.metric} {pair.figure}"


def cells(comparison: Comparison, pair: Pair) -> dict[str, str]:
    unit = pair.unit if pair.unit in SELF_EVIDENT_UNITS else ""
    mark = CERTAIN if is_sure(pair) else ""
    values = {
        side: bounded(comparison.metrics[side][pair.metric], pair.figure, unit=unit)
        if pair.metric in comparison.metrics[side]
        else DASH
        for side in (BASELINE, CANDIDATE)
    }
    return {
        "figure": name_of(pair),
        **values,
        "difference": f"{_signed(pair.difference, unit)}{mark}",
        "95 %": between(pair.difference_ci95, unit) or DASH,
        "times": times(pair.ratio),
        "in steps": times(pair.ratio_in_steps),
    }


def steps_differ(comparison: Comparison) -> bool:
    """Whether a ratio in steps tells more than the ratio itself."""
    return any(
        pair.ratio and pair.ratio_in_steps and abs(pair.ratio_in_steps / pair.ratio - 1) > TELLING
        for pair in comparison.pairs
    )


def not_compared(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.note is not None:
            reasons.setdefault(pair.note, []).append(name_of(pair))
    return reasons


def times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{number(ratio)}x"


def _signed(value: float | None, unit: str) -> str:
    return ("+" if value is not None and value > 0 else "") + quantity(value, unit)
