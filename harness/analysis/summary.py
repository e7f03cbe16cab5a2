"""A run's summary: every figure that its data can give, and a reason for each one it cannot.

Pure: the same frames give the same summary. The order of the figures is the order in which one
reads them: what a cancel took, what it wasted, what the others felt, what leaked, how busy the
engine was, and how finely all this was seen.
"""

from typing import Any, Final

import msgspec
import pandas as pd

from harness.analysis.cancel_figures import (
    cancel_figures,
    latency_by_phase,
    waste_by_abandon_point,
    waste_figures,
)
from harness.analysis.cancellation import cancellations
from harness.analysis.capacity import capacity_figures, floor_figures
from harness.analysis.counters import count_figures, leak_figures, wasted_by_counter, with_other
from harness.analysis.facts import Facts, run_facts
from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.frames import RunFrames
from harness.analysis.held import leaks_in_use
from harness.analysis.latency import latency_figures
from harness.analysis.recovery import probe_figures, refill_figures
from harness.analysis.tokens import token_counting
from harness.analysis.validity import flags, remarks
from harness.records import SCHEMA_VERSION, Metric, Outcome

ORDER: Final = (
    "detect_s",
    "signal_s",
    "wait_s",
    "free_s",
    "cancel_latency_s",
    "cancel_latency_steps",
    "removed_at_first_boundary",
    "slot_refill_s",
    "refilled_next_schedule",
    "slot_recovery_s",
    "probe_ttft_unloaded_s",
    "probe_ttft_control_s",
    "wasted_tokens",
    "wasted_in_flight_tokens",
    "wasted_after_close_tokens",
    "slot_seconds_after_abandon",
    "block_seconds_after_abandon",
    "gpu_seconds_after_abandon",
    "ttft_s",
    "itl_s",
    "tpot_s",
    "e2e_s",
    "goodput_rps",
    "ghost_rate",
    "leaked_slots",
    "leaked_blocks",
    "slot_utilisation",
    "throughput_tps",
    "preemptions",
    "recomputed_tokens",
    "step_s",
    "client_lag_s",
    "scrape_interval_s",
    "start_delay_s",
)


def summarise(frames: RunFrames) -> dict[str, Any]:
    """The content of `summary.json`: plain data, every field of every metric present.

    Keys: schema_version, run_id, status, workload, engine, model, outcomes, metrics,
    not_measurable (name: reason), flags (figures below the measurement floor), validity,
    token_counting, breakdown (of them `leaks_in_use`: what of the leaked slots and blocks requests
    hold that still run).
    """
    facts = run_facts(frames)
    cancels = cancellations(frames)
    found = compute_figures(frames, cancels, facts)
    flagged = flags(found)
    in_use = leaks_in_use(frames, facts, found)
    ordered = {name: found[name] for name in ORDER if name in found}
    manifest = frames.manifest
    target = manifest.get("target") or {}
    summary = {
        "schema_version": SCHEMA_VERSION,
        "run_id": manifest.get("run_id"),
        "status": facts.status,
        "workload": (manifest.get("workload") or {}).get("name"),
        "engine": target.get("engine"),
        "model": target.get("model"),
        "outcomes": _outcomes(frames.requests),
        "metrics": {name: one for name, one in ordered.items() if isinstance(one, Metric)},
        "not_measurable": {
            name: one.reason for name, one in ordered.items() if isinstance(one, NotMeasurable)
        },
        "flags": flagged,
        "validity": remarks(frames, cancels, facts, flagged, in_use),
        "token_counting": token_counting(frames.requests),
        "breakdown": {
            "waste_by_abandon_point": waste_by_abandon_point(cancels),
            "cancel_latency_by_phase": latency_by_phase(cancels),
            "leaks_in_use": in_use,
        },
    }
    plain: dict[str, Any] = msgspec.to_builtins(summary)
    return plain


def compute_figures(frames: RunFrames, cancels: pd.DataFrame, facts: Facts) -> Figures:
    """Every figure by name, in no particular order."""
    figures = {
        **cancel_figures(cancels, facts),
        **waste_figures(cancels, facts),
        **refill_figures(frames, cancels, facts),
        **probe_figures(frames.requests),
        **latency_figures(frames.requests, facts),
        **leak_figures(facts),
        **count_figures(frames.lifecycle, facts),
        **capacity_figures(frames, facts),
        **floor_figures(frames, facts),
    }
    by_counter = wasted_by_counter(frames.requests, facts)
    figures["wasted_tokens"] = with_other(figures["wasted_tokens"], "counter", by_counter)
    return figures


def _outcomes(requests: pd.DataFrame) -> dict[str, int]:
    counts = requests["outcome"].value_counts()
    return {outcome.value: int(counts.get(outcome.value, 0)) for outcome in Outcome}
