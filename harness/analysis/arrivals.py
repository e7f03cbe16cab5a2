"""Did the requests of an open loop come when its schedule says? Pure, from rows and the manifest.

A latency from the sending is only what a user feels where requests are sent on time. What came late
shows in `start_delay_s` and in the figures from the intended start; what was never sent has no row,
so it is in no figure at all and must be said.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.figure import Figure
from harness.analysis.frames import RunFrames
from harness.records import Metric
from harness.words import quantity

# Late is a p99 of the delay above this share of the median TTFT; but no timer is finer than this.
_LATE_SHARE: Final = 0.1
_TIMER_S: Final = 0.01


def arrival_warnings(frames: RunFrames, figures: Mapping[str, Figure]) -> Iterator[str]:
    """What must be said of the schedule; nothing of a closed loop."""
    arrivals = frames.manifest.get("arrivals")
    if arrivals is None:
        return
    planned, sent = int(arrivals["planned"]), len(frames.requests)
    if sent < planned:
        yield (
            f"{planned - sent:,} of {planned:,} requests of the schedule were not sent: the load "
            "ended before their turn came, or a load process died; no figure has them in it, so "
            "those from the intended start are better than the truth"
        )
    delay, ttft = figures.get("start_delay_s"), figures.get("ttft_s")
    if not isinstance(delay, Metric) or delay.p99 is None:
        return
    median_s = ttft.p50 if isinstance(ttft, Metric) and ttft.p50 is not None else 0.0
    if delay.p99 <= max(_TIMER_S, _LATE_SHARE * median_s):
        return
    yield (
        f"requests were sent late: start_delay_s has a p99 of {quantity(delay.p99, 's')}; "
        f"{_why_late(frames.requests, int(arrivals['max_streams']))}; believe the figures from the "
        "intended start"
    )


def most_open(requests: pd.DataFrame) -> int:
    """The largest number of requests that were in flight at the same moment."""
    if requests.empty:
        return 0
    times = np.concatenate([requests["sent_ns"], requests["ended_ns"]])
    changes = np.repeat([1, -1], len(requests))
    in_order = np.lexsort((changes, times))  # who ends at the moment of a sending ends first
    return int(np.cumsum(changes[in_order]).max())


def _why_late(requests: pd.DataFrame, max_streams: int) -> str:
    if most_open(requests) >= max_streams:
        return (
            f"as many streams were open as there may be (`arrivals.max_streams`, {max_streams:,}): "
            "the server could not keep up with the schedule; raise the cap or lower the rate"
        )
    return (
        "the load generator could not keep up with the schedule: give it more processes "
        "(`--processes`) or lower the rate"
    )
