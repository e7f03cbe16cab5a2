"""One run of one arm, analysed, and the figures of all runs of an arm together.

Pooled are the observations, not their averages: all abandoned requests of an arm, all its users,
all its steps make one sample, and what is seen from outside is added up (`black_box`). A figure of
which a run has only one (a counter, a utilisation) is one observation a round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.account import Account, account
from harness.analysis.asking_again import asking_again_figures
from harness.analysis.black_box import (
    Outside,
    figures_from_outside,
    seen_from_outside,
    with_methods,
)
from harness.analysis.canaries import canary_figures
from harness.analysis.cancel_figures import cancel_figures, waste_figures
from harness.analysis.cancellation import cancellations
from harness.analysis.capacity import series_figures, series_of
from harness.analysis.facts import Facts, run_facts
from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.frames import RunFrames
from harness.analysis.latency import latency_figures
from harness.analysis.over_read import over_read_figures
from harness.analysis.recovery import probe_figures, refill_figures, refills_after_abandons
from harness.analysis.stats import Floats, mean_ci95
from harness.analysis.storms import storm_figures
from harness.analysis.summary import compute_figures, summarise
from harness.records import Remark
from harness.records import Metric

# One number a run, whatever else it is made from.
_READINGS: Final = (
    "goodput_rps",
    "leaked_slots",
    "leaked_blocks",
    "slot_utilisation",
    "throughput_tps",
    "preemptions",
    "recomputed_tokens",
)
_SOMETIMES: Final = ("cached_again",)
_MORE_THAN_TRIALS: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRound:
    """One run of one arm: what pooling needs of it, so that its logs need not be kept."""

    round: int
    arm: str
    facts: Facts
    requests: pd.DataFrame
    cancels: pd.DataFrame
    refills: pd.DataFrame
    series: Mapping[str, Floats]
    outside: Outside
    figures: Figures
    remarks: Sequence[Remark]
    target: Mapping[str, Any]
    account: Account | None


def analyse_round(frames: RunFrames, *, round_number: int, arm: str) -> ArmRound:
    """Everything about one run that does not depend on the others."""
    facts, cancels = run_facts(frames), cancellations(frames)
    summary, outside = summarise(frames), seen_from_outside(frames, facts)
    return ArmRound(
        round=round_number,
        arm=arm,
        facts=facts,
        requests=frames.requests,
        cancels=cancels,
        refills=refills_after_abandons(frames, cancels, facts),
        series=series_of(frames, facts),
        outside=outside,
        figures=compute_figures(frames, cancels, facts, outside),
        remarks=msgspec.convert(summary["validity"], list[Remark]),
        target=frames.manifest.get("target") or {},
        account=account(frames),
    )


def pooled_figures(rounds: Sequence[ArmRound]) -> Figures:
    """The figures of one arm over all its rounds; needs at least one."""
    facts = rounds[0].facts
    requests = pd.concat([one.requests for one in rounds], ignore_index=True)
    cancels = pd.concat([one.cancels for one in rounds], ignore_index=True)
    refills = pd.concat([one.refills for one in rounds], ignore_index=True)
    series = {
        name: np.concatenate([one.series[name] for one in rounds]) for name in rounds[0].series
    }
    figures = {
        **cancel_figures(cancels, facts),
        **waste_figures(cancels, facts),
        **refill_figures(refills, cancels, facts),
        **probe_figures(requests),
        **latency_figures(requests, facts),
        **asking_again_figures(requests),
        **canary_figures(requests),
        **over_read_figures(requests),
        **storm_figures(_numbered_apart(rounds), facts),
        **series_figures(series, facts),
        **{name: _over_rounds([one.figures[name] for one in rounds]) for name in _READINGS},
        **_sometimes(rounds),
    }
    for name, methods in figures_from_outside([one.outside for one in rounds]).items():
        figures[name] = with_methods(figures[name], methods)
    return figures


def _numbered_apart(rounds: Sequence[ArmRound]) -> pd.DataFrame:
    """All cancels, with the trials of different rounds numbered apart."""
    parts = [
        one.cancels.assign(trial=one.cancels["trial"] + one.round * _MORE_THAN_TRIALS)
        for one in rounds
    ]
    return pd.concat(parts, ignore_index=True)


def _sometimes(rounds: Sequence[ArmRound]) -> Figures:
    """Readings that only some workloads have."""
    return {
        name: _over_rounds([one.figures[name] for one in rounds if name in one.figures])
        for name in _SOMETIMES
        if any(name in one.figures for one in rounds)
    }


def _over_rounds(figures: Sequence[Metric | NotMeasurable]) -> Metric | NotMeasurable:
    """A reading a round as one sample: its mean and its largest, for a quantile of rounds is none
    of what was counted. A lower bound in one round makes one of the mean."""
    known = [one for one in figures if isinstance(one, Metric)]
    if not known:
        return figures[0]
    if len({one.method for one in known}) > 1:
        return NotMeasurable("the rounds have it by different methods")
    if any(one.mean is None or one.bound == "upper" for one in known):
        return NotMeasurable("a round tells no more than what it does not exceed")
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
