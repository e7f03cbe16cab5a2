"""How busy the engine was, and how finely the harness could see: the measurement floor."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from harness.analysis.figure import Figure, Figures, NotMeasurable, Sample, reading, sampled
from harness.analysis.gpu import change_times_ns, gpu_figures
from harness.analysis.run_facts import RunFacts
from harness.analysis.scraped import readings_of, scrape_times_ns
from harness.analysis.timeline import num_sampled
from harness.analysis.tokens import tokens_read
from harness.stats import Floats
from harness.store.frames import RunFrames


def capacity_figures(frames: RunFrames, facts: RunFacts) -> Figures:
    in_window = steps_in_window(frames.steps, facts)
    throughput = _throughput(frames, in_window, facts)
    return {
        "slot_utilisation": _slot_utilisation(frames, in_window, facts),
        "throughput_tps": throughput,
        **gpu_figures(frames, facts, throughput),
    }


def series_of(frames: RunFrames, facts: RunFacts) -> dict[str, Floats]:
    steps = steps_in_window(frames.steps, facts)
    in_window = frames.client["t_ns"].between(facts.load_started_ns, facts.load_ended_ns)
    return {
        "step_s": (steps["ended_ns"] - steps["started_ns"]).to_numpy(dtype=float) / 1e9,
        "client_lag_s": frames.client.loc[in_window, "lag_ns"].to_numpy(dtype=float) / 1e9,
        "scrape_interval_s": np.diff(scrape_times_ns(frames)) / 1e9,
        "gpu_interval_s": np.diff(change_times_ns(frames, facts)) / 1e9,
    }


def series_figures(series: Mapping[str, Floats], facts: RunFacts) -> Figures:
    scraped = "there were fewer than two scrapes" if facts.has_scrapes else "the run did not scrape"
    about = {
        "step_s": ("exact", facts.lacks("steps") or "no step in the load window"),
        "client_lag_s": ("client", "the load did not watch itself"),
        "scrape_interval_s": ("client", scraped),
        "gpu_interval_s": ("client", facts.no_gpu or "the GPU's readings changed less than twice"),
    }
    return {
        name: sampled(name, Sample(values=series[name], is_series=True), why_empty, method=method)
        for name, (method, why_empty) in about.items()
    }


def steps_in_window(steps: pd.DataFrame, facts: RunFacts) -> pd.DataFrame:
    started = np.maximum(steps["started_ns"].to_numpy(dtype=np.int64), facts.load_started_ns)
    ended = np.minimum(steps["ended_ns"].to_numpy(dtype=np.int64), facts.load_ended_ns)
    slot_s = steps["num_running"] * ((ended - started) / 1e9)
    overlapping: pd.DataFrame = steps.assign(slot_s=slot_s)[ended > started]
    return overlapping


def _slot_utilisation(frames: RunFrames, in_window: pd.DataFrame, facts: RunFacts) -> Figure:
    name = "slot_utilisation"
    if facts.slots is None:
        return NotMeasurable(f"{facts.engine} does not show its number of batch slots")
    if (why := facts.lacks("load")) is not None:
        return NotMeasurable(why)
    if facts.has_steps:
        share = float(in_window["slot_s"].sum()) / (facts.slots * facts.load_s)
        return reading(name, share, method="exact", n=len(in_window))
    running = readings_of(frames, facts, "running")
    if running is None:
        return NotMeasurable(f"{facts.lacks('steps')}, and its running requests were not scraped")
    if facts.trust.get("running") == "stuck":
        return NotMeasurable(f"{facts.metric_names['running']} never moves")
    levels = running.level[facts.is_in_load(running.t_ns)]
    if not len(levels):
        return NotMeasurable("no scrape fell into the load")
    return reading(name, float(levels.mean()) / facts.slots, method="gauge", n=len(levels))


def _throughput(frames: RunFrames, in_window: pd.DataFrame, facts: RunFacts) -> Figure:
    name, n = "throughput_tps", len(frames.requests)
    if (why := facts.lacks("load")) is not None:
        return NotMeasurable(why)
    if facts.has_steps:
        ended = in_window[in_window["ended_ns"] <= facts.load_ended_ns]
        return reading(name, num_sampled(ended) / facts.load_s, method="exact", n=len(ended))
    if not n:
        return NotMeasurable("no request ended")
    read = float(tokens_read(frames.requests).sum())
    return reading(name, read / facts.load_s, method="client", n=n, bound="lower")
