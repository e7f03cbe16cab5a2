"""What the server showed of itself over time: from its step log, else from what was scraped.

A step's numbers are those with which it began, and hold until the next one begins. An idle engine
makes no steps, so the step log ends with the last request; what was scraped after it shows whether
everything came back.
"""

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dashboards.downsample import Floats, Series, min_max
from dashboards.source import Run

Points = tuple[Floats, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUsage:
    """KV cache in use: in blocks where the server counts them, else as a share."""

    series: Series
    total: int | None
    unit: str


def requests_in(run: Run, role: str) -> Series | None:
    """How many requests were `running` or `waiting` over time, or None where nobody told."""
    found = _joined(_stepped(run, f"num_{role}"), _scraped(run, role))
    return None if found is None else min_max(*found)


def preempted_ns(run: Run) -> pd.Series:
    """When requests were preempted: by the lifecycle log; without one, the scrapes at which the
    server's counter of preemptions had risen."""
    events = run.frames.lifecycle
    if not events.empty:
        return events.loc[events["event"] == "preempted", "t_ns"]
    values = _values(run, "preemptions")
    return values.index.to_series()[values.diff().fillna(0.0) > 0]


def kv_usage(run: Run) -> KvUsage | None:
    """KV blocks in use over time; a share of the cache where blocks are not shown; else None."""
    config = run.manifest.target.config if run.manifest.target else None
    total = (config or {}).get("num_blocks")
    free = _joined(_stepped(run, "free_blocks"), _scraped(run, "free_blocks"))
    if free is not None and total is not None:
        x, blocks = free
        return KvUsage(series=min_max(x, total - blocks), total=total, unit="blocks in use")
    share = _scraped(run, "kv_usage")
    return (
        None if share is None else KvUsage(series=min_max(*share), total=None, unit="share in use")
    )


def _joined(stepped: Points | None, scraped: Points | None) -> Points | None:
    """The step log, then what was scraped after the last step."""
    if stepped is None or scraped is None:
        return stepped or scraped
    is_later = scraped[0] > stepped[0][-1]
    x, y = (np.append(a, b[is_later]) for a, b in zip(stepped, scraped, strict=True))
    return x, y


def _stepped(run: Run, column: str) -> Points | None:
    steps = run.frames.steps.sort_values("started_ns")
    if steps.empty:
        return None
    level = steps[column].to_numpy(dtype=np.float64)
    x = run.clock.seconds(pd.concat([steps["started_ns"], steps["ended_ns"].tail(1)]))
    return x, np.append(level, level[-1])


def _scraped(run: Run, role: str) -> Points | None:
    values = _values(run, role)
    if values.empty:
        return None
    return run.clock.seconds(values.index.to_series()), values.to_numpy()


def _values(run: Run, role: str) -> pd.Series:
    """What the server showed under that role, by time; empty where it did not."""
    metrics = run.manifest.target.spec.get("metrics", {}) if run.manifest.target else {}
    source = metrics.get(role)
    if source is None:
        return pd.Series(dtype=np.float64)
    scraped = run.frames.server_metrics
    rows = scraped[scraped["name"] == source["name"]]
    wanted = source.get("labels", {}).items()
    is_wanted = [wanted <= json.loads(labels).items() for labels in rows["labels"]]
    values: pd.Series = rows[np.array(is_wanted, dtype=bool)].groupby("t_ns")["value"].sum()
    return values
