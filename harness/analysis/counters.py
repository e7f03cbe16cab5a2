"""What idle gauges and counters tell: the figures of servers that show nothing else.

Differences are between two moments at which nothing runs, before the load and after the settle
time, so that a counter which moves late has moved. How far a figure can be believed follows from
the target's description of its metrics.
"""

from typing import Final

import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import Figure, Figures, NotMeasurable, reading
from harness.analysis.tokens import tokens_read
from harness.records import Metric, Outcome

_NOUNS: Final = {"running": "running requests"}


def leak_figures(facts: Facts) -> Figures:
    """leaked_slots = running after - running before; leaked_blocks = free before - free after."""
    return {
        "leaked_slots": _idle_figure(facts, "running", unit="slots", sign=1),
        "leaked_blocks": _idle_figure(facts, "free_blocks", unit="blocks", sign=-1),
    }


def count_figures(lifecycle: pd.DataFrame, facts: Facts) -> Figures:
    """preemptions: events in the lifecycle log, else counter after - counter before;
    recomputed_tokens: counter after - counter before.
    """
    preemptions = _idle_figure(facts, "preemptions", unit="preemptions", sign=1)
    if facts.has_lifecycle:
        seen = int((lifecycle["event"] == "preempted").sum())
        exact = reading(seen, unit="preemptions", method="exact")
        preemptions = with_other(exact, "counter", preemptions)
    return {
        "preemptions": preemptions,
        "recomputed_tokens": _idle_figure(facts, "recomputed_tokens", unit="tokens", sign=1),
    }


def wasted_by_counter(requests: pd.DataFrame, facts: Facts) -> Figure:
    """Tokens generated for nobody, per request that its client left before the end.

    total = (generated-token counter, idle after - idle before) - tokens that all clients read;
    mean = total / requests left. Left are the abandoned ones, and those that were cut off or timed
    out: the counter cannot tell these apart. `others` holds the total.
    """
    generated = facts.idle_change("generated_tokens")
    if generated is None:
        return NotMeasurable(_why_unknown(facts, "generated_tokens"))
    if facts.trust.get("generated_tokens") == "stuck":
        return NotMeasurable(_why_stuck(facts, "generated_tokens"))
    left = requests["outcome"].isin([Outcome.ABANDONED, Outcome.CUT_OFF, Outcome.TIMED_OUT])
    n = int(left.sum())
    if not n:
        return NotMeasurable("no request was left before its end")
    total = generated - float(tokens_read(requests).sum())
    metric = reading(
        total / n, unit="tokens", method="counter", n=n, bound=_bound(facts, "generated_tokens")
    )
    metric.others = {"total_tokens": total, "generated_tokens": generated}
    return metric


def _idle_figure(facts: Facts, role: str, *, unit: str, sign: int) -> Figure:
    change = facts.idle_change(role)
    if change is None:
        return NotMeasurable(_why_unknown(facts, role))
    if facts.trust.get(role) == "stuck":
        return NotMeasurable(_why_stuck(facts, role))
    method = "gauge" if role in ("running", "free_blocks") else "counter"
    # Adding 0.0 makes a negative zero a plain one.
    return reading(sign * change + 0.0, unit=unit, method=method, bound=_bound(facts, role))


def _bound(facts: Facts, role: str) -> str:
    trust = facts.trust.get(role, "exact")
    is_idle = not facts.idle_change("running")
    return "lower" if trust == "lower" or (trust == "exact_when_idle" and not is_idle) else "point"


def _why_unknown(facts: Facts, role: str) -> str:
    noun = _NOUNS.get(role, role.replace("_", " "))
    if role not in facts.metric_names:
        return f"{facts.engine} does not tell its {noun}"
    return f"{facts.metric_names[role]} was not read before the load and after the settle time"


def _why_stuck(facts: Facts, role: str) -> str:
    return f"{facts.engine}'s {facts.metric_names[role]} does not move, whatever happens"


def with_other(figure: Figure, name: str, other: Figure) -> Figure:
    """The figure with the same quantity by another method beside it; that one, if there is none."""
    if isinstance(figure, NotMeasurable):
        return other if isinstance(other, Metric) else figure
    if isinstance(other, Metric):
        figure.others[name] = other
    return figure
