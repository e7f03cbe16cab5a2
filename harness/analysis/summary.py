"""A run's summary: every figure that its data can give, and a reason for each one it cannot.

Pure: equal frames give equal summaries.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.agreement import agreement
from harness.analysis.audit import audit
from harness.analysis.black_box import (
    Outside,
    figures_from_outside,
    seen_from_outside,
    with_methods,
)
from harness.analysis.cancel_figures import (
    cancel_figures,
    latency_by,
    storm_figures,
    waste_by_abandon_point,
)
from harness.analysis.cancellations import cancellations
from harness.analysis.capacity import capacity_figures, series_figures, series_of
from harness.analysis.counters import count_figures, wasted_prompts_by_counter
from harness.analysis.early_stop import (
    answered_tasks,
    early_stop_figures,
    savings_by_task,
    whole_answers_rate,
)
from harness.analysis.figure import Figures, NotMeasurable, same_reason
from harness.analysis.kills import KillEffects, kill_effects, kill_figures
from harness.analysis.latency import (
    canary_figures,
    latency_figures,
)
from harness.analysis.leaks import growth_figures, is_wedged, leak_figures, leaks_in_use, leaks_lost
from harness.analysis.load_side import load_sides, sent_of_schedule, steady_window
from harness.analysis.next_requests import (
    asking_again_figures,
    cached_again_figures,
    recomputed_history_figures,
    turn_figures,
)
from harness.analysis.occupancy import occupancy_figures, with_probe
from harness.analysis.plan_failure import plan_failure
from harness.analysis.probe_train import probe_figures
from harness.analysis.recovery import refill_figures, refills_after_abandons
from harness.analysis.remarks import flags, remarks
from harness.analysis.replicas import by_replica, over_replicas
from harness.analysis.run_facts import RunFacts, run_facts
from harness.analysis.tokens import over_read_figures, token_counting, without_tokens
from harness.metrics import CANCEL_LATENCY_STEPS, METRICS, WASTED_TOKENS
from harness.records import Metric, Outcome, Simulated, Summary
from harness.stats import Floats
from harness.store.frames import RunFrames

_MORE_THAN_TRIALS: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The data of a run behind the figures of samples, without its logs: runs can be pooled."""

    facts: RunFacts
    requests: pd.DataFrame
    probes: pd.DataFrame
    cancels: pd.DataFrame
    refills: pd.DataFrame
    tasks: pd.DataFrame
    series: Mapping[str, Floats]
    outside: Outside
    kills: KillEffects


def observe(frames: RunFrames) -> Observed:
    facts, cancels = run_facts(frames), cancellations(frames)
    return Observed(
        facts=facts,
        requests=frames.requests,
        probes=frames.probes,
        cancels=cancels,
        refills=refills_after_abandons(frames, cancels, facts),
        tasks=answered_tasks(frames),
        series=series_of(frames, facts),
        outside=seen_from_outside(frames, facts),
        kills=kill_effects(frames, facts),
    )


def summarise(frames: RunFrames) -> Summary:
    observed = observe(frames)
    summary = summary_of(frames, observed, figures_of(frames, observed))
    if (simulated := summary.simulated) is not None and simulated.simulated < simulated.replicas:
        each = [figures_of(one, observe(one)) for one in by_replica(frames)]
        over = over_replicas(each, simulated)
        summary.breakdown["over_replicas"] = msgspec.to_builtins(over)
    return summary


