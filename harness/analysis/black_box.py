"""The figures of cancellation as seen from outside, each by every method that can measure it.

Where exact logs exist, the exact figure keeps its place, and these figures stand next to it. Over
several runs sums are added up, never means, and a method counts only if every run has it.

At most two methods a figure, the better one first: a train of probes or occupancy, which see the
slots themselves but need a workload of their own, or a probe phase after the load, then the gauges,
which work under any load. A ghost that came to its natural end before the settle time was over is
not seen by the gauge.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import pandas as pd

from harness.analysis.counters import wasted_by_counter, wasted_in_all
from harness.analysis.figure import Figure, NotMeasurable, with_other
from harness.analysis.littles_law import (
    Balance,
    as_figure,
    held_after_leaving,
    pooled,
    unread_tokens,
)
from harness.analysis.occupancy import NO_ROUNDS, RoundTotals, ghost_rate_of, rounds_of
from harness.analysis.open_requests import LEFT, is_unopened, num_abandoned, open_in_run
from harness.analysis.probe_train import (
    NO_PROBES,
    TrainLatencies,
    cancel_latency,
    cancel_latency_steps,
    train_of,
)
from harness.analysis.run_facts import RunFacts
from harness.analysis.scraped import typical_step_s, why_no_lag
from harness.analysis.tokens import tokens_read, without_tokens
from harness.metrics import CANCEL_LATENCY, CANCEL_LATENCY_STEPS, GHOST_RATE
from harness.records import Metric
from harness.store.frames import RunFrames

_LATE_SHARE: Final = 0.9  # of the client's own lag


@dataclass(frozen=True, slots=True, kw_only=True)
class Ghosts:
    """At least `low` of the `n` requests that were left kept running.

    `lost_slots`: slots held by no request; None where they may be ghosts instead.
    `still_generating`: tokens counted after the settle time, when no client waits for any.
    """

    n: int
    low: int
    lost_slots: int | None = 0
    still_generating: float | None = None


def ghosts_by_gauge(frames: RunFrames, facts: RunFacts) -> Ghosts | NotMeasurable:
    """(running + waiting, idle after the settle time - before), of the requests that were left.

    The gauge counts a lost slot like a ghost. If the server is known to compute nothing any more,
    all of them are lost slots; else they may be.
    """
    left, there = _left(frames), facts.still_there
    n = len(left)
    if there is None:
        return NotMeasurable(f"{facts.engine}'s running requests were not read when it was idle")
    is_at_rest, there = facts.still_computing is False, int(np.clip(round(there), 0, n))
    lost = there if is_at_rest else None
    # A ghost surely outlasts the settle time only if it has twice that time left to generate.
    lasting = int((left["time_left_s"] >= 2 * facts.settle_s).sum())
    is_known = left["time_left_s"].notna().all() and np.isfinite(facts.settle_s)
    if there == (lost or 0) and is_known and 2 * lasting < n:
        return NotMeasurable(
            f"no ghost was there after the settle time, but only {lasting} of {n} requests left "
            f"had twice that time ({facts.settle_s:g} s) left to run: a ghost among the others "
            "would have ended by itself"
        )
    going_on = facts.generated_later
    return Ghosts(
        n=n,
        low=there - (lost or 0),
        lost_slots=lost if there else 0,
        still_generating=going_on if going_on or is_at_rest else None,
    )


def _left(frames: RunFrames) -> pd.DataFrame:
    """The requests that their clients left, one row for each answer that they asked for.

    `time_left_s`: how long it would have kept running at the pace of a typical step (NaN if no step
    was seen).
    """
    read = pd.Series(tokens_read(frames.requests), index=frames.requests.index)
    rows = without_tokens(frames.requests)
    step_s = typical_step_s(frames)
    to_come = rows["max_tokens"] - read / rows["n"]
    found = pd.DataFrame({"time_left_s": to_come * (np.nan if step_s is None else step_s)})
    is_left = rows["outcome"].isin(LEFT) & ~is_unopened(rows)
    return found[is_left].loc[found.index[is_left].repeat(rows.loc[is_left, "n"])]


def ghost_rate(found: Sequence[Ghosts], method: str) -> Metric:
    """The share of requests left that kept running, of one run or of several: a lower bound, since
    ghosts may have ended before the gauge was read."""
    n, low = sum(one.n for one in found), sum(one.low for one in found)
    figure = Metric(unit="ratio", n=n, mean=low / n, method=method, bound="lower")
    going_on = [one.still_generating for one in found if one.still_generating is not None]
    if going_on:
        figure.others["still_generating"] = sum(going_on)
    if any(one.lost_slots is None for one in found):
        figure.of = "ghosts or lost slots"
    elif lost := sum(one.lost_slots or 0 for one in found):
        figure.others["lost_slots"] = float(lost)
    return figure


Methods = dict[str, Figure]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The figures that one run showed from outside, by method.

    `num_left`: answers whose clients went away before the end, for any reason; `num_abandoned`:
    requests left on purpose; `waste`: see `wasted_by_counter`, and `unread` the same by blocks of
    time; `step_s`: the typical step.
    """

    num_left: int
    num_abandoned: int
    train: TrainLatencies | NotMeasurable
    rounds: RoundTotals | NotMeasurable
    total: Balance | NotMeasurable
    ghosts: Ghosts | NotMeasurable
    waste: Metric | NotMeasurable
    unread: Balance | NotMeasurable
    step_s: float | None


