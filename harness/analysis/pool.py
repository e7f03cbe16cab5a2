"""Several runs of several arms as one summary: what each arm shows over all its rounds, and how the
arms differ.

How an arm's figures come about is told in `harness.analysis.arm_round`. How far apart the rounds
lie is in `per_round`, from which the differences are computed (`harness.analysis.paired`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.arm_round import ArmRound, pooled_figures
from harness.analysis.canaries import canary_remarks, known_answers
from harness.analysis.cancel_figures import latency_by_phase
from harness.analysis.comparable import OF_TOKENS, is_counted_alike
from harness.analysis.figure import Figure, Figures
from harness.analysis.of_each_request import OF_EACH, of_each_request
from harness.analysis.paired import FEWEST_ROUNDS, compare
from harness.analysis.stats import Floats
from harness.analysis.summary import ORDER, count_outcomes, in_order
from harness.analysis.tokens import token_counting
from harness.analysis.two_samples import shift_between
from harness.records import Remark
from harness.analysis.validity import flags
from harness.analysis.value import Value, ValueTerms, value_of
from harness.differences import Difference, Shift
from harness.records import SCHEMA_VERSION, Metric

# What is compared between arms, of each metric that has it.
FIGURES: Final = ("mean", "p50", "p99")
Values = dict[str, list[float | None]]


def pool(rounds: Sequence[ArmRound], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the `summary.json` of a workload with arms; needs at least one run.

    Keys beside those of a single run: reference (an arm's name), rounds, headlines (as the workload
    says), arms: {name: outcomes, metrics, not_measurable, flags, token_counting, breakdown,
    per_round}, with per_round: {metric: {figure: a value a round}}, and differences: {metric:
    {figure: an entry for each other arm}}, and shifts: {metric: {arm: `two_samples.Shift` of all
    its requests against all of the reference}}, and value (`value.Value`; null unless the workload
    asks for it).
    """
    workload = manifest["workload"]
    names = [arm["name"] for arm in workload["arms"]]
    num_rounds = workload["run"]["rounds"]
    reference = workload["run"]["reference_arm"] or names[0]
    arms = {name: _arm([one for one in rounds if one.arm == name], num_rounds) for name in names}
    summary = {
        "schema_version": SCHEMA_VERSION,
        "run_id": manifest.get("run_id"),
        "status": manifest.get("status"),
        "workload": workload["name"],
        "engine": _all_of("engine", rounds),
        "model": _all_of("model", rounds),
        "reference": reference,
        "rounds": num_rounds,
        "headlines": workload["headlines"],
        "arms": arms,
        "differences": _differences(arms, reference),
        "shifts": _shifts(rounds, names, reference),
        "validity": _remarks(rounds, names, num_rounds),
        "value": _value(rounds, arms, workload),
    }
    plain: dict[str, Any] = msgspec.to_builtins(summary)
    return plain


def all_requests(rounds: Sequence[ArmRound]) -> pd.DataFrame:
    """All rows of all runs, with `round` and `arm`; `trial_arm` is what a run's own `arm` was."""
    frames = []
    for one in rounds:
        frame = one.requests.rename(columns={"arm": "trial_arm"})
        frames.append(frame.assign(round=one.round, arm=one.arm))
    return pd.concat(frames, ignore_index=True)


def _all_of(key: str, rounds: Sequence[ArmRound]) -> str | None:
    """Engine or model: one, or as many as the arms' servers had."""
    found = dict.fromkeys(str(one.target[key]) for one in rounds if one.target.get(key))
    return ", ".join(found) or None


def _arm(rounds: Sequence[ArmRound], num_rounds: int) -> dict[str, Any]:
    """What the summary says about one arm."""
    if not rounds:
        return {"outcomes": {}, **in_order({}), "flags": {}, "per_round": {}, "breakdown": {}}
    figures = pooled_figures(rounds)
    requests = pd.concat([one.requests for one in rounds], ignore_index=True)
    cancels = pd.concat([one.cancels for one in rounds], ignore_index=True)
    return {
        "outcomes": count_outcomes(requests),
        **in_order(figures),
        "flags": flags(figures),
        "token_counting": token_counting(requests),
        "per_round": _per_round({one.round: one.figures for one in rounds}, figures, num_rounds),
        "breakdown": {"cancel_latency_by_phase": latency_by_phase(cancels)},
    }


def _per_round(
    rounds: Mapping[int, Figures], pooled: Figures, num_rounds: int
) -> dict[str, Values]:
    """Of each metric, each figure that some round has: a value a round, null where it has none."""
    numbers = range(1, num_rounds + 1)
    found: dict[str, Values] = {}
    for name in ORDER:
        metrics = [rounds.get(number, {}).get(name) for number in numbers]
        values = {
            key: [_comparable(one, pooled.get(name), key) for one in metrics] for key in FIGURES
        }
        known = {key: those for key, those in values.items() if any(v is not None for v in those)}
        if known:
            found[name] = known
    return found


def _comparable(one: Figure | None, pooled: Figure | None, key: str) -> float | None:
    """The figure of a round, by the method of them all. What it does not exceed is none: rounds
    differ in how much they could see."""
    if not isinstance(one, Metric) or one.bound == "upper":
        return None
    if isinstance(pooled, Metric) and pooled.method != one.method:
        return None
    value: float | None = getattr(one, key)
    return value