def summary_of(frames: RunFrames, observed: Observed, found: Figures) -> Summary:
    facts, cancels, manifest = observed.facts, observed.cancels, frames.manifest
    target = manifest.get("target") or {}
    summary = Summary(
        run_id=manifest.get("run_id") or "",
        status=facts.status,
        workload=(manifest.get("workload") or {}).get("name"),
        engine=target.get("engine"),
        model=target.get("model"),
        outcomes=count_outcomes(frames.requests),
        metrics=measured(found),
        not_measurable=reasons(found),
        flags=flags(found),
        validity=[],
        agreement=agreement(frames, found, facts, observed.outside),
        audit=audit(frames, facts, found[WASTED_TOKENS]),
        steady=steady_window(frames, facts),
        wedged=is_wedged(manifest.get("probing") or {}),
        load_processes=load_sides(frames, facts),
        arrivals=sent_of_schedule(frames),
        token_counting=token_counting(frames.requests),
        plan_failed=plan_failure(without_tokens(frames.requests)),
        breakdown=msgspec.to_builtins(
            {
                "waste_by_abandon_point": waste_by_abandon_point(cancels),
                "cancel_latency_by_phase": latency_by("phase", cancels),
                "cancel_latency_by_way": latency_by("way", cancels),
                "leaks_in_use": leaks_in_use(frames, facts, found),
                "leaks_lost": leaks_lost(facts),
                **savings_by_task(observed.tasks, facts),
            }
        ),
    )
    seen = cancels, observed.kills, observed.outside.train
    if (simulated := manifest.get("simulated")) is not None:
        summary.simulated = msgspec.convert(simulated, Simulated)
    summary.validity = remarks(frames, seen, facts, found, summary)
    return summary


def measured(figures: Figures) -> dict[str, Metric]:
    found = {name: figures.get(name) for name in METRICS}
    return {name: one for name, one in found.items() if isinstance(one, Metric)}


def reasons(figures: Figures) -> dict[str, str]:
    found = {name: figures.get(name) for name in METRICS}
    return {name: one.reason for name, one in found.items() if isinstance(one, NotMeasurable)}


def figures_of(frames: RunFrames, observed: Observed) -> Figures:
    facts = observed.facts
    needing_logs = {
        **cached_again_figures(frames, facts),
        **recomputed_history_figures(frames, facts),
        **_leaks(frames, observed),
        "wasted_prompt_tokens": wasted_prompts_by_counter(frames.requests, facts),
        **growth_figures(frames, facts),
        **count_figures(frames.lifecycle, facts),
        **capacity_figures(frames, facts),
        **whole_answers_rate(observed.tasks, facts),
    }
    return pooled_figures([observed], needing_logs)


def _leaks(frames: RunFrames, observed: Observed) -> Figures:
    figures = leak_figures(frames, observed.facts)
    for name, one in occupancy_figures(observed.requests, observed.outside.rounds).items():
        if isinstance(one, Metric):
            figures[name] = with_probe(figures.get(name), one)
        elif not isinstance(figures.get(name), Metric):
            figures[name] = one
    return figures


def pooled_figures(runs: Sequence[Observed], of_each_run: Figures) -> Figures:
    facts = runs[0].facts
    requests = together(one.requests for one in runs)
    cancels = _numbered_apart(runs)
    series = {name: np.concatenate([one.series[name] for one in runs]) for name in runs[0].series}
    figures = {
        **cancel_figures(cancels, facts),
        **refill_figures(together(one.refills for one in runs), cancels, facts),
        **probe_figures(together(one.probes for one in runs)),
        **latency_figures(requests, facts),
        **asking_again_figures(requests),
        **turn_figures(requests),
        **canary_figures(requests),
        **storm_figures(cancels, facts),
        **early_stop_figures(together(one.tasks for one in runs), facts),
        **_over_read(requests, facts),
        **kill_figures([one.kills for one in runs]),
        **series_figures(series, facts),
        **of_each_run,
    }
    for name, methods in figures_from_outside([one.outside for one in runs]).items():
        # Steps seen by probes are for servers that have no log of their own.
        if name != CANCEL_LATENCY_STEPS or isinstance(figures[name], NotMeasurable):
            figures[name] = with_methods(figures[name], methods)
    return figures


def _over_read(requests: pd.DataFrame, facts: RunFacts) -> Figures:
    why = facts.lacks("token lists")
    return over_read_figures(requests) if why is None else same_reason(("over_read_tokens",), why)


def together(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    parts = list(frames)
    return parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)


def _numbered_apart(runs: Sequence[Observed]) -> pd.DataFrame:
    return together(
        one.cancels.assign(trial=one.cancels["trial"] + place * _MORE_THAN_TRIALS)
        if place
        else one.cancels
        for place, one in enumerate(runs)
    )


def count_outcomes(requests: pd.DataFrame) -> dict[str, int]:
    counts = requests["outcome"].value_counts()
    return {outcome.value: int(counts.get(outcome.value, 0)) for outcome in Outcome}
