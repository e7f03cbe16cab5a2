"""Figures over the replicas of a simulation that has only some of them.

Each replica has its own queue and its own users, so that its figures are one draw of what a replica
does: their mean over k replicas has the interval of a mean of k values (Student's t). It holds what
simulating so few of them costs. The sums over all replicas follow from the mean of one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.figure import Figures
from harness.metrics import METRICS
from harness.records import FIGURES_PER_ROUND, Metric, OverReplicas, Simulated
from harness.stats import mean_ci95
from harness.store.frames import RunFrames

_SUMS: Final = ("rps", "tokens/s", "slots", "blocks", "preemptions")  # by unit


def by_replica(frames: RunFrames) -> Iterator[RunFrames]:
    """Each replica as if it were the whole run. A request counts for the last that had it."""
    log = frames.lifecycle
    had = log[log["client_request_id"].notna()]
    last = had.drop_duplicates("client_request_id", keep="last")
    worker_of = pd.Series(last["worker"].to_numpy(), index=last["client_request_id"].to_numpy())
    worker = frames.requests["request_id"].map(worker_of)
    for name in sorted(frames.steps["worker"].unique()):
        yield replace(
            frames,
            manifest=_of_one(frames.manifest, name),
            requests=frames.requests[(worker == name).to_numpy(dtype=bool)].reset_index(drop=True),
            lifecycle=log[log["worker"] == name].reset_index(drop=True),
            steps=frames.steps[frames.steps["worker"] == name].reset_index(drop=True),
        )


def _of_one(manifest: dict[str, object], worker: str) -> dict[str, object]:
    target = manifest["target"]
    assert isinstance(target, Mapping)
    config = {**target["config"], "workers": [worker]}
    return {**manifest, "target": {**target, "config": config}, "arrivals": None, "idle": {}}


def over_replicas(
    figures: Sequence[Figures], simulated: Simulated
) -> dict[str, dict[str, OverReplicas]]:
    """The figures of the metrics that every replica has, by metric and figure."""
    found: dict[str, dict[str, OverReplicas]] = {}
    for name, info in METRICS.items():
        ones = [one.get(name) for one in figures]
        for key in FIGURES_PER_ROUND:
            values = [getattr(one, key) for one in ones if isinstance(one, Metric)]
            if len(values) == len(figures) and None not in values:
                number = simulated.replicas if info.unit in _SUMS else None
                found.setdefault(name, {})[key] = _over(values, number)
    return found


def _over(values: Sequence[float], sums_over: int | None) -> OverReplicas:
    sample = np.array(values, dtype=float)
    one = OverReplicas(n=len(values), mean=float(sample.mean()), mean_ci95=mean_ci95(sample))
    if sums_over is None:
        return one
    limits = one.mean_ci95 and (one.mean_ci95[0] * sums_over, one.mean_ci95[1] * sums_over)
    return msgspec.structs.replace(one, whole=one.mean * sums_over, whole_ci95=limits)
