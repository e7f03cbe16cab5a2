"""The figures of cancellation as they are seen from outside, each by every method that can.

They take what clients, metrics pages and probes told, never the bundled engine's own logs. Where
those exist, the exact figure keeps its place and these stand beside it, to be compared.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from scipy import stats

from harness.analysis.attributed import by_gauge, by_rest, role_that_rests
from harness.analysis.balance import as_figure, delay_of_aborts, held_for_nobody, unread_tokens
from harness.analysis.counters import wasted_by_counter, with_other
from harness.analysis.facts import Facts
from harness.analysis.figure import Figure, Figures, NotMeasurable, rate
from harness.analysis.frames import RunFrames
from harness.analysis.held_open import held_open
from harness.analysis.scraped import typical_step_s, why_no_lag
from harness.records import Metric

FEWEST_TOLD: Final = 0.1  # of those who left: fewer that could be told apart stand for nobody
FEWEST_LOOPS: Final = 4  # idle readings after so many loops give a slope an interval
_UNITS: Final = {
    "slots": ("running", 1),
    "blocks": ("free_blocks", -1),
    "kv_share": ("kv_usage", 1),
}

Methods = dict[str, Figure]


def latency_methods(frames: RunFrames, facts: Facts) -> Methods:
    """The mean cancel latency by totals, and that of single requests where they stood alone.

    The first that can be measured is the figure of a run without exact logs: one with a mean or a
    median, as long as it is of most of those who left.
    """
    found = {
        "counter": as_figure(delay_of_aborts(frames, facts), "counter", facts),
        "gauge": as_figure(held_for_nobody(frames, facts), "gauge", facts),
        "gauge_attributed": by_gauge(frames, facts),
        "counter_attributed": by_rest(frames, facts),
    }
    role_of = {
        "counter": "aborted",
        "gauge": "running",
        "gauge_attributed": "running",
        "counter_attributed": role_that_rests(facts),
    }
    for name, role in role_of.items():
        why = None if role is None else why_no_lag(frames, facts, role)
        if isinstance(found[name], Metric) and why is not None:
            found[name] = NotMeasurable(why)
    n_left = held_open(frames.requests).n_left
    found = {name: _unless_of_few(one, n_left) for name, one in found.items()}
    return dict(sorted(found.items(), key=lambda pair: _is_second_choice(pair[1], n_left)))


def _unless_of_few(figure: Figure, n_left: int) -> Figure:
    if not isinstance(figure, Metric) or figure.n >= FEWEST_TOLD * n_left:
        return figure
    return NotMeasurable(
        f"by {figure.method} only {figure.n} of {n_left} who left could be told from the others: "
        "too few to stand for them"
    )


def _is_second_choice(figure: Figure, n_left: int) -> bool:
    """Neither mean nor median is known, or only of the few who left at quiet moments."""
    if not isinstance(figure, Metric):
        return False
    return (figure.mean is None and figure.p50 is None) or 2 * figure.n <= n_left


def ghosts_by_gauge(frames: RunFrames, facts: Facts) -> Figure:
    """(running + waiting, idle after the settle time - before) / requests that were left.

    A lower bound: a ghost that ended by itself before the settle time was over is not seen. Of a
    slot that is lost and used by nobody the gauge says the same; `others.still_generating` tells
    them apart: tokens counted after the settle time, while nobody asked for any.
    """
    n = held_open(frames.requests).n_left
    if not n:
        return NotMeasurable("no request was left before its end")
    changes = [facts.idle_change(role) for role in ("running", "waiting")]
    if changes[0] is None or facts.trust.get("running") == "stuck":
        return NotMeasurable(f"{facts.engine}'s running requests were not read when it was idle")
    there = sum(change for change in changes if change is not None)
    metric = rate(int(np.clip(round(there), 0, n)), n, method="gauge")
    metric.bound = "lower"
    going_on = facts.generated_later
    if going_on or (going_on is not None and facts.still_computing is False):
        metric.others["still_generating"] = going_on
    return metric


def waste_by_counter(frames: RunFrames, facts: Facts, latency: Metric | None) -> Figure:
    """The counter's waste with an interval by blocks of time, and beside it an upper bound.

    upper = mean cancel latency (its interval's end, and what old pages may hide) / step + 2: one
    token a step as long as it was held, one in the step during which its user left, one on the way.
    """
    figure = wasted_by_counter(frames.requests, facts)
    if isinstance(figure, NotMeasurable):
        return figure
    blocks = unread_tokens(frames, facts)
    if not isinstance(blocks, NotMeasurable):
        figure.mean_ci95 = blocks.metric(unit="tokens", method="counter").mean_ci95
    step_s = typical_step_s(frames)
    most_s = None if latency is None else _longest_mean(latency)
    if latency is not None and most_s is not None and step_s:
        figure.others["upper"] = Metric(
            unit="tokens",
            n=figure.n,
            mean=max(0.0, most_s) / step_s + 2,
            method=latency.method,
            bound="upper",
        )
    return figure


def _longest_mean(latency: Metric) -> float | None:
    if latency.mean is None:
        return latency.upper95
    bias_low: float = latency.others.get("bias_low", 0.0)
    return (latency.mean_ci95 or (0.0, latency.mean))[1] - bias_low


def leak_slopes(frames: RunFrames, facts: Facts) -> Figures:
    """What is missing more from the idle gauges with each request that is left, over the loops.

    Theil and Sen's slope: the median of the slopes between all pairs of idle readings, with Sen's
    interval; one odd reading does not move it. Source: Sen, JASA 63 (1968), 1379-1389.
    """
    return {f"leaked_{noun}_per_abandon": _slope(frames, facts, noun) for noun in _UNITS}


def with_methods(figure: Figure, methods: Mapping[str, Figure]) -> Figure:
    """The figure with every other method that gave one beside it, by name; where none did, why each
    of them could not."""
    for name, other in methods.items():
        figure = other if _is_better(figure, other) else with_other(figure, name, other)
    if isinstance(figure, NotMeasurable):
        missing = [one for one in (figure, *methods.values()) if isinstance(one, NotMeasurable)]
        return NotMeasurable("; ".join(dict.fromkeys(one.reason for one in missing)))
    return figure


def _is_better(figure: Figure, other: Figure) -> bool:
    """A reason why it cannot be measured gives way to a figure, and to nothing else."""
    return isinstance(figure, NotMeasurable) and isinstance(other, Metric)


def _slope(frames: RunFrames, facts: Facts, noun: str) -> Figure:
    role, sign = _UNITS[noun]
    readings = [(t_ns, values[role]) for t_ns, values in facts.idle_loops if role in values]
    if role not in facts.idle_before:
        return NotMeasurable(f"{facts.engine} does not tell its {role.replace('_', ' ')}")
    if len(readings) < FEWEST_LOOPS:
        return NotMeasurable(
            f"not enough data for a slope: {len(readings)} idle readings, and {FEWEST_LOOPS} are "
            "needed (`run.loops`)"
        )
    left = held_open(frames.requests).left_by(np.array([t_ns for t_ns, _ in readings]))
    lost = [sign * (value - facts.idle_before[role]) for _, value in readings]
    x, y = np.append(0, left).astype(float), np.append(0.0, lost)
    if len(np.unique(x)) < len(x):
        return NotMeasurable("in one of the loops nobody left")
    slope, _, low, high = stats.theilslopes(y, x, alpha=0.95)
    return Metric(
        unit="ratio" if noun == "kv_share" else noun,
        n=len(readings),
        mean=float(slope) + 0.0,
        mean_ci95=(float(low), float(high)),
        method="gauge",
    )
