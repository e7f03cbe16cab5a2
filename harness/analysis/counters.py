"""Figures from idle gauges and counters, for servers that show nothing else.

Differences are between two moments at which nothing runs, before the load and after the settle
time, so that a counter which moves late has moved. The target's description of its metrics says how
far each figure can be believed.
"""

from collections.abc import Sequence
from typing import Final

import pandas as pd

from harness.analysis.cancel import NOBODY_LEFT
from harness.analysis.facts import Facts
from harness.analysis.figure import Figure, Figures, NotMeasurable, reading
from harness.analysis.open_requests import LEFT, num_abandoned
from harness.analysis.tokens import prompt_total, tokens_read
from harness.records import Metric, Outcome

_NOUNS: Final = {"running": "running requests"}
_ROUNDING: Final = 1e-9  # of a gauge that is a share


def leak_figures(facts: Facts) -> Figures:
    """leaked_slots = running after - running before; leaked_blocks = free before - free after.

    leaked_kv_share = share in use after - before, for a server that shows no blocks. Its
    leaked_blocks is that share of all blocks, rounded, if their number is known.
    """
    figures = {
        "leaked_slots": _idle_figure(facts, "running", unit="slots", sign=1),
        "leaked_blocks": _idle_figure(facts, "free_blocks", unit="blocks", sign=-1),
    }
    if isinstance(figures["leaked_blocks"], NotMeasurable):
        share = figures["leaked_kv_share"] = _idle_figure(facts, "kv_usage", unit="ratio", sign=1)
        if isinstance(share, Metric) and share.mean is not None and facts.num_blocks is not None:
            blocks = round(share.mean * facts.num_blocks)
            figures["leaked_blocks"] = reading(
                blocks, unit="blocks", method=share.method, bound=share.bound
            )
    return figures


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
    """Tokens generated and not read, per request that its client left before the end.

    total = (generated-token counter, idle after - idle before) - tokens that all clients read; mean
    = total / requests left. Requests left are the abandoned ones and those cut off or timed out:
    the counter cannot tell these apart. `others` holds the total, and how many were cut off. A
    counter that moved by less than was read says nothing about waste.
    """
    generated = facts.idle_change("generated_tokens")
    if generated is None:
        return NotMeasurable(_why_unknown(facts, "generated_tokens"))
    if facts.trust.get("generated_tokens") == "stuck":
        return NotMeasurable(_why_stuck(facts, "generated_tokens"))
    n = int(requests["outcome"].isin(LEFT).sum())
    if not n:
        return NotMeasurable("no request was left before its end")
    cut_off = int((requests["outcome"] == Outcome.CUT_OFF).sum())
    read = float(tokens_read(requests).sum())
    if generated < read:
        return NotMeasurable(
            f"{facts.metric_names['generated_tokens']} moved by {generated:g}, less than the "
            f"{read:g} tokens that clients read"
        )
    # An abandoned request is still being served: there will be more.
    bound = "lower" if facts.still_computing else _bound(facts, "generated_tokens")
    total = generated - read
    metric = reading(total / n, unit="tokens", method="counter", n=n, bound=bound)
    metric.others = {"total_tokens": total, "generated_tokens": generated, "cut_off": cut_off}
    return metric


def wasted_in_all(found: Sequence[Metric], method: str) -> Metric:
    """Several runs together: their totals and requests are added up."""
    n = sum(one.n for one in found)
    others = {name: sum(one.others[name] for one in found) for name in found[0].others}
    bound = "lower" if any(one.bound == "lower" for one in found) else "point"
    metric = reading(others["total_tokens"] / n, unit="tokens", method=method, n=n, bound=bound)
    metric.others = others
    return metric


def wasted_prompts_by_counter(requests: pd.DataFrame, facts: Facts) -> Figure:
    """Prompt tokens computed for each request that was left before its first token.

    total = (prompt-token counter, idle after - before) - prompt tokens of all requests with a first
    token. `prompt_total` estimates those without a usage, with an interval. `others` holds the
    total.
    """
    computed = facts.idle_change("prompt_tokens")
    if computed is None:
        return NotMeasurable(_why_unknown(facts, "prompt_tokens"))
    if facts.trust.get("prompt_tokens") == "stuck":
        return NotMeasurable(_why_stuck(facts, "prompt_tokens"))
    if not num_abandoned(requests):
        return NotMeasurable(NOBODY_LEFT)
    has_token = requests["first_token_ns"].notna()
    n = int((requests["outcome"].isin(LEFT) & ~has_token).sum())
    if not n:
        return NotMeasurable("nobody left before a first token")
    if (requests["n"] > 1).any():
        return NotMeasurable("a prompt may be counted for each of several answers to it")
    due = prompt_total(requests, has_token.to_numpy(dtype=bool))
    if due is None:
        return NotMeasurable("too few prompts have a known length")
    total, spread = computed - due[0], due[1]
    if total + spread < 0:
        return NotMeasurable(
            f"{facts.metric_names['prompt_tokens']} moved by {computed:g}, less than the prompts "
            f"of requests with an answer ({due[0]:g} tokens)"
        )
    bound = "lower" if facts.still_computing else _bound(facts, "prompt_tokens")
    metric = reading(total / n, unit="tokens", method="counter", n=n, bound=bound)
    if spread:
        metric.mean_ci95 = (total - spread) / n, (total + spread) / n
    metric.others = {"total_tokens": total, "prompt_tokens": computed}
    return metric


def _idle_figure(facts: Facts, role: str, *, unit: str, sign: int) -> Figure:
    change = facts.idle_change(role)
    if change is None:
        return NotMeasurable(_why_unknown(facts, role))
    if facts.trust.get(role) == "stuck":
        return NotMeasurable(_why_stuck(facts, role))
    method = "gauge" if role in ("running", "free_blocks", "kv_usage") else "counter"
    missing = 0.0 if abs(change) < _ROUNDING else sign * change
    if missing < 0:
        return NotMeasurable(_why_negative(facts, role))
    return reading(missing, unit=unit, method=method, bound=_bound(facts, role))


def _bound(facts: Facts, role: str) -> str:
    trust = facts.trust.get(role, "exact")
    is_idle = not facts.idle_change("running")
    return "lower" if trust == "lower" or (trust == "exact_when_idle" and not is_idle) else "point"


def _why_unknown(facts: Facts, role: str) -> str:
    noun = _NOUNS.get(role, role.replace("_", " "))
    if role not in facts.metric_names:
        return f"{facts.engine} does not show its {noun}"
    return f"{facts.metric_names[role]} was not read before the load and after the settle time"


def _why_negative(facts: Facts, role: str) -> str:
    before, after = facts.idle_before[role], facts.idle_after[role]
    return (
        f"{facts.metric_names.get(role, role)} was {before:g} before the load and {after:g} after "
        "it: the server had other users before, or it was started anew"
    )


def _why_stuck(facts: Facts, role: str) -> str:
    return f"{facts.engine}'s {facts.metric_names[role]} never moves"


def with_other(figure: Figure, name: str, other: Figure) -> Figure:
    """The figure with another method's value beside it, or that value if there is no figure."""
    if isinstance(figure, NotMeasurable):
        return other if isinstance(other, Metric) else figure
    if isinstance(other, Metric):
        figure.others[name] = other
    return figure
