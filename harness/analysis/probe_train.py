"""Cancel latency and slot recovery by a train of probes (harness/experiments/train.py), pure.

    metronome   ──┴──────┴──────┴──────┴──     its tokens are the ends of the steps
    leaver      ─────┤t0        ┊
    probe                       ┊      ├─      first token; the step before it is the hand-over
                        (gap)   free

The recovery is the probe's first token - t0. The slot came free where the step began from which the
probe got its token: that is the first token less the hand-over. How many steps a hand-over takes,
and by how much time it exceeds them, is known from controls, where a request ended by itself. The
lengths of the steps are the sample's own, so a slow step is no error. The cancel latency is
free - t0: the server was ready at some moment of the step before (`gap`), which Turnbull's
estimator places within it.

All times are readings of the client: each is late by the way from the server, which the bound
(`late_s`) of the interval allows for. A reading whose neighbours came in one burst says nothing of
steps: the stall guard drops it, after cancels and in controls alike. If another stream of the full
slots came to its own end before the slot was free, the probe may have got that one's slot: the
sample is censored at that end.

Sources: Turnbull, Journal of the Royal Statistical Society B 38 (1976), 290-295.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.figure import Figure, Figures, NotMeasurable, Sample, sampled
from harness.analysis.open_requests import QUEUED
from harness.analysis.tokens import without_tokens
from harness.metrics import CANCEL_LATENCY, CANCEL_LATENCY_STEPS, SLOT_RECOVERY
from harness.records import Metric, Outcome, Role, TrialArm
from harness.stats import Bools, Floats, Ints, clustered_mean_ci95, turnbull_median

NO_PROBES: Final = "the workload has no probes"
_PROBE_ARMS: Final = {
    SLOT_RECOVERY: TrialArm.ABANDON,
    "probe_ttft_unloaded_s": TrialArm.UNLOADED,
    "probe_ttft_control_s": TrialArm.CONTROL,
}
_BURST: Final = 0.5  # of a typical step: tokens closer than this were read together
_MOST_BLOCKS: Final = 20
_FEWEST_BLOCKS: Final = 8
_FEWEST_IN_BLOCK: Final = 5
_TOLD_APART_SD: Final = 3.0  # standard deviations between two shares of dropped readings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLatencies:
    """`latency_s` of the cancels at `t0_ns` that could be read; where `censored`, longer than that.
    `ready_low_s` to `ready_high_s`: when the server was ready. `dropped`: readings in a burst, of
    how many, after cancels and in controls. `step_s`: the typical step; None: no stream showed it.
    """

    t0_ns: Ints
    latency_s: Floats
    censored: Bools
    ready_low_s: Floats
    ready_high_s: Floats
    dropped: tuple[int, int]
    dropped_controls: tuple[int, int]
    late_s: float
    step_s: float | None

    def drops_differ(self) -> bool:
        (a, n), (b, m) = self.dropped, self.dropped_controls
        if not n or not m or not 0 < a + b < n + m:
            return False
        share = (a + b) / (n + m)
        return bool(
            abs(a / n - b / m) > _TOLD_APART_SD * np.sqrt(share * (1 - share) * (1 / n + 1 / m))
        )


def probes(requests: pd.DataFrame) -> pd.DataFrame:
    """Each probe's wait: arm, recovery_s, censored.

    unloaded: from its sending to its first token; abandon: from t0 of the stream that left;
    control: from the natural end of the request before it. Censored: no first token until it ended,
    or until a stream that filled a slot came to its own end.
    """
    every = without_tokens(requests)
    rows = every[
        ((every["role"] == Role.PROBE) & (every["arm"] != TrialArm.CONTROL)) | _controls(every)
    ]
    is_unloaded = rows["arm"] == TrialArm.UNLOADED
    since = (
        rows["reference_ns"]
        .where(~is_unloaded, rows["sent_ns"])
        .to_numpy(dtype=float, na_value=np.nan)
    )
    until = rows["first_token_ns"].fillna(rows["ended_ns"]).to_numpy(dtype=float, na_value=np.nan)
    ended = _first_own_end(every, since, until)
    is_cut = (rows["arm"] == TrialArm.ABANDON).to_numpy() & ~np.isnan(ended)
    waited = pd.DataFrame(
        {
            "arm": rows["arm"],
            "recovery_s": (np.where(is_cut, ended, until) - since) / 1e9,
            "censored": rows["first_token_ns"].isna() | is_cut,
        }
    )
    return waited[waited["recovery_s"] >= 0].reset_index(drop=True)


def probe_figures(requests: pd.DataFrame) -> Figures:
    if not (requests["role"] == Role.PROBE).any():
        return {SLOT_RECOVERY: NotMeasurable(NO_PROBES)}
    found: Figures = {}
    waited = probes(requests)
    for name, arm in _PROBE_ARMS.items():
        sample = Sample.of(waited[waited["arm"] == arm], "recovery_s")
        figure = sampled(name, sample, f"no probe of the arm `{arm}` was served", method="probe")
        found[name] = _by_blocks(figure, sample.values)
    return found


def train_of(requests: pd.DataFrame, late_s: float) -> TrainLatencies | NotMeasurable:
    rows = without_tokens(requests)
    sample_rows = rows[
        (rows["role"] == Role.PROBE)
        & (rows["arm"] == TrialArm.ABANDON)
        & rows["reference_ns"].notna()
    ].sort_values("reference_ns")
    if sample_rows.empty:
        return NotMeasurable(NO_PROBES)
    if (rows["plan"] == QUEUED).any():
        return NotMeasurable(
            "a request that leaves the queue gives no slot back: see `slot_recovery_s`"
        )
    is_control = _controls(rows)
    if not is_control.any():
        return NotMeasurable(
            "no request took over a slot that came free by itself: without this control the "
            "hand-over cannot be taken out"
        )
    steps = _Steps.of(requests)
    controls = _Readings.of(rows[is_control], steps)
    hand_over = controls.typical()
    is_served = sample_rows["first_token_ns"].notna()
    samples = _Readings.of(sample_rows[is_served], steps)
    free_ns, gap_ns = samples.less(hand_over)
    is_burst, of_controls = (one.in_burst(hand_over[0]) for one in (samples, controls))
    t0_ns, free_ns, gap_ns = (one[~is_burst] for one in (samples.since_ns, free_ns, gap_ns))
    ended_ns = _first_own_end(rows, t0_ns, free_ns + _BURST * gap_ns)
    is_cut = ~np.isnan(ended_ns)
    latency = np.maximum(np.where(is_cut, ended_ns, free_ns) - t0_ns, 0.0) / 1e9
    low = np.maximum(free_ns - gap_ns - t0_ns, 0.0) / 1e9
    never = sample_rows[~is_served]
    never_s = (never["ended_ns"] - never["reference_ns"]).to_numpy(dtype=np.float64) / 1e9
    return TrainLatencies(
        t0_ns=np.concatenate([t0_ns.astype(np.int64), never["reference_ns"].to_numpy(np.int64)]),
        latency_s=np.concatenate([latency, never_s]),
        censored=np.concatenate([is_cut, np.ones(len(never_s), bool)]),
        ready_low_s=np.concatenate([np.where(is_cut, latency, low), never_s]),
        ready_high_s=np.concatenate(
            [np.where(is_cut, np.inf, latency), np.full(len(never_s), np.inf)]
        ),
        dropped=(int(is_burst.sum()), len(is_burst)),
        dropped_controls=(int(of_controls.sum()), len(of_controls)),
        late_s=late_s,
        step_s=steps.typical_ns / 1e9 if np.isfinite(steps.typical_ns) else None,
    )


def _controls(rows: pd.DataFrame) -> pd.Series:
    """Requests that took over a slot that came free by itself. Probes among them stand only in the
    recordings of tests/golden, which are older than the first release."""
    is_known = rows["reference_ns"].notna() & rows["first_token_ns"].notna()
    return (rows["arm"] == TrialArm.CONTROL) & (rows["role"] != Role.PROBE) & is_known


def _first_own_end(rows: pd.DataFrame, since_ns: Floats, until_ns: Floats) -> Floats:
    """The first end in (since, until] of a stream that held a slot and did not leave; NaN: none."""
    is_end = rows["role"].isin((Role.FILLER, Role.METRONOME)) & ~rows["outcome"].isin(
        (Outcome.ABANDONED, Outcome.CUT_OFF)
    )
    ends = np.sort(rows.loc[is_end, "last_token_ns"].dropna().to_numpy(dtype=np.float64))
    first = np.append(ends, np.nan)[np.searchsorted(ends, since_ns, side="right")]
    return np.where(first <= until_ns, first, np.nan)


def cancel_latency(trains: Sequence[TrainLatencies], method: str) -> Figure:
    """The figure over all runs together. The interval's low end allows for the way to the
    client."""
    late_s = max(train.late_s for train in trains)
    values = np.concatenate([train.latency_s for train in trains])
    figure = _of_trains(CANCEL_LATENCY, values, trains, method)
    if isinstance(figure, NotMeasurable):
        return figure
    for name in ("mean_ci95", "p50_ci95", "p99_ci95"):
        if (limits := getattr(figure, name)) is not None:
            setattr(figure, name, (max(0.0, limits[0] - late_s), limits[1]))
    low = np.concatenate([train.ready_low_s for train in trains])
    high = np.concatenate([train.ready_high_s for train in trains])
    if (ready_s := turnbull_median(low, high)) is not None:
        figure.others["ready_p50"] = ready_s
    return figure


def cancel_latency_steps(trains: Sequence[TrainLatencies], method: str) -> Figure:
    """The same figure in typical steps of each run."""
    known = [(train, train.step_s) for train in trains if train.step_s]
    if len(known) < len(trains):
        return NotMeasurable("no stream showed the steps of the server meanwhile")
    values = np.concatenate([train.latency_s / step_s for train, step_s in known])
    return _of_trains(CANCEL_LATENCY_STEPS, values, trains, method)


def _of_trains(name: str, values: Floats, trains: Sequence[TrainLatencies], method: str) -> Figure:
    sample = Sample(values=values, censored=np.concatenate([train.censored for train in trains]))
    why = "every reading of the train was dropped: its tokens came in bursts"
    return _by_blocks(sampled(name, sample, why, method=method), values)


def _by_blocks(figure: Figure, values: Floats) -> Figure:
    """Neighbouring cycles depend on each other, so the interval takes each block of them for one
    value. With too few blocks it stays that of single cycles, which then says more."""
    blocks = min(_MOST_BLOCKS, len(values) // _FEWEST_IN_BLOCK)
    if isinstance(figure, Metric) and not figure.n_censored and blocks >= _FEWEST_BLOCKS:
        sizes = [len(block) for block in np.array_split(values, blocks)]
        figure.mean_ci95 = clustered_mean_ci95(values, np.array(sizes, dtype=np.int64))
    return figure


@dataclass(frozen=True, slots=True)
class _Steps:
    """The metronomes' tokens: the ends of the steps, as they were read."""

    read_ns: Floats
    typical_ns: float

    @classmethod
    def of(cls, requests: pd.DataFrame) -> "_Steps":
        """Where two metronomes overlap, the earlier one counts until its end."""
        metronomes = requests[requests["role"] == Role.METRONOME].sort_values("sent_ns")
        parts, until = [np.empty(0)], -np.inf
        for times in metronomes["token_times_ns"]:
            read = np.asarray(times, dtype=np.float64)
            parts.append(read[read > until])
            until = max(until, read[-1]) if len(read) else until
        read_ns = np.concatenate(parts)
        gaps = np.diff(read_ns)
        return cls(read_ns, float(np.median(gaps)) if len(gaps) else np.nan)

    def nearest(self, t_ns: Floats) -> Ints:
        after = np.searchsorted(self.read_ns, t_ns).clip(1, len(self.read_ns) - 1)
        is_before = t_ns - self.read_ns[after - 1] < self.read_ns[after] - t_ns
        return np.asarray(after - is_before, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Readings:
    """First tokens, and the steps before them. Without a metronome (one slot) they have none."""

    steps: _Steps
    since_ns: Floats
    first_ns: Floats

    @classmethod
    def of(cls, rows: pd.DataFrame, steps: _Steps) -> "_Readings":
        since, first = (
            rows[name].astype(np.float64) for name in ("reference_ns", "first_token_ns")
        )
        return cls(steps, np.asarray(since), np.asarray(first))

    @property
    def has_steps(self) -> bool:
        return len(self.steps.read_ns) > 2

    def in_burst(self, number: int) -> Bools:
        """Two neighbours were read together of the steps from the hand-over's begin, `number`
        steps before the first token, to the step after it."""
        if not self.has_steps:
            return np.zeros(len(self.first_ns), dtype=bool)
        is_short = np.diff(self.steps.read_ns) < _BURST * self.steps.typical_ns
        ends = self.steps.nearest(self.first_ns)
        after = [(ends + i).clip(0, len(is_short) - 1) for i in range(-number, 1)]
        return np.asarray(is_short[after].any(axis=0), dtype=bool)

    def typical(self) -> tuple[int, float]:
        """How many steps a hand-over takes, by the controls, and how much time beyond these. The
        median of their counts may be no control's (1 and 3): the nearest one that occurs."""
        took = self.first_ns - self.since_ns
        if not self.has_steps:
            return 0, float(np.median(took))
        is_burst = self.in_burst(1)
        keep = ~is_burst if not is_burst.all() else np.ones(len(self.first_ns), bool)
        first = self.steps.nearest(self.first_ns)
        counts = np.maximum(first - self.steps.nearest(self.since_ns), 1)
        middle = round(float(np.median(counts[keep])))
        number = int(min(counts[keep], key=lambda count: abs(count - middle)))
        spans = self.steps.read_ns[first] - self.steps.read_ns[(first - number).clip(0)]
        return number, float(np.median((took - spans)[keep & (counts == number)]))

    def less(self, hand_over: tuple[int, float]) -> tuple[Floats, Floats]:
        """The times at which the slots came free, and the lengths of the steps before that (ns)."""
        number, beyond = hand_over
        if not self.has_steps:
            free = self.first_ns - beyond
            return free, np.full(len(free), beyond)
        ends = self.steps.nearest(self.first_ns)
        began = (ends - number).clip(1)
        spans = self.steps.read_ns[ends] - self.steps.read_ns[began]
        gaps = self.steps.read_ns[began] - self.steps.read_ns[began - 1]
        return self.first_ns - spans - beyond, gaps
