"""Ghosts, lost slots and lost KV, as counted by harness/experiments/occupancy.py; pure.

A round's requests are sent at once when its streams have left. One that got its first token by the
round's deadline (`reference_ns`) found a free slot; one that got it later had to wait for a ghost's
natural end; one that got none waits for a lost slot.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from harness.analysis.figure import Figure, Figures, NotMeasurable, rate, reading
from harness.analysis.tokens import without_tokens
from harness.intervals import rate_interval
from harness.records import Metric, Outcome, TrialArm

NO_ROUNDS: Final = "the workload has no rounds in which all leave"


class RoundTotals(NamedTuple):
    """Sums over the rounds of a run that came to their end. `left`: streams that left; `ghosts` of
    them held their slot beyond the deadline, `lost` slots beyond the natural end."""

    rounds: int
    left: int
    ghosts: int
    lost: int


def rounds_of(requests: pd.DataFrame) -> RoundTotals | NotMeasurable:
    rows = without_tokens(requests)
    rows = rows[rows["arm"] == TrialArm.OCCUPANCY]
    checks = rows[rows["reference_ns"].notna()]
    if checks.empty:
        return NotMeasurable(NO_ROUNDS)
    is_open = checks["first_token_ns"].isna() & (checks["outcome"] == Outcome.CUT_OFF)
    checks = checks[~checks["trial"].isin(checks.loc[is_open, "trial"])]
    if checks.empty:
        return NotMeasurable("the run ended before its first round did")
    has_begun = checks["first_token_ns"].notna()
    lost = int((~has_begun & (checks["outcome"] == Outcome.ABANDONED)).sum())
    ghosts = int((checks["first_token_ns"] > checks["reference_ns"]).sum())
    left = rows[(rows["outcome"] == Outcome.ABANDONED) & rows["first_token_ns"].notna()]
    is_counted = left["abandoned_ns"] <= checks["sent_ns"].max()
    return RoundTotals(checks["trial"].nunique(), int(is_counted.sum()), ghosts, lost)


def ghost_rate_of(found: Sequence[RoundTotals], method: str) -> Figure:
    hits, n = sum(one.ghosts for one in found), sum(one.left for one in found)
    if not n:
        return NotMeasurable("no stream left before its end")
    figure = rate(hits, n, method=method)
    figure.mean_ci95 = rate_interval(hits, n, 0.95)
    return figure


def occupancy_figures(requests: pd.DataFrame, found: RoundTotals | NotMeasurable) -> Figures:
    """`leaked_slots` and `leaked_kv_share`, as far as the run counted them."""
    figures: Figures = {}
    if isinstance(found, RoundTotals):
        lost = float(found.lost)
        figures["leaked_slots"] = reading("leaked_slots", lost, method="probe", n=found.rounds)
    rows = requests[requests["arm"] == TrialArm.CAPACITY]
    if not rows.empty:
        figures["leaked_kv_share"] = _leaked_share(*(rows[rows["trial"] == i] for i in (0, 1)))
    return figures


def _leaked_share(before: pd.DataFrame, after: pd.DataFrame) -> Figure:
    for rows in (before, after):
        is_served = rows["first_token_ns"].notna()
        if not is_served.any() or rows.loc[is_served, "prompt_tokens"].isna().any():
            return NotMeasurable("the KV cache was not measured both before and after")
        if is_served.all():
            return NotMeasurable(
                "no prompt had to wait for KV blocks: the slots ran out first; take larger "
                "`load.capacity_prompt_tokens`"
            )
    share = 1.0 - _most_held(after) / _most_held(before)
    return reading("leaked_kv_share", share, method="probe", n=2)


def _most_held(rows: pd.DataFrame) -> float:
    """The most tokens, of prompts and of answers so far, that were held at once. A stream counts
    until its last token: after that it may have lost its blocks."""
    changes: list[tuple[int, float]] = []
    for _, row in rows[rows["first_token_ns"].notna()].iterrows():
        prompt, tokens = float(row["prompt_tokens"]), row["event_tokens"]
        changes.append((int(row["first_token_ns"]), prompt))
        changes += zip((int(t) for t in row["token_times_ns"]), map(float, tokens), strict=True)
        changes.append((int(row["last_token_ns"]) + 1, -prompt - float(np.sum(tokens))))
    return float(np.cumsum([change for _, change in sorted(changes)]).max())


def with_probe(figure: Figure | None, probe: Metric) -> Figure:
    """The exact figure first, then the probe's, then what gauges show."""
    if isinstance(figure, Metric) and figure.method == "exact":
        figure.others["probe"] = probe
        return figure
    if isinstance(figure, Metric):
        probe.others[figure.method] = figure
    return probe
