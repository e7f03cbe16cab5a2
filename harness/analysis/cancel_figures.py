"""The figures of the cancellations: stages, latency, ghosts, and what an absent user cost.

Each figure sums up one column of `cancellation.cancellations`: a row of `_FIGURES` makes one.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from harness.analysis.cancellations import TIERS, is_unfinished, was_cancelled
from harness.analysis.figure import (
    Figure,
    Figures,
    NotMeasurable,
    Sample,
    describe,
    proportion,
    same_reason,
    sampled,
)
from harness.analysis.run_facts import Need, RunFacts
from harness.metrics import (
    CANCEL_LATENCY,
    CANCEL_LATENCY_STEPS,
    GHOST_RATE,
    METRICS,
    NOBODY_LEFT,
    STAGES,
    WASTED_TOKENS,
)
from harness.records import Metric, Role

_NO_CANCEL: Final = "the lifecycle log has no abandoned request that could still be cancelled"
_NO_REQUEST: Final = "the lifecycle log has no abandoned request"
_NO_ENERGY: Final = f"{_NO_REQUEST}, or neither the energy nor the power of the GPU was read twice"
_NO_STAGE: Final = "no request got as far as this stage"


_COMPUTED: Final[tuple[Need, ...]] = ("clock", "steps", "token lists")


class _Column(NamedTuple):
    """A column, its sources, and the reason if no row has a value. A figure that `grows` is a lower
    bound as long as some request is still held."""

    name: str
    needs: tuple[Need, ...]
    why_empty: str
    grows: bool = False
    method: str = "exact"


_FIGURES: Final = {
    "detect_s": _Column("detect_s", ("clock",), _NO_STAGE),
    "signal_s": _Column("signal_s", (), _NO_STAGE),
    "wait_s": _Column("wait_s", (), _NO_STAGE),
    "free_s": _Column("free_s", (), _NO_STAGE),
    CANCEL_LATENCY: _Column(CANCEL_LATENCY, ("clock",), _NO_CANCEL),
    CANCEL_LATENCY_STEPS: _Column(CANCEL_LATENCY_STEPS, ("clock", "steps"), _NO_CANCEL),
    GHOST_RATE: _Column("ghost", (), "no abandoned request was watched for the whole settle time"),
    "removed_at_first_boundary": _Column(
        "removed_at_first_boundary", ("steps",), "no abort reached the worker"
    ),
    WASTED_TOKENS: _Column("wasted_tokens", (), _NO_REQUEST, grows=True),
    "wasted_in_flight_tokens": _Column("wasted_in_flight_tokens", _COMPUTED, _NO_REQUEST),
    "wasted_after_close_tokens": _Column(
        "wasted_after_close_tokens", _COMPUTED, _NO_REQUEST, grows=True
    ),
    "slot_seconds_after_abandon": _Column("slot_seconds", ("clock",), _NO_REQUEST, grows=True),
    "block_seconds_after_abandon": _Column(
        "block_seconds", (*_COMPUTED, "block size"), _NO_REQUEST, grows=True
    ),
    "gpu_seconds_after_abandon": _Column("gpu_seconds", _COMPUTED, _NO_REQUEST, grows=True),
    "energy_wasted_j": _Column(
        "gpu_joules", ("GPU", *_COMPUTED), _NO_ENERGY, grows=True, method="gauge"
    ),
}
_NO_TIER: Final = "no request that this tier had was left"
_OF_TIERS: Final = {
    "hop_s": _Column("hop_s", (), "no request was left while two tiers had it"),
    "cancel_latency_prefill_tier_s": _Column("prefill_tier_s", ("clock",), _NO_TIER),
    "cancel_latency_decode_tier_s": _Column("decode_tier_s", ("clock",), _NO_TIER),
}
_IN_PREFILL: Final = {
    "cancel_latency_prefill_s": CANCEL_LATENCY,
    "cancel_latency_prefill_steps": CANCEL_LATENCY_STEPS,
}


def cancel_figures(cancels: pd.DataFrame, facts: RunFacts) -> Figures:
    if cancels.empty:
        return same_reason(_FIGURES, NOBODY_LEFT)
    if (why := facts.lacks("lifecycle")) is not None:
        return same_reason(_FIGURES, why)
    censored = _censored_samples(cancels)
    figures = {name: _figure(name, name, cancels, censored, facts) for name in _FIGURES}
    if cancels["worker"].str.startswith(TIERS).any():
        figures |= {name: _of_tier(name, cancels, facts) for name in _OF_TIERS}
    long_prompts = cancels[cancels["role"] == Role.LONG_PROMPT]
    if long_prompts.empty:
        return figures
    in_prefill = long_prompts[long_prompts["phase"] == "prefill"]
    censored = _censored_samples(in_prefill)
    for name, of_all in _IN_PREFILL.items():
        figure = figures[name] = _figure(name, of_all, in_prefill, censored, facts)
        if isinstance(figure, Metric):
            figure.of = "long prompts left during their prefill"
    return figures


def _figure(
    name: str, row: str, cancels: pd.DataFrame, censored: dict[str, Sample], facts: RunFacts
) -> Figure:
    column = _FIGURES[row]
    if (why := facts.lacks(*column.needs)) is not None:
        return NotMeasurable(why)
    values = cancels[column.name]
    if METRICS[name].kind == "proportion":
        return proportion(name, values, column.why_empty, method="exact")
    sample = censored.get(row) or Sample(values=values.dropna().to_numpy(dtype=float))
    bound = "lower" if column.grows and is_unfinished(cancels).any() else "point"
    return sampled(name, sample, column.why_empty, method=column.method, bound=bound)


def _of_tier(name: str, cancels: pd.DataFrame, facts: RunFacts) -> Figure:
    """A request that a tier never let go of is censored where its cancel latency is."""
    column = _OF_TIERS[name]
    if (why := facts.lacks(*column.needs)) is not None:
        return NotMeasurable(why)
    rows = cancels[cancels[column.name].notna()]
    limit = rows[CANCEL_LATENCY].where(rows["censored"].astype(bool), np.inf)
    took = rows[column.name]
    sample = Sample(
        values=np.minimum(took.to_numpy(dtype=float), limit.to_numpy(dtype=float)),
        censored=(took >= limit).to_numpy(dtype=bool),
    )
    return sampled(name, sample, column.why_empty, method=column.method)


def latency_sample(cancels: pd.DataFrame, column: str = CANCEL_LATENCY) -> Sample:
    return Sample.of(cancels[was_cancelled(cancels)], column)


def _censored_samples(cancels: pd.DataFrame) -> dict[str, Sample]:
    """Latencies and stages. A stage covers the requests that reached its beginning; one that got no
    further is censored at the time it is known to have waited there."""
    samples = {
        name: latency_sample(cancels, name) for name in (CANCEL_LATENCY, CANCEL_LATENCY_STEPS)
    }
    spent = pd.Series(0.0, index=cancels.index)
    for name, is_over, is_stuck in stages_reached(cancels):
        waited = (cancels[CANCEL_LATENCY] - spent).clip(lower=0.0)
        values = cancels[name].where(is_over, waited)[is_over | is_stuck]
        samples[name] = Sample(
            values=values.to_numpy(dtype=float), censored=is_stuck[values.index].to_numpy()
        )
        spent = spent + cancels[name].fillna(0.0)
    return samples


def stages_reached(cancels: pd.DataFrame) -> Iterator[tuple[str, pd.Series, pd.Series]]:
    has_begun = was_cancelled(cancels)
    for name in STAGES:
        is_over = cancels[name].notna()
        yield name, is_over, has_begun & ~is_over & cancels["censored"].astype(bool)
        has_begun = has_begun & is_over


def waste_by_abandon_point(cancels: pd.DataFrame) -> list[dict[str, Any]]:
    columns = ["wasted_in_flight_tokens", "wasted_after_close_tokens"]
    points = cancels.dropna(subset=["planned_abandon", *columns]).groupby("planned_abandon")
    return [
        {
            "planned_abandon": int(rows["planned_abandon"].iloc[0]),
            "n": len(rows),
            "in_flight_mean": float(rows[columns[0]].mean()),
            "after_close_mean": float(rows[columns[1]].mean()),
        }
        for _, rows in points
    ]


def latency_by(column: str, cancels: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {
            column: value,
            "ghosts": int(rows["ghost"].fillna(value=False).sum()),
            CANCEL_LATENCY: describe(latency_sample(rows), unit="s", method="exact"),
        }
        for value, rows in cancels[was_cancelled(cancels)].groupby(column)
    ]


def storm_figures(cancels: pd.DataFrame, facts: RunFacts) -> Figures:
    storms = cancels[(cancels["role"] == Role.USER) & cancels["trial"].notna()]
    if storms.empty:
        return {}
    t0_ns = storms.groupby(storms["trial"].astype(int))["t0_ns"]
    spread = Sample(values=(t0_ns.max() - t0_ns.min()).to_numpy(dtype=float) / 1e9)
    figures = {"storm_spread_s": sampled("storm_spread_s", spread, "", method="client")}
    if (why := facts.lacks("lifecycle", "clock")) is not None:
        return figures | {"storm_clear_s": NotMeasurable(why)}
    after_first = (storms["t0_ns"] - t0_ns.transform("min")).astype(float) / 1e9
    known = storms.assign(clear_s=after_first + storms[CANCEL_LATENCY]).dropna(subset="clear_s")
    by_storm = known.groupby(known["trial"].astype(int))
    clear = Sample(
        values=by_storm["clear_s"].max().to_numpy(dtype=float),
        censored=by_storm["censored"].any().to_numpy(dtype=np.bool_),
    )
    why_empty = "the log has no stream of a storm"
    return figures | {"storm_clear_s": sampled("storm_clear_s", clear, why_empty, method="exact")}
