"""Figures from idle gauges and counters, for servers that show nothing else.

Differences are between two moments at which nothing runs, before the load and after the settle
time, so that a counter which moves late has moved.
"""

from collections.abc import Sequence
from typing import Final

import pandas as pd

from harness.analysis.figure import Figure, Figures, NotMeasurable, reading, with_other
from harness.analysis.open_requests import LEFT, num_abandoned
from harness.analysis.run_facts import RunFacts
from harness.analysis.tokens import prompt_total, tokens_read
from harness.metrics import NOBODY_LEFT, WASTED_TOKENS
from harness.records import GAUGES, Metric, Outcome

_ROUNDING: Final = 1e-9  # of a gauge that is a share


def count_figures(lifecycle: pd.DataFrame, facts: RunFacts) -> Figures:
    preemptions = idle_figure("preemptions", facts, "preemptions")
    if facts.has_lifecycle:
        seen = int((lifecycle["event"] == "preempted").sum())
        preemptions = with_other(
            reading("preemptions", seen, method="exact"), "counter", preemptions
        )
    return {
        "preemptions": preemptions,
        "recomputed_tokens": idle_figure("recomputed_tokens", facts, "recomputed_tokens"),
        **_forced_reclaims(facts),
    }


def _forced_reclaims(facts: RunFacts) -> Figures:
    """Only some kinds of servers name such a counter: most have no such setting."""
    name = "forced_reclaims"
    return {name: idle_figure(name, facts, name)} if name in facts.metric_names else {}


def wasted_by_counter(requests: pd.DataFrame, facts: RunFacts) -> Figure:
    """Requests left were abandoned, cut off or timed out: the counter does not distinguish these.
    A counter that moved by less than was read says nothing about waste."""
    generated = _idle_change(facts, "generated_tokens")
    if isinstance(generated, NotMeasurable):
        return generated
    n = int(requests["outcome"].isin(LEFT).sum())
    if not n:
        return NotMeasurable("no request was left before its end")
    read = float(tokens_read(requests).sum())
    if generated < read:
        return NotMeasurable(
            f"{facts.metric_names['generated_tokens']} moved by {generated:g}, less than the "
            f"{read:g} tokens that clients read"
        )
    return _mean_waste(
        {
            "total_tokens": generated - read,
            "generated_tokens": generated,
            "cut_off": int((requests["outcome"] == Outcome.CUT_OFF).sum()),
        },
        n,
        bound=_bound_of_tokens(facts, "generated_tokens"),
    )


def wasted_in_all(found: Sequence[Metric], method: str) -> Metric:
    others = {name: sum(one.others[name] for one in found) for name in found[0].others}
    bound = "lower" if any(one.bound == "lower" for one in found) else "point"
    return _mean_waste(others, sum(one.n for one in found), bound=bound, method=method)


def _mean_waste(others: dict[str, float], n: int, *, bound: str, method: str = "counter") -> Metric:
    mean = others["total_tokens"] / n
    return reading(WASTED_TOKENS, mean, method=method, n=n, bound=bound, others=others)


def wasted_prompts_by_counter(requests: pd.DataFrame, facts: RunFacts) -> Figure:
    computed = _idle_change(facts, "prompt_tokens")
    if isinstance(computed, NotMeasurable):
        return computed
    if not num_abandoned(requests):
        return NotMeasurable(NOBODY_LEFT)
    has_token = requests["first_token_ns"].notna()
    n = int((requests["outcome"].isin(LEFT) & ~has_token).sum())
    if not n:
        return NotMeasurable("no request was left before its first token")
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
    return reading(
        "wasted_prompt_tokens",
        total / n,
        method="counter",
        n=n,
        bound=_bound_of_tokens(facts, "prompt_tokens"),
        mean_ci95=((total - spread) / n, (total + spread) / n) if spread else None,
        others={"total_tokens": total, "prompt_tokens": computed},
    )


def idle_figure(name: str, facts: RunFacts, role: str, *, sign: int = 1) -> Figure:
    change = _idle_change(facts, role)
    if isinstance(change, NotMeasurable):
        return change
    missing = 0.0 if abs(change) < _ROUNDING else sign * change
    if missing < 0:
        before, after = facts.idle_before[role], facts.idle_after[role]
        return NotMeasurable(
            f"{facts.metric_names.get(role, role)} was {before:g} before the load and {after:g} "
            "after it: the server had other users before, or it was started anew"
        )
    method = "gauge" if role in GAUGES else "counter"
    return reading(name, missing, method=method, bound=_bound(facts, role))


def _idle_change(facts: RunFacts, role: str) -> float | NotMeasurable:
    change = facts.idle_change(role)
    if role in facts.fallen:
        before, after = facts.fallen[role]
        return NotMeasurable(
            f"{facts.metric_names[role]} fell from {before:g} to {after:g} during the run: the "
            "server was started anew, or several processes answer at its address"
        )
    if change is None and role in facts.metric_names:
        name = facts.metric_names[role]
        return NotMeasurable(f"{name} was not read before the load and after the settle time")
    if change is None:
        return NotMeasurable(not_shown(facts, role))
    if facts.trust.get(role) == "stuck":
        return NotMeasurable(f"{facts.engine}'s {facts.metric_names[role]} never moves")
    return change


def not_shown(facts: RunFacts, role: str) -> str:
    noun = "running requests" if role == "running" else role.replace("_", " ")
    return f"{facts.engine} does not show its {noun}"


def _bound(facts: RunFacts, role: str) -> str:
    trust = facts.trust.get(role, "exact")
    is_idle = not facts.idle_change("running")
    return "lower" if trust == "lower" or (trust == "exact_when_idle" and not is_idle) else "point"


def _bound_of_tokens(facts: RunFacts, role: str) -> str:
    """What still runs after the settle time will be computed for, unless the server is at rest."""
    goes_on = facts.still_computing
    if goes_on is None:
        goes_on = (facts.still_there or 0.0) > 0
    return "lower" if goes_on else _bound(facts, role)
