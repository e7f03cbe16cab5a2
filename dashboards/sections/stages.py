"""The stages of a cancel, in time and in step boundaries passed; censored alike in both."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pandas as pd

from dashboards.figures.bars import STAGE_ROWS, STAGES, cancel_stages, open_at_most, stage_parts
from dashboards.sections.section import Part, Picture, Table, section, why_not
from harness.analysis.cancel_figures import stages_reached
from harness.analysis.figure import Sample, describe
from harness.analysis.timeline import StepTimes, WorkerSteps
from harness.export.library import Run
from harness.formatting import DASH, figure_of, quantity
from harness.metrics import CANCEL_LATENCY, CANCEL_LATENCY_STEPS
from harness.records import Metric

# metric, from, to, columns of `cancellations` for the ends
_ROWS: Final = (
    ("detect_s", "the user leaves", "the server sees it", "t0_ns", "detected_ns"),
    ("signal_s", "the server sees it", "its worker hears of it", "detected_ns", "heard_ns"),
    ("wait_s", "the worker hears of it", "out of the batch", "heard_ns", "removed_ns"),
    ("free_s", "out of the batch", "blocks reclaimed", "removed_ns", "freed_ns"),
)
_BY_TIER: Final = (
    ("hop_s", "a tier hears of it \N{RIGHTWARDS ARROW} the next tier hears of it"),
    (
        "cancel_latency_prefill_tier_s",
        "the user leaves \N{RIGHTWARDS ARROW} the prefill worker holds nothing",
    ),
    (
        "cancel_latency_decode_tier_s",
        "the user leaves \N{RIGHTWARDS ARROW} the decode worker holds nothing",
    ),
)


@section(
    "stages",
    "Where the time of a cancel goes",
    "From the user's leaving to the last block given back, and on to the next request in the slot, "
    "stage by stage. Each stage is summarised on its own, so a row need not add up to the cancel "
    "latency.",
    good="detect and signal well below a step, wait at most the step in progress, free next to "
    "nothing, refill in the very next step.",
)
def stages(run: Run) -> Iterator[Part]:
    names = [name for name, *_ in STAGES]
    present = {name: run.metrics[name] for name in names if name in run.metrics}
    if not present:
        yield why_not(run, names, "This server reports no stages of a cancel.")
        return
    rows = [
        f"{label[0].upper()}{label[1:]}: "
        + ", ".join(f"{name[:-2]} {figure_of(one, key)}" for name, one in present.items())
        for key, label in STAGE_ROWS
    ]
    yield Picture(
        name="stages",
        figure=cancel_stages(present),
        alt=f"Stacked bars of the stages of a cancel. {'. '.join(rows)}.",
        note=_not_drawn(present),
    )
    yield stage_table(run.metrics, stages_in_steps(run.cancellations, run.frames.steps))


def _not_drawn(metrics: Mapping[str, Metric]) -> str | None:
    rows = {label: stage_parts(metrics, key) for key, label in STAGE_ROWS}
    said = []
    if any(part.is_open for parts in rows.values() for part in parts.values()):
        said.append(
            "An arrow: the stage is known only to last longer, because too many requests were "
            "never stopped; the row ends there."
        )
    if open_at_most(rows.values()) < math.inf:
        said.append("There it is cut off and not to scale, to leave room for the stages before it.")
    missing = {
        label: [name[:-2] for name, *_ in STAGES if name not in parts]
        for label, parts in rows.items()
    }
    left_out = [f"{label} of {', '.join(names)}" for label, names in missing.items() if names]
    if left_out:
        said.append(f"Not drawn: {'; '.join(left_out)}.")
    return " ".join(said) or None


def stage_table(metrics: Mapping[str, Metric], in_steps: Mapping[str, Metric]) -> Table:
    rows = [
        _row(f"{start} \N{RIGHTWARDS ARROW} {end}", metrics[name], in_steps.get(name))
        for name, start, end, _, _ in _ROWS
        if name in metrics
    ]
    rows += [_row(label, metrics[name], None) for name, label in _BY_TIER if name in metrics]
    if whole := metrics.get(CANCEL_LATENCY):
        rows.append(_row("in all: cancel latency", whole, metrics.get(CANCEL_LATENCY_STEPS)))
    if refill := metrics.get("slot_refill_s"):
        label = "blocks reclaimed \N{RIGHTWARDS ARROW} refilled: the next one takes the slot"
        rows.append((*_row(label, refill, None)[:-2], _next_schedule(metrics), DASH))
    return Table(
        title="Stage by stage",
        shows="For the requests that came as far as the stage. In steps: the number of engine step "
        "boundaries that passed meanwhile.",
        columns=("stage", "requests", "median", "p99", "in steps: median", "p99"),
        rows=tuple(rows),
    )


def _row(label: str, metric: Metric, steps: Metric | None) -> tuple[str, ...]:
    in_time = [figure_of(metric, key) for key in ("p50", "p99")]
    in_steps = [DASH if steps is None else figure_of(steps, key, unit="") for key in ("p50", "p99")]
    return (label, f"{metric.n:,}", *in_time, *in_steps)


def _next_schedule(metrics: Mapping[str, Metric]) -> str:
    share = metrics.get("refilled_next_schedule")
    if share is None or share.mean is None:
        return DASH
    return f"next step: {quantity(share.mean, 'ratio')}"


def stages_in_steps(cancels: pd.DataFrame, steps: pd.DataFrame) -> dict[str, Metric]:
    """Each stage of `cancellations` in step boundaries passed; nothing without a step log."""
    if steps.empty or cancels.empty:
        return {}
    times = WorkerSteps(steps)
    ends = {name: (start, end) for name, _, _, start, end in _ROWS}
    latency_ns = (cancels[CANCEL_LATENCY].fillna(0.0) * 1e9).round().astype("Int64")
    found = {}
    for name, is_over, is_stuck in stages_reached(cancels):
        start, end = ends[name]
        rows = cancels[is_over | is_stuck]
        if len(rows):
            seen = rows[end].where(is_over, rows["t0_ns"] + latency_ns)
            stamps = (one.to_numpy(dtype=np.int64) for one in (rows[start], seen))
            passed = times.ask(StepTimes.boundaries_passed, rows["worker"], *stamps)
            sample = Sample(
                values=np.maximum(passed, 0).astype(float), censored=is_stuck[rows.index].to_numpy()
            )
            found[name] = describe(sample, unit="steps", method="exact")
    return found
