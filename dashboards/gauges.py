"""What the server showed of itself over time: from its step log, else from what was scraped."""

import json
from dataclasses import dataclass

import numpy as np

from dashboards.downsample import Series, min_max
from dashboards.source import Run
from dashboards.timelines import column_series


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUsage:
    """KV cache in use: in blocks where the server counts them, else as a share."""

    series: Series
    total: int | None
    unit: str


def requests_in(run: Run, role: str) -> Series | None:
    """How many requests were `running` or `waiting` over time, or None where nobody told."""
    if run.frames.steps.empty:
        return _scraped_series(run, role)
    return _step_series(run, f"num_{role}")


def kv_usage(run: Run) -> KvUsage | None:
    """KV blocks in use over time; a share of the cache where blocks are not shown; else None."""
    config = run.manifest.target.config if run.manifest.target else None
    total = (config or {}).get("num_blocks")
    if run.frames.steps.empty:
        free = _scraped_series(run, "free_blocks")
    else:
        free = _step_series(run, "free_blocks")
    if free is not None and total is not None:
        used = Series(x=free.x, y=total - free.y, samples=free.samples, intervals=free.intervals)
        return KvUsage(series=used, total=total, unit="blocks in use")
    share = _scraped_series(run, "kv_usage")
    return None if share is None else KvUsage(series=share, total=None, unit="share in use")


def _step_series(run: Run, column: str) -> Series:
    steps = run.frames.steps.sort_values("ended_ns")
    values = steps[column].to_numpy(dtype=np.float64)
    return min_max(run.clock.seconds(steps["ended_ns"]), values)


def _scraped_series(run: Run, role: str) -> Series | None:
    metrics = run.manifest.target.spec.get("metrics", {}) if run.manifest.target else {}
    source = metrics.get(role)
    if source is None:
        return None
    scraped = run.frames.server_metrics
    rows = scraped[scraped["name"] == source["name"]]
    wanted = source.get("labels", {}).items()
    rows = rows[[wanted <= json.loads(labels).items() for labels in rows["labels"]]]
    if rows.empty:
        return None
    return column_series(rows.groupby("t_ns", as_index=False)["value"].sum(), "value", run.clock)
