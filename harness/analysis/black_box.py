"""The figures of cancellation as seen from outside, each by every method that can measure it.

Where exact logs exist, the exact figure keeps its place and these stand beside it. Over several
runs sums are added up, never means, and a method counts only if every run has it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from harness.analysis.counters import wasted_by_counter, wasted_in_all
from harness.analysis.facts import Facts
from harness.analysis.figure import Figure, NotMeasurable, with_other
from harness.analysis.ghosts import (
    Ghosts,
    best_first,
    ghost_rate,
    ghosts_by_counter,
    ghosts_by_gauge,
)
from harness.analysis.littles_law import (
    Balance,
    as_figure,
    delay_of_aborts,
    held_after_leaving,
    pooled,
    unread_tokens,
)
from harness.analysis.open_requests import num_abandoned, open_in_run
from harness.analysis.scraped import typical_step_s, why_no_lag
from harness.metrics import CANCEL_LATENCY
from harness.records import Metric
from harness.store.frames import RunFrames

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
    totals: Mapping[str, Balance | NotMeasurable]
    ghosts: Mapping[str, Ghosts | NotMeasurable]
    waste: Metric | NotMeasurable
    unread: Balance | NotMeasurable
    step_s: float | None


def seen_from_outside(frames: RunFrames, facts: Facts) -> Outside:
    totals = {"counter": delay_of_aborts(frames, facts), "gauge": held_after_leaving(frames, facts)}
    for method, role in (("counter", "aborted"), ("gauge", "running")):
        if (why := why_no_lag(frames, facts, role)) is not None:
            totals[method] = NotMeasurable(why)
    return Outside(
        num_left=open_in_run(frames).n_left,
        num_abandoned=num_abandoned(frames.requests),
        totals=totals,
        ghosts={
            "counter": ghosts_by_counter(frames, facts),
            "gauge": ghosts_by_gauge(frames, facts),
        },
        waste=wasted_by_counter(frames.requests, facts),
        unread=unread_tokens(frames, facts),
        step_s=typical_step_s(frames),
    )


def figures_from_outside(runs: Sequence[Outside]) -> dict[str, Methods]:
    """Cancel latency, ghost rate and waste by each method, the best first; of all runs together.

    Totals cannot say why a client went away. Without a single abandon they cover only requests that
    the run cut off as it ended, so there is no figure.
    """
    runs = [run for run in runs if run.num_left]
    if not any(run.num_abandoned for run in runs):
        return {name: {} for name in (CANCEL_LATENCY, "ghost_rate", "wasted_tokens")}
    latency = best_first(
        {
            method: _of_all([run.totals[method] for run in runs], _mean_latency, method)
            for method in runs[0].totals
        }
    )
    ghosts = {
        method: _of_all([run.ghosts[method] for run in runs], ghost_rate, method)
        for method in runs[0].ghosts
    }
    best = next((one for one in latency.values() if isinstance(one, Metric)), None)
    return {
        CANCEL_LATENCY: latency,
        "ghost_rate": best_first(ghosts),
        "wasted_tokens": {"counter": waste_by_counter(runs, best)},
    }


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
    """The counter's waste with an interval by blocks of time, and beside it an upper bound.

    upper = for each answer mean cancel latency (its interval's end) / step + 2: one token a step as
    long as it was held, one in the step during which its user left, one on the way.
    """
    figure = _of_all([run.waste for run in runs], wasted_in_all, "counter")
    if isinstance(figure, NotMeasurable):
        return figure
    unread = [run.unread for run in runs if isinstance(run.unread, Balance)]
    if len(unread) == len(runs):
        limits = pooled(unread).by_chance()
        figure.mean_ci95 = None if limits is None else (max(0.0, limits[0]), limits[1])
    steps = [run.step_s for run in runs if run.step_s]
    most_s = None if latency is None else _longest_mean(latency)
    if latency is not None and most_s is not None and steps:
        answers = sum(run.num_left for run in runs) / figure.n
        figure.others["upper"] = Metric(
            unit="tokens",
            n=figure.n,
            mean=answers * (max(0.0, most_s) / float(np.median(steps)) + 2),
            method=latency.method,
            bound="upper",
        )
    return figure


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