def seen_from_outside(frames: RunFrames, facts: RunFacts) -> Outside:
    why = why_no_lag(frames, facts, "running")
    is_exact = facts.lacks("lifecycle") is None  # probes of another load would add nothing
    return Outside(
        num_left=open_in_run(frames).n_left,
        num_abandoned=num_abandoned(frames.requests),
        train=train_of(frames.requests if is_exact else frames.probes, late_s=_lateness_s(frames)),
        rounds=rounds_of(frames.requests),
        total=held_after_leaving(frames, facts) if why is None else NotMeasurable(why),
        ghosts=ghosts_by_gauge(frames, facts),
        waste=wasted_by_counter(frames.requests, facts),
        unread=unread_tokens(frames, facts),
        step_s=typical_step_s(frames),
    )


def _lateness_s(frames: RunFrames) -> float:
    """The time by which the client reads what has come later than it could, but seldom more."""
    lag_ns = frames.client["lag_ns"]
    return 0.0 if lag_ns.empty else float(lag_ns.quantile(_LATE_SHARE)) / 1e9


def figures_from_outside(runs: Sequence[Outside]) -> dict[str, Methods]:
    """Cancel latency, ghost rate and waste by each method, the best first; of all runs together.

    Totals cannot say why a client went away. Without a single abandon they cover only requests that
    the run cut off as it ended, so there is no figure.
    """
    runs = [run for run in runs if run.num_left]
    if not any(run.num_abandoned for run in runs):
        return {name: {} for name in (CANCEL_LATENCY, GHOST_RATE, "wasted_tokens")}
    latency = {
        **_by_probes([run.train for run in runs], cancel_latency, NO_PROBES),
        "gauge": _of_all([run.total for run in runs], _mean_latency, "gauge"),
    }
    ghosts = {
        **_by_probes([run.rounds for run in runs], ghost_rate_of, NO_ROUNDS),
        "gauge": _of_all([run.ghosts for run in runs], ghost_rate, "gauge"),
    }
    best = next((one for one in latency.values() if isinstance(one, Metric)), None)
    return {
        CANCEL_LATENCY: latency,
        CANCEL_LATENCY_STEPS: _by_probes(
            [run.train for run in runs], cancel_latency_steps, NO_PROBES
        ),
        GHOST_RATE: ghosts,
        "wasted_tokens": _waste_by_method(runs, best),
    }


def _waste_by_method(runs: Sequence[Outside], latency: Metric | None) -> Methods:
    counted = waste_by_counter(runs, latency)
    if isinstance(counted, Metric) or latency is None or latency.method != "probe":
        return {"counter": counted}
    most = _most_wasted(runs, latency, sum(run.num_left for run in runs))
    return {"counter": counted} if most is None else {"counter": counted, "probe": most}


def _by_probes(
    found: Sequence[T | NotMeasurable], figure_of: Callable[[Sequence[T], str], Figure], none: str
) -> Methods:
    if all(isinstance(one, NotMeasurable) and one.reason == none for one in found):
        return {}
    return {"probe": _of_all(found, figure_of, "probe")}


def _mean_latency(found: Sequence[Balance], method: str) -> Figure:
    return as_figure(pooled(found), method)


def _of_all(
    found: Sequence[T | NotMeasurable], figure_of: Callable[[Sequence[T], str], Figure], method: str
) -> Figure:
    known = []
    for one in found:
        if isinstance(one, NotMeasurable):
            return one
        known.append(one)
    return figure_of(known, method)


def waste_by_counter(runs: Sequence[Outside], latency: Metric | None) -> Figure:
    """The counter's waste with an interval by blocks of time, and an upper bound.

    A latency that is itself a lower bound limits nothing while the server may still compute for
    users who left.
    """
    figure = _of_all([run.waste for run in runs], wasted_in_all, "counter")
    if isinstance(figure, NotMeasurable):
        return figure
    unread = [run.unread for run in runs if isinstance(run.unread, Balance)]
    if len(unread) == len(runs):
        limits = pooled(unread).by_chance()
        figure.mean_ci95 = None if limits is None else (max(0.0, limits[0]), limits[1])
    is_open = latency is not None and (latency.bound, figure.bound) == ("lower", "lower")
    most = None if latency is None or is_open else _most_wasted(runs, latency, figure.n)
    if most is not None:
        figure.others["upper"] = most
    return figure


def _most_wasted(runs: Sequence[Outside], latency: Metric, n: int) -> Metric | None:
    """An answer wastes at most mean cancel latency (its interval's end) / step + 2 tokens: one a
    step while it was held, one in the step during which its user left, one on the way."""
    steps, most_s = [run.step_s for run in runs if run.step_s], _longest_mean(latency)
    if most_s is None or not steps:
        return None
    answers = sum(run.num_left for run in runs) / n
    return Metric(
        unit="tokens",
        n=n,
        mean=answers * (max(0.0, most_s) / float(np.median(steps)) + 2),
        method=latency.method,
        bound="upper",
    )


def _longest_mean(latency: Metric) -> float | None:
    if latency.mean is None:
        return latency.upper95
    bias_low: float = latency.others.get("bias_low", 0.0)
    return latency.mean - bias_low if latency.mean_ci95 is None else latency.mean_ci95[1]


def with_methods(figure: Figure, methods: Mapping[str, Figure]) -> Figure:
    reasons = [one.reason for one in (figure, *methods.values()) if isinstance(one, NotMeasurable)]
    for name, other in methods.items():
        figure = with_other(figure, name, other)
    if isinstance(figure, NotMeasurable):
        return NotMeasurable("; ".join(dict.fromkeys(reasons)))
    return figure
