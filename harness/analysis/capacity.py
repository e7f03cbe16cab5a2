"""How busy the engine was, and how finely the harness could see: the measurement floor."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import Figure, Figures, NotMeasurable, Sample, describe_or, reading
from harness.analysis.scraped import readings_of, scrape_times_ns
from harness.analysis.stats import Floats
from harness.analysis.step_log import num_sampled
from harness.analysis.tokens import tokens_read
from harness.store.frames import RunFrames

_NO_WINDOW: Final = "the load window has no length"


def capacity_figures(frames: RunFrames, facts: Facts) -> Figures:
    in_window = _steps_in_window(frames.steps, facts)
    return {
        "slot_utilisation": _slot_utilisation(frames, in_window, facts),
        "throughput_tps": _throughput(frames, in_window, facts),
    }


def series_of(frames: RunFrames, facts: Facts) -> dict[str, Floats]:
    """The run's repeated observations, in seconds, by the name of their figure.

    step_s: step ended - step started, of steps that overlap the load window; client_lag_s: how late
    the load processes noticed each tick of a short timer, in the load window; scrape_interval_s:
    time between scrapes, each of all URLs together.
    """
    steps = _steps_in_window(frames.steps, facts)
    in_window = frames.client["t_ns"].between(facts.load_started_ns, facts.load_ended_ns)
    return {
        "step_s": (steps["ended_ns"] - steps["started_ns"]).to_numpy(dtype=float) / 1e9,
        "client_lag_s": frames.client.loc[in_window, "lag_ns"].to_numpy(dtype=float) / 1e9,
        "scrape_interval_s": np.diff(scrape_times_ns(frames)) / 1e9,
    }


def series_figures(series: Mapping[str, Floats], facts: Facts) -> Figures:
    why_empty = {
        "step_s": "no step in the load window" if facts.has_steps else facts.needs_steps,
        "client_lag_s": "the load did not watch itself",
        "scrape_interval_s": (
            "there were fewer than two scrapes" if facts.has_scrapes else "the run did not scrape"
        ),
    }
    methods = {"step_s": "exact"}
    return {
        name: describe_or(
            Sample(values=values, is_series=True),
            why_empty[name],
            unit="s",
            method=methods.get(name, "client"),
        )
        for name, values in series.items()
    }


def slots_in_use_s(steps: pd.DataFrame, facts: Facts) -> float:
    """Sum over steps of (requests running * seconds in the load window)."""
    in_window = _steps_in_window(steps, facts)
    return float((in_window["num_running"] * in_window["inside_s"]).sum())


def _steps_in_window(steps: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """Steps that overlap the load window, with the part of each that lies in it (`inside_s`)."""
    started = np.maximum(steps["started_ns"].to_numpy(dtype=np.int64), facts.load_started_ns)
    ended = np.minimum(steps["ended_ns"].to_numpy(dtype=np.int64), facts.load_ended_ns)
    overlapping: pd.DataFrame = steps.assign(inside_s=(ended - started) / 1e9)[ended > started]
    return overlapping


def _slot_utilisation(frames: RunFrames, in_window: pd.DataFrame, facts: Facts) -> Figure:
    """Sum over steps of (requests running * seconds in the window) / (slots * window).

    Between two steps nothing runs. Without a step log: mean of the scraped gauge / slots.
    """
    if facts.slots is None:
        return NotMeasurable(f"{facts.engine} does not show its number of batch slots")
    if facts.load_s <= 0:
        return NotMeasurable(_NO_WINDOW)
    if facts.has_steps:
        share = slots_in_use_s(frames.steps, facts) / (facts.slots * facts.load_s)
        return reading(share, unit="ratio", method="exact", n=len(in_window))
    running = readings_of(frames, facts, "running")
    if running is None:
        return NotMeasurable(f"{facts.needs_steps}, and its running requests were not scraped")
    if facts.trust.get("running") == "stuck":
        return NotMeasurable(f"{facts.metric_names['running']} never moves")
    is_inside = (running.t_ns >= facts.load_started_ns) & (running.t_ns <= facts.load_ended_ns)
    levels = running.level[is_inside]
    if not len(levels):
        return NotMeasurable("no scrape fell into the load")
    return reading(float(levels.mean()) / facts.slots, unit="ratio", method="gauge", n=len(levels))


def _throughput(frames: RunFrames, in_window: pd.DataFrame, facts: Facts) -> Figure:
    """Tokens sampled in steps that ended in the load window / its length.

    Without a step log: tokens that the clients read, a lower bound of those generated.
    """
    if facts.load_s <= 0:
        return NotMeasurable(_NO_WINDOW)
    if facts.has_steps:
        ended = in_window[in_window["ended_ns"] <= facts.load_ended_ns]
        return reading(
            num_sampled(ended) / facts.load_s, unit="tokens/s", method="exact", n=len(ended)
        )
    if frames.requests.empty:
        return NotMeasurable("no request ended")
    read = float(tokens_read(frames.requests).sum())
    return reading(
        read / facts.load_s,
        unit="tokens/s",
        method="client",
        n=len(frames.requests),
        bound="lower",
    )