def _differences(
    arms: Mapping[str, Mapping[str, Any]], reference: str
) -> dict[str, dict[str, list[Difference]]]:
    """Every other arm against the reference, in each figure of each metric that both have by the
    same method: what one arm's log tells exactly another's gauges may see as a bound only."""
    theirs: Mapping[str, Values] = arms[reference]["per_round"]
    return {
        metric: {
            key: [
                _unlike(metric, name, reference, arms)
                or compare(name, reference, arm["per_round"][metric][key], values)
                for name, arm in arms.items()
                if name != reference and key in arm["per_round"].get(metric, {})
            ]
            for key, values in figures.items()
        }
        for metric, figures in theirs.items()
    }


def _unlike(
    metric: str, name: str, reference: str, arms: Mapping[str, Mapping[str, Any]]
) -> Difference | None:
    """Said in place of a difference of figures that are not of one kind; None where they are."""
    mine, theirs = (arms[which]["metrics"].get(metric) for which in (name, reference))
    counted, otherwise = (arms[which].get("token_counting") for which in (name, reference))
    if mine is None or theirs is None:
        return None
    if metric in OF_TOKENS and not is_counted_alike(counted, otherwise):
        note = f"not compared: tokens by {counted} in {name}, by {otherwise} in {reference}"
    elif (mine.method, mine.bound) != (theirs.method, theirs.bound):
        note = (
            f"not compared: by {mine.method} ({mine.bound}, n {mine.n}) in {name}, "
            f"by {theirs.method} ({theirs.bound}, n {theirs.n}) in {reference}"
        )
    else:
        return None
    return Difference(arm=name, reference=reference, n=0, note=note)


def _shifts(
    rounds: Sequence[ArmRound], names: Sequence[str], reference: str
) -> dict[str, dict[str, Shift]]:
    """What single requests took, of each arm against the reference: effect size and interval."""
    samples = {name: _samples([one for one in rounds if one.arm == name]) for name in names}
    return {
        metric: {
            name: shift_between(samples[name][metric], values)
            for name in names
            if name != reference and len(samples[name][metric]) and len(values)
        }
        for metric, values in samples[reference].items()
    }


def _value(
    rounds: Sequence[ArmRound], arms: Mapping[str, Any], workload: Mapping[str, Any]
) -> Value | None:
    if not workload.get("value"):
        return None
    terms = msgspec.convert(workload["value"], ValueTerms)
    numbers = range(1, workload["run"]["rounds"] + 1)
    of_run = {(one.arm, one.round): one.account for one in rounds}
    accounts = {name: [of_run.get((name, number)) for number in numbers] for name in arms}
    return value_of(accounts, terms, arms[terms.honoured]["metrics"])


def _samples(rounds: Sequence[ArmRound]) -> dict[str, Floats]:
    """By metric, the values of single requests of all these runs."""
    parts = [of_each_request(one.requests, one.cancels) for one in rounds]
    return {
        metric: np.concatenate([part[metric] for part in parts]) if parts else np.empty(0)
        for metric in OF_EACH
    }


def _remarks(rounds: Sequence[ArmRound], names: Sequence[str], num_rounds: int) -> list[Remark]:
    """Missing runs; what was to be said of each run, alike things once; how it was compared."""
    said = []
    done = {(one.round, one.arm) for one in rounds}
    wanted = [(number, name) for number in range(1, num_rounds + 1) for name in names]
    if missing := [f"{number}-{name}" for number, name in wanted if (number, name) not in done]:
        text = f"{len(missing)} of {len(wanted)} runs gave no figures: {', '.join(missing)}"
        said.append(Remark(level="warning", text=text))
    said += _once_each(rounds)
    said += canary_remarks(
        {
            name: known_answers(
                pd.concat([one.requests for one in rounds if one.arm == name], ignore_index=True)
            )
            for name in {one.arm for one in rounds}
        }
    )
    said.append(Remark(level="info", text=how_compared(num_rounds)))
    order = {"invalid": 0, "warning": 1, "info": 2}
    return sorted(said, key=lambda remark: order[remark.level])


def how_compared(num_rounds: int) -> str:
    """Said once for all differences between arms."""
    if num_rounds < FEWEST_ROUNDS:
        return (
            "differences are of paired rounds: an interval takes at least "
            f"{FEWEST_ROUNDS} of them, and `run.rounds` is {num_rounds}"
        )
    return "differences are of paired rounds, intervals by Student's t (ratios: on logarithms)"


def _once_each(rounds: Sequence[ArmRound]) -> list[Remark]:
    """Remarks that differ only in their numbers are said once, with the runs that they are of."""
    alike: dict[str, list[tuple[Remark, str]]] = {}
    for one in rounds:
        for remark in one.remarks:
            key = remark.level + re.sub(r"\d[\d.,e-]*", "#", remark.text)
            alike.setdefault(key, []).append((remark, f"{one.round}-{one.arm}"))
    said = []
    for (first, where), *others in alike.values():
        more = f" and {len(others)} more" if others else ""
        is_everywhere = len(others) + 1 == len(rounds) and first.level == "info"
        of = "" if is_everywhere else f" (in {where}{more})"
        said.append(Remark(level=first.level, text=first.text + of))
    return said
