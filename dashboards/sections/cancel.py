"""Each cancel, cancel latency by way of leaving and by phase, and slot recovery."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import pandas as pd

from dashboards.figures import curves
from dashboards.figures.cancels import Cancels, each_cancel
from dashboards.figures.ladders import ladders
from dashboards.sections.section import Part, Picture, Table, median_and_p99, section, why_not
from harness.analysis.cancellations import was_cancelled
from harness.analysis.probe_train import probes
from harness.export.library import Run
from harness.formatting import DASH, figure_of, quantity
from harness.metrics import CANCEL_LATENCY, CANCEL_LATENCY_STEPS
from harness.records import Metric

ONLY_TOTALS: Final = (
    "No source here shows when the server let go of a single request; the figures from totals and "
    "probes stand above."
)
WAYS: Final = {
    "fin": "closed",
    "rst": "reset",
    "half_close": "half-closed",
    "stop_reading": "stopped reading",
    "vanish": "vanished",
    "killed": "was killed",
    "cancel": "cancelled",
    "deadline": "let the deadline pass",
    "channel_closed": "closed the channel",
    "process_killed": "was killed with its channel",
}
PHASES: Final = {
    "waiting": "in the queue",
    "prefill": "in prefill",
    "hand_over": "between two workers",
    "decode": "in decode",
}


@section(
    "cancels",
    "How long each cancel took",
    "Each dot is a user who left: the time until the server let go. The dashed line is one engine "
    "step. A cross at the upper edge was never let go (a ghost).",
    good="no cross, and no dot far above the line.",
)
def cancels(run: Run) -> Iterator[Part]:
    known = run.cancellations[was_cancelled(run.cancellations)]
    if known.empty:
        yield why_not(run, (CANCEL_LATENCY,), ONLY_TOTALS)
        return
    step = run.metrics.get("step_s")
    of = Cancels.of_run(known, None if step is None else step.p50)
    yield Picture(
        name="cancels",
        figure=each_cancel(of),
        alt=f"One dot for each cancel. {' '.join(_counted(of))} "
        + median_and_p99(run.metrics.get(CANCEL_LATENCY)),
        note=of.note,
    )


def _counted(of: Cancels) -> Iterator[str]:
    let_go = f"Of {quantity(of.of, 'users')} who left, {len(of.let_go):,} were let go"
    if of.step_s is None:
        yield f"{let_go}."
    else:
        step = quantity(of.step_s, "s")
        yield f"{let_go}, {of.within_a_step:,} within one engine step of {step}."
    yield f"Never let go (ghosts): {len(of.ghosts):,}."
    if len(of.unknown):
        yield f"Watched for too short a time to say: {len(of.unknown):,}."


@section(
    "cancel-latency",
    "How long until the server let go",
    "The share of abandoned requests whose slot and blocks were free again, by time since the user "
    "left. A request that was never stopped (a ghost) counts as longer than the settle time, even "
    "if it ended by itself before: it is a cross.",
    good="a steep line that reaches 100 % within one or two engine steps.",
)
def latency(run: Run) -> Iterator[Part]:
    if not was_cancelled(run.cancellations).any():
        yield why_not(run, (CANCEL_LATENCY,), ONLY_TOTALS)
        return
    yield Picture(
        name="cancel-latency",
        figure=curves.cancel_latency(run.cancellations),
        alt="Share of abandoned requests let go of, by time since the user left. "
        + median_and_p99(run.metrics.get(CANCEL_LATENCY)),
        note=curves.rising_note(int(was_cancelled(run.cancellations).sum())),
    )
    is_let_go = ~run.cancellations["censored"].astype(bool)
    if run.cancellations.loc[is_let_go, CANCEL_LATENCY_STEPS].notna().any():
        yield Picture(
            name="cancel-steps",
            figure=curves.cancel_steps(run.cancellations),
            alt="Bars: abandoned requests by the number of engine steps until let go. "
            + median_and_p99(run.metrics.get(CANCEL_LATENCY_STEPS)),
            note="Counted in engine steps, so that a slow machine and a fast one compare; "
            "ghosts are left out here.",
        )


@section(
    "ways",
    "By way of leaving",
    "Cancel latency by how the user left, and by where the request was then: median (dot), p90 "
    "(diamond), p99 (bar). An arrow: never stopped while it was watched.",
    good="short times, alike in every row: a server that sees a closed connection at once may "
    "overlook one that is only silent.",
)
def ways(run: Run) -> Iterator[Part]:
    rows = [*_rows(run, "way", WAYS), *_rows(run, "phase", PHASES)]
    if not rows:
        yield why_not(run, (CANCEL_LATENCY,), ONLY_TOTALS)
        return
    medians = "; ".join(f"{label}: {figure_of(metric, 'p50')}" for label, _, metric in rows)
    yield Picture(
        name="ways",
        figure=ladders([(label, metric) for label, _, metric in rows]),
        alt=f"A ladder of quantiles of the cancel latency in each row. Medians: {medians}.",
    )
    yield Table(
        title="Cancel latency by way and phase",
        shows="Ghosts were never stopped within the settle time.",
        columns=("left", "requests", "ghosts", "median", "p99", "largest"),
        rows=tuple(_cells(label, ghosts, metric) for label, ghosts, metric in rows),
    )


def _rows(run: Run, kind: str, labels: Mapping[str, str]) -> list[tuple[str, int | None, Metric]]:
    found: list[Mapping[str, Any]] = run.whole.breakdown.get(f"cancel_latency_by_{kind}") or []
    return [
        (
            labels.get(one[kind], str(one[kind])),
            one.get("ghosts"),
            msgspec.convert(one[CANCEL_LATENCY], Metric),
        )
        for one in found
    ]


def _cells(label: str, ghosts: int | None, metric: Metric) -> tuple[str, ...]:
    figures = [figure_of(metric, key) for key in ("p50", "p99", "max")]
    return (label, f"{metric.n:,}", DASH if ghosts is None else f"{ghosts:,}", *figures)


def has_probes(run: Run) -> bool:
    return bool((_probe_requests(run)["role"] == "probe").any())


def _probe_requests(run: Run) -> pd.DataFrame:
    after = run.frames.probe_phase
    return run.frames.requests if after is None else after


@section(
    "recovery",
    "How soon the slot worked for another request",
    "A probe waits behind full slots. Each dot is one sample: from the moment a stream left to the "
    "probe's first token (abandon), the first token on an idle server (unloaded), and the "
    "hand-over of a slot from a request that ended by itself (control). The box holds the middle "
    "half, its line is the median.",
    good="abandon within about a step and a half of t0: a control, and the wait for the step.",
)
def recovery(run: Run) -> Iterator[Part]:
    waited = probes(_probe_requests(run))
    if waited.empty:
        yield "No stream left while a probe waited."
        return
    yield Picture(
        name="recovery",
        figure=curves.slot_recovery(waited),
        alt="One dot for each sample in three rows: unloaded, abandon and control. Recovery: "
        + median_and_p99(run.metrics.get("slot_recovery_s")),
    )
