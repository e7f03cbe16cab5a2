"""The figures of the cancellations: stages, latency, ghosts, and what an absent user cost."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.analysis.cancellation import is_unfinished, was_cancelled
from harness.analysis.facts import Facts
from harness.analysis.figure import (
    Figure,
    Figures,
    NotMeasurable,
    Sample,
    describe,
    describe_or,
    rate,
    same_reason,
    share,
)
from harness.metrics import CANCEL_LATENCY, CANCEL_LATENCY_STEPS, STAGES
from harness.records import Metric, Role

NOBODY_LEFT: Final = "no request was abandoned"
_CANCEL_FIGURES: Final = (
    "detect_s",
    "signal_s",
    "wait_s",
    "free_s",
    CANCEL_LATENCY,
    CANCEL_LATENCY_STEPS,
    "ghost_rate",
    "removed_at_first_boundary",
)
_WASTE_FIGURES: Final = {
    "wasted_tokens": ("wasted_tokens", "tokens"),
    "wasted_in_flight_tokens": ("wasted_in_flight_tokens", "tokens"),
    "wasted_after_close_tokens": ("wasted_after_close_tokens", "tokens"),
    "slot_seconds_after_abandon": ("slot_seconds", "s"),
    "block_seconds_after_abandon": ("block_seconds", "block seconds"),
    "gpu_seconds_after_abandon": ("gpu_seconds", "s"),
}


def cancel_figures(cancels: pd.DataFrame, facts: Facts) -> Figures:
    """Stages, cancel latency (s and steps), ghost rate, removal at the first boundary.

    Long prompts that were left during their prefill also have a cancel latency of their own.

    Each stage covers the requests that reached its beginning; one that got no further is censored
    at the time it is known to have waited there. `ghost_rate` = ghosts / abandoned requests that
    were watched for the settle time.
    """
    if cancels.empty:
        return same_reason(_CANCEL_FIGURES, NOBODY_LEFT)
    if not facts.has_lifecycle:
        return same_reason(_CANCEL_FIGURES, facts.needs_lifecycle)
    return {
        **_stage_figures(cancels, facts),
        **_prefill_figures(cancels, facts),
        CANCEL_LATENCY: _censored_figure(cancels, CANCEL_LATENCY, "s", facts),
        CANCEL_LATENCY_STEPS: _censored_figure(cancels, CANCEL_LATENCY_STEPS, "steps", facts),
        "ghost_rate": _counted(
            cancels["ghost"], rate, "no abandoned request was watched for the whole settle time"
        ),
        "removed_at_first_boundary": _counted(
            cancels["removed_at_first_boundary"],
            share,
            "no abort reached the worker" if facts.has_steps else facts.needs_steps,
        ),
    }


def waste_figures(cancels: pd.DataFrame, facts: Facts) -> Figures:
    """Tokens, slot time, block time and device time for each abandoned request.

    They are lower bounds where a request had not finished when the observation ended, except the
    tokens in flight at t0: their number is final.
    """
    if cancels.empty:
        return same_reason(tuple(_WASTE_FIGURES), NOBODY_LEFT)
    if not facts.has_lifecycle:
        return same_reason(tuple(_WASTE_FIGURES), facts.needs_lifecycle)
    so_far = "lower" if is_unfinished(cancels).any() else "point"
    figures: Figures = {}
    for name, (column, unit) in _WASTE_FIGURES.items():
        figures[name] = describe_or(
            Sample(values=cancels[column].dropna().to_numpy(dtype=float)),
            _why_no_waste(name, facts),
            unit=unit,
            method="exact",
            bound="point" if name == "wasted_in_flight_tokens" else so_far,
        )
    return figures


def waste_by_abandon_point(cancels: pd.DataFrame) -> list[dict[str, Any]]:
    """Mean wasted tokens by the number of tokens after which a client left, in flight and after."""
    names = {
        "in_flight_mean": "wasted_in_flight_tokens",
        "after_close_mean": "wasted_after_close_tokens",
    }
    known = cancels.dropna(subset=["planned_abandon", *names.values()])
    return [
        {
            "planned_abandon": int(rows["planned_abandon"].iloc[0]),
            "n": len(rows),
            **{key: float(rows[column].mean()) for key, column in names.items()},
        }
        for _, rows in known.groupby("planned_abandon", sort=True)
    ]


def latency_by(column: str, cancels: pd.DataFrame) -> list[dict[str, Any]]:
    """Cancel latency and number of ghosts for each value of `column`."""
    known = cancels[was_cancelled(cancels)]
    return [
        {
            column: value,
            "ghosts": int(rows["ghost"].fillna(value=False).sum()),
            CANCEL_LATENCY: describe(latency_sample(rows), **_EXACT_SECONDS),
        }
        for value, rows in known.groupby(column, sort=True)
    ]


_EXACT_SECONDS: Final = {"unit": "s", "method": "exact"}


def latency_sample(cancels: pd.DataFrame, column: str = CANCEL_LATENCY) -> Sample:
    """The latencies of all requests that have one, ghosts censored."""
    known = cancels[was_cancelled(cancels)]
    return Sample(
        values=known[column].to_numpy(dtype=float),
        censored=known["censored"].to_numpy(dtype=bool),
    )


def _censored_figure(cancels: pd.DataFrame, column: str, unit: str, facts: Facts) -> Figure:
    if not facts.clocks_agree:
        return NotMeasurable(facts.needs_clock)
    if column == CANCEL_LATENCY_STEPS and not facts.has_steps:
        return NotMeasurable(facts.needs_steps)
    why = "the lifecycle log has no abandoned request that could still be cancelled"
    return describe_or(latency_sample(cancels, column), why, unit=unit, method="exact")


def _prefill_figures(cancels: pd.DataFrame, facts: Facts) -> Figures:
    long_prompts = cancels[cancels["role"] == Role.LONG_PROMPT]
    if long_prompts.empty:
        return {}
    in_prefill = long_prompts[long_prompts["phase"] == "prefill"]
    figures: Figures = {}
    for unit, name in (("s", CANCEL_LATENCY), ("steps", CANCEL_LATENCY_STEPS)):
        figure = _censored_figure(in_prefill, name, unit, facts)
        if isinstance(figure, Metric):
            figure.of = "long prompts left during their prefill"
        figures[f"cancel_latency_prefill_{unit}"] = figure
    return figures


def stages_reached(cancels: pd.DataFrame) -> Iterator[tuple[str, pd.Series, pd.Series]]:
    """By stage: which requests have passed it, and which never got any further."""
    has_begun = was_cancelled(cancels)
    for name in STAGES:
        is_over = cancels[name].notna()
        yield name, is_over, has_begun & ~is_over & cancels["censored"].astype(bool)
        has_begun = has_begun & is_over


def _stage_figures(cancels: pd.DataFrame, facts: Facts) -> Figures:
    """detect = disconnected - t0, signal = heard - disconnected, wait = removed - heard, free."""
    figures: Figures = {}
    spent = pd.Series(0.0, index=cancels.index)
    for name, is_over, is_stuck in stages_reached(cancels):
        waited = (cancels[CANCEL_LATENCY] - spent).clip(lower=0.0)
        values = cancels[name].where(is_over, waited)[is_over | is_stuck]
        sample = Sample(
            values=values.to_numpy(dtype=float), censored=is_stuck[values.index].to_numpy()
        )
        figures[name] = describe_or(sample, "no request got as far as this stage", **_EXACT_SECONDS)
        spent = spent + cancels[name].fillna(0.0)
    if not facts.clocks_agree:
        figures["detect_s"] = NotMeasurable(facts.needs_clock)
    return figures


def _counted(claims: pd.Series, describe_count: Callable[..., Metric], why_empty: str) -> Figure:
    known = claims.dropna()
    if known.empty:
        return NotMeasurable(why_empty)
    return describe_count(int(known.sum()), len(known), method="exact")


def _why_no_waste(name: str, facts: Facts) -> str:
    if name != "wasted_tokens" and not facts.clocks_agree:
        return facts.needs_clock
    if name == "slot_seconds_after_abandon" or facts.has_steps is False:
        return facts.needs_steps
    if name == "block_seconds_after_abandon" and facts.block_size is None:
        return f"{facts.engine} does not show its block size"
    return "the lifecycle log has no abandoned request"


def storm_figures(cancels: pd.DataFrame, facts: Facts) -> Figures:
    """storm_clear_s: last blocks freed - first t0, of the streams of one storm; storm_spread_s:
    last t0 - first t0, which says how much at once they left.

    A storm with a ghost is censored at what its longest cancel is known to exceed. Empty without a
    storm.
    """
    storms = cancels[(cancels["role"] == Role.USER) & cancels["trial"].notna()]
    if storms.empty:
        return {}
    waves = storms.groupby(storms["trial"].astype(int))
    spread = (waves["t0_ns"].max() - waves["t0_ns"].min()).to_numpy(dtype=float) / 1e9
    figures: Figures = {
        "storm_spread_s": describe(Sample(values=spread), unit="s", method="client")
    }
    if not facts.has_lifecycle or not facts.clocks_agree:
        why = facts.needs_clock if facts.has_lifecycle else facts.needs_lifecycle
        return figures | {"storm_clear_s": NotMeasurable(why)}
    after_first = (storms["t0_ns"] - waves["t0_ns"].transform("min")).astype(float) / 1e9
    known = storms.assign(clear_s=after_first + storms[CANCEL_LATENCY]).dropna(subset="clear_s")
    if known.empty:
        return figures | {"storm_clear_s": NotMeasurable("the log has no stream of a storm")}
    by_storm = known.groupby(known["trial"].astype(int))
    sample = Sample(
        values=by_storm["clear_s"].max().to_numpy(dtype=float),
        censored=by_storm["censored"].any().to_numpy(dtype=np.bool_),
    )
    return figures | {"storm_clear_s": describe(sample, unit="s", method="exact")}
