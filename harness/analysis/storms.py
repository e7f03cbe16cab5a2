"""Cancel storms: how long the server takes to let go of everybody who left at the same moment."""

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import Figures, NotMeasurable, Sample, describe
from harness.records import Role


def storm_figures(cancels: pd.DataFrame, facts: Facts) -> Figures:
    """storm_clear_s: last blocks freed - first t0, of the streams of one storm; storm_spread_s:
    last t0 - first t0, which says how much at once they left.

    A storm with a ghost is censored at what its longest cancel is known to exceed. None of both
    where there was no storm.
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
    known = storms.assign(clear_s=after_first + storms["cancel_latency_s"]).dropna(subset="clear_s")
    if known.empty:
        return figures | {"storm_clear_s": NotMeasurable("the log tells of no stream of a storm")}
    by_storm = known.groupby(known["trial"].astype(int))
    sample = Sample(
        values=by_storm["clear_s"].max().to_numpy(dtype=float),
        censored=by_storm["censored"].any().to_numpy(dtype=np.bool_),
    )
    return figures | {"storm_clear_s": describe(sample, unit="s", method="exact")}
