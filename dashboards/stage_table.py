"""Every stage of a cancel as a row: what happens in it, how long it took, and in how many steps.

A stage in steps is the number of step boundaries passed in it. A request that got no further than
its beginning is censored, in steps as in seconds.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from dashboards.tables import PlainTable
from harness.analysis.cancellation import was_cancelled
from harness.analysis.figure import Sample, describe
from harness.analysis.step_log import StepTimes
from harness.formatting import DASH, figure_of, quantity
from harness.records import Metric

# metric, from, to, in words, columns of `cancellations` for the ends
_ROWS: Final = (
    ("detect_s", "the user leaves", "the server sees it", "t0_ns", "detected_ns"),
    ("signal_s", "the server sees it", "its worker hears of it", "detected_ns", "heard_ns"),
    ("wait_s", "the worker hears of it", "out of the batch", "heard_ns", "removed_ns"),
    ("free_s", "out of the batch", "blocks reclaimed", "removed_ns", "freed_ns"),
)
_REFILL: Final = "slot_refill_s"


def stage_table(metrics: Mapping[str, Metric], in_steps: Mapping[str, Metric]) -> PlainTable:
    """A row for each stage that is known, with the refill of the slot and the whole."""
    rows = [
        _row(f"{start} \N{RIGHTWARDS ARROW} {end}", metrics[name], in_steps.get(name))
        for name, start, end, _, _ in _ROWS
        if name in metrics
    ]
    if whole := metrics.get("cancel_latency_s"):
        rows.append(_row("in all: cancel latency", whole, metrics.get("cancel_latency_steps")))
    if refill := metrics.get(_REFILL):
        label = "blocks reclaimed \N{RIGHTWARDS ARROW} refilled: the next one takes the slot"
        rows.append((*_row(label, refill, None)[:-2], _next_schedule(metrics), DASH))
    return PlainTable(
        title="Stage by stage",
        shows="Of the requests that came as far as the stage. In steps: the number of engine step "
        "boundaries that passed meanwhile.",
        columns=("stage", "requests", "median", "p99", "in steps: median", "p99"),
        rows=tuple(rows),
    )


def _row(label: str, metric: Metric, steps: Metric | None) -> tuple[str, ...]:
    in_steps = [DASH if steps is None else figure_of(steps, key, unit="") for key in ("p50", "p99")]
    return (
        label,
        f"{metric.n:,}",
        figure_of(metric, "p50"),
        figure_of(metric, "p99"),
        *in_steps,
    )


def _next_schedule(metrics: Mapping[str, Metric]) -> str:
    share = metrics.get("refilled_next_schedule")
    if share is None or share.mean is None:
        return DASH
    return f"next step: {quantity(share.mean, 'ratio')}"


def stages_in_steps(cancels: pd.DataFrame, steps: pd.DataFrame) -> dict[str, Metric]:
    """Each stage of `cancellations` in step boundaries passed; nothing without a step log."""
    if steps.empty or cancels.empty:
        return {}
    times = StepTimes.of(steps)
    has_begun = was_cancelled(cancels)
    latency_ns = (cancels["cancel_latency_s"].fillna(0.0) * 1e9).round().astype("Int64")
    found = {}
    for name, _, _, start, end in _ROWS:
        is_over = cancels[name].notna()
        is_stuck = has_begun & ~is_over & cancels["censored"].astype(bool)
        rows = cancels[is_over | is_stuck]
        if len(rows):
            seen = rows[end].where(is_over, rows["t0_ns"] + latency_ns)
            passed = times.boundaries_passed(
                rows[start].to_numpy(dtype=np.int64), seen.to_numpy(dtype=np.int64)
            )
            sample = Sample(
                values=np.maximum(passed, 0).astype(float), censored=is_stuck[rows.index].to_numpy()
            )
            found[name] = describe(sample, unit="steps", method="exact")
        has_begun = has_begun & is_over
    return found
