"""Several runs of several arms as one summary: each arm over all its rounds, and how arms differ.

A quantile of an arm is that of all requests of its rounds. A reading (one number a run) gives one
value a round, and differences between arms come from the values a round.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.cancel_figures import latency_by, latency_sample
from harness.analysis.early_stop import savings_by_task
from harness.analysis.figure import Figure, Figures, NotMeasurable, Sample
from harness.analysis.latency import canary_remarks, e2e_sample, known_answers, ttft_sample
from harness.analysis.remarks import flags, in_level_order
from harness.analysis.summary import (
    Observed,
    count_outcomes,
    figures_of,
    measured,
    observe,
    pooled_figures,
    reasons,
    summary_of,
    together,
)
from harness.analysis.tokens import token_counting, without_tokens
from harness.compare.comparable import why_not_figures
from harness.compare.pairs import FEWEST_ROUNDS, compare_rounds, shift_between
from harness.compare.value import Account, ValueTerms, account, stage_parts, value_of
from harness.metrics import CANCEL_LATENCY, METRICS
from harness.records import (
    FIGURES_PER_ROUND,
    ArmsSummary,
    ArmSummary,
    Difference,
    Metric,
    Remark,
    Shift,
    Simulated,
    Value,
)
from harness.stats import Floats, mean_ci95
from harness.store.frames import RunFrames


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRound:
    round: int
    arm: str
    observed: Observed
    figures: Figures
    remarks: Sequence[Remark]
    simulated: Simulated | None
    target: Mapping[str, Any]
    account: Account | None


def analyse_round(frames: RunFrames, *, round_number: int, arm: str) -> ArmRound:
    observed = observe(frames)
    figures = figures_of(frames, observed)
    summary = summary_of(frames, observed, figures)
    return ArmRound(
        round=round_number,
        arm=arm,
        observed=observed,
        figures=figures,
        remarks=summary.validity,
        simulated=summary.simulated,
        target=frames.manifest.get("target") or {},
        account=account(frames, observed.cancels),
    )


def arm_figures(rounds: Sequence[ArmRound]) -> Figures:
    readings = {
        name: [one.figures[name] for one in rounds if name in one.figures]
        for name, metric in METRICS.items()
        if metric.per_run
    }
    of_each_run = {name: _over_rounds(found) for name, found in readings.items() if found}
    return pooled_figures([one.observed for one in rounds], of_each_run)


def _over_rounds(figures: Sequence[Figure]) -> Figure:
    known = [one for one in figures if isinstance(one, Metric)]
    if not known:
        return figures[0]
    if len({one.method for one in known}) > 1:
        return NotMeasurable("the rounds have it by different methods")
    if any(one.mean is None or one.bound == "upper" for one in known):
        return NotMeasurable("a round has only an upper limit")
    values = np.array([one.mean for one in known], dtype=float)
    return Metric(
        unit=known[0].unit,
        n=len(values),
        mean=float(values.mean()),
        mean_ci95=mean_ci95(values),
        max=float(values.max()),
        method=known[0].method,
        bound="point" if all(one.bound == "point" for one in known) else "lower",
        of=known[0].of,
    )


def of_each_request(runs: Iterable[tuple[pd.DataFrame, pd.DataFrame]]) -> dict[str, Floats]:
    """The values of single requests (s), by metric. A ghost, or a first token that never came, is
    infinite."""
    found: dict[str, list[Floats]] = {"ttft_s": [], "e2e_s": [], CANCEL_LATENCY: []}
    for requests, cancels in runs:
        stayed = without_tokens(requests)[requests["planned_abandon"].isna()]
        found["ttft_s"].append(_endless(ttft_sample(stayed)))
        found["e2e_s"].append(e2e_sample(stayed).values)
        found[CANCEL_LATENCY].append(_endless(latency_sample(cancels)))
    return {name: np.concatenate([np.empty(0), *parts]) for name, parts in found.items()}


def shifts_between(mine: Mapping[str, Floats], reference: Mapping[str, Floats]) -> dict[str, Shift]:
    return {
        metric: shift_between(mine[metric], values)
        for metric, values in reference.items()
        if len(mine[metric]) and len(values)
    }


def _endless(sample: Sample) -> Floats:
    return np.where(sample.is_censored, np.inf, sample.values)


Values = dict[str, list[float | None]]


def pool(rounds: Sequence[ArmRound], manifest: Mapping[str, Any]) -> ArmsSummary:
    workload = manifest["workload"]
    names = [arm["name"] for arm in workload["arms"]]
    num_rounds = workload["run"]["rounds"]
    reference = workload["run"]["reference_arm"] or names[0]
    arms = {name: _arm([one for one in rounds if one.arm == name], num_rounds) for name in names}
    return ArmsSummary(
        run_id=manifest.get("run_id") or "",
        status=manifest["status"],
        workload=workload["name"],
        engine=_all_of("engine", rounds),
        model=_all_of("model", rounds),
        reference=reference,
        rounds=num_rounds,
        headlines=workload["headlines"],
        arms=arms,
        differences=differences(arms, reference),
        shifts=_shifts(rounds, names, reference),
        validity=_remarks(rounds, names, num_rounds),
        value=_value(rounds, arms, workload),
        simulated=rounds[0].simulated,
    )


def all_requests(rounds: Sequence[ArmRound]) -> pd.DataFrame:
    frames = []
    for one in rounds:
        frame = one.observed.requests.rename(columns={"arm": "trial_arm"})
        frames.append(frame.assign(round=one.round, arm=one.arm))
    return pd.concat(frames, ignore_index=True)


def _all_of(key: str, rounds: Sequence[ArmRound]) -> str | None:
    found = dict.fromkeys(str(one.target[key]) for one in rounds if one.target.get(key))
    return ", ".join(found) or None


def _arm(rounds: Sequence[ArmRound], num_rounds: int) -> ArmSummary:
    if not rounds:
        return ArmSummary(outcomes={}, metrics={}, per_round={})
    figures = arm_figures(rounds)
    requests = together(one.observed.requests for one in rounds)
    cancels = together(one.observed.cancels for one in rounds)
    tasks = together(one.observed.tasks for one in rounds)
    return ArmSummary(
        outcomes=count_outcomes(requests),
        metrics=measured(figures),
        not_measurable=reasons(figures),
        flags=flags(figures),
        token_counting=token_counting(requests),
        per_round=_per_round({one.round: one.figures for one in rounds}, figures, num_rounds),
        breakdown=msgspec.to_builtins(
            {
                "cancel_latency_by_phase": latency_by("phase", cancels),
                **savings_by_task(tasks, rounds[0].observed.facts),
            }
        ),
    )


def _per_round(
    rounds: Mapping[int, Figures], pooled: Figures, num_rounds: int
) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for name in METRICS:
        metrics = [rounds.get(n + 1, {}).get(name) for n in range(num_rounds)]
        for key in FIGURES_PER_ROUND:
            values = [_comparable(one, pooled.get(name), key) for one in metrics]
            if any(value is not None for value in values):
                found.setdefault(name, {})[key] = values
    return found


def _comparable(figure: Figure | None, pooled: Figure | None, key: str) -> float | None:
    if not isinstance(figure, Metric) or figure.bound == "upper":
        return None
    if isinstance(pooled, Metric) and pooled.method != figure.method:
        return None
    value: float | None = getattr(figure, key)
    return value


def differences(
    arms: Mapping[str, ArmSummary], reference: str
) -> dict[str, dict[str, list[Difference]]]:
    theirs: Mapping[str, Values] = arms[reference].per_round
    return {
        metric: {
            key: [
                _unlike(metric, name, reference, arms)
                or compare_rounds(name, reference, arm.per_round[metric][key], values, paired=True)
                for name, arm in arms.items()
                if name != reference and key in arm.per_round.get(metric, {})
            ]
            for key, values in figures.items()
        }
        for metric, figures in theirs.items()
    }


def _unlike(
    metric: str, name: str, reference: str, arms: Mapping[str, ArmSummary]
) -> Difference | None:
    mine, theirs = (arms[which].metrics.get(metric) for which in (name, reference))
    if mine is None or theirs is None:
        return None
    counting = arms[name].token_counting, arms[reference].token_counting
    why = why_not_figures(metric, mine, theirs, counting)
    if why is None:
        return None
    note = f"not compared: {why} ({name}, {reference})"
    return Difference(arm=name, reference=reference, n=0, note=note)


def _shifts(
    rounds: Sequence[ArmRound], names: Sequence[str], reference: str
) -> dict[str, dict[str, Shift]]:
    samples = {
        name: of_each_request(
            (one.observed.requests, one.observed.cancels) for one in rounds if one.arm == name
        )
        for name in names
    }
    found: dict[str, dict[str, Shift]] = {metric: {} for metric in samples[reference]}
    for name in names:
        if name != reference:
            for metric, shift in shifts_between(samples[name], samples[reference]).items():
                found[metric][name] = shift
    return found


def _value(
    rounds: Sequence[ArmRound], arms: Mapping[str, ArmSummary], workload: Mapping[str, Any]
) -> Value | None:
    if not workload.get("value"):
        return None
    terms = msgspec.convert(workload["value"], ValueTerms)
    numbers = range(1, workload["run"]["rounds"] + 1)
    of_run = {(one.arm, one.round): one.account for one in rounds}
    accounts = {name: [of_run.get((name, number)) for number in numbers] for name in arms}
    cancels = [one.observed.cancels for one in rounds if one.arm == terms.honoured]
    parts = stage_parts(together(cancels)) if cancels else {}
    return value_of(accounts, terms, {**arms[terms.honoured].metrics, **parts})


def _remarks(rounds: Sequence[ArmRound], names: Sequence[str], num_rounds: int) -> list[Remark]:
    said = []
    done = {(one.round, one.arm) for one in rounds}
    wanted = [(number, name) for number in range(1, num_rounds + 1) for name in names]
    if missing := [f"{number}-{name}" for number, name in wanted if (number, name) not in done]:
        text = f"{len(missing)} of {len(wanted)} runs gave no figures: {', '.join(missing)}"
        said.append(Remark(level="warning", text=text))
    said += _once_each(rounds)
    of_arms = {one.arm: [other for other in rounds if other.arm == one.arm] for one in rounds}
    said += canary_remarks(
        {
            name: known_answers(together(one.observed.requests for one in of_arm))
            for name, of_arm in of_arms.items()
        }
    )
    how = "differences are of paired rounds, intervals by Student's t (ratios: on logarithms)"
    if num_rounds < FEWEST_ROUNDS:
        how = (
            "differences are of paired rounds: an interval takes at least "
            f"{FEWEST_ROUNDS} of them, and `run.rounds` is {num_rounds}"
        )
    said.append(Remark(level="info", text=how))
    return in_level_order(said)


_NUMBER: Final = re.compile(r"\d[\d.,e-]*(?: (?:µs|ms|s|min)\b)?")  # a time's unit is by its size


def _once_each(rounds: Sequence[ArmRound]) -> list[Remark]:
    alike: dict[str, list[tuple[Remark, str]]] = {}
    for one in rounds:
        for remark in one.remarks:
            key = remark.level + _NUMBER.sub("#", remark.text)
            alike.setdefault(key, []).append((remark, f"{one.round}-{one.arm}"))
    said = []
    for (first, where), *others in alike.values():
        more = f" and {len(others)} more" if others else ""
        is_everywhere = len(others) + 1 == len(rounds) and first.level == "info"
        of = "" if is_everywhere else f" (in {where}{more})"
        said.append(Remark(level=first.level, text=first.text + of))
    return said
