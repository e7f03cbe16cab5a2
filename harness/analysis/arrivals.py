"""Did the requests of an open loop come when its schedule says? Pure, from rows and the manifest.

A latency from the sending is only what a user feels where requests are sent on time. What came late
shows in `start_delay_s` and in the figures from the intended start. What was due and never sent is
in these, too, as a wait that had not ended with the load; the figures from the sending are without.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import Figure
from harness.analysis.frames import RunFrames
from harness.analysis.lost import why_unsent
from harness.records import Metric, Role
from harness.words import quantity

# Late is a p99 of the delay above this share of the median TTFT; but no timer is finer than this.
_LATE_SHARE: Final = 0.1
_TIMER_S: Final = 0.01
# Of a schedule of which a larger share was due and not sent, not even a p95 can be known.
_MOST_UNSENT: Final = 0.05


def sent_of_schedule(frames: RunFrames) -> dict[str, int] | None:
    """How many requests the schedule had, and how many were sent; None for a closed loop."""
    arrivals = frames.manifest.get("arrivals")
    if arrivals is None:
        return None
    sent = int((frames.requests["role"] == Role.USER).sum())
    return {"planned": int(arrivals["planned"]), "sent": sent}


def why_schedule_means_nothing(frames: RunFrames, facts: Facts) -> Iterator[str]:
    """Where so much was left unsent that no figure is of the schedule."""
    counted = sent_of_schedule(frames)
    unsent = len(facts.unsent_to_stay_s) + len(facts.unsent_to_leave_s)
    if counted is None or unsent <= _MOST_UNSENT * (counted["sent"] + unsent):
        return
    yield (
        f"{unsent:,} of {counted['sent'] + unsent:,} requests that were due were not sent when the "
        f"load ended, more than {_MOST_UNSENT:.0%}: this load is not the schedule's; "
        f"{why_unsent(frames.manifest) or _why_late(frames)}"
    )


def arrival_warnings(frames: RunFrames, figures: Mapping[str, Figure]) -> Iterator[str]:
    """What must be said of the schedule; nothing of a closed loop."""
    arrivals = frames.manifest.get("arrivals")
    if arrivals is None:
        return
    counted = sent_of_schedule(frames)
    if counted is not None and counted["sent"] < counted["planned"]:
        yield (
            f"{counted['planned'] - counted['sent']:,} of {counted['planned']:,} requests of the "
            "schedule were not sent: the load ended before their turn came, or a load process "
            "died; those that were due are in `start_delay_s` and in the figures from the intended "
            "start, as waits that had not ended (censored), and in no other figure"
        )
    delay, ttft = figures.get("start_delay_s"), figures.get("ttft_s")
    if not isinstance(delay, Metric):
        return
    lost = why_unsent(frames.manifest) if delay.n_censored else None
    late_s = delay.lower_bounds["p99"] if delay.p99 is None else delay.p99
    median_s = ttft.p50 if isinstance(ttft, Metric) and ttft.p50 is not None else 0.0
    if late_s <= max(_TIMER_S, _LATE_SHARE * median_s):
        return
    more = "more than " if delay.p99 is None else ""
    yield (
        f"requests were sent late: start_delay_s has a p99 of {more}{quantity(late_s, 's')}; "
        f"{lost or _why_late(frames)}; believe the figures from the intended start"
    )


def most_open(requests: pd.DataFrame) -> int:
    """The largest number of requests that were in flight at the same moment."""
    if requests.empty:
        return 0
    times = np.concatenate([requests["sent_ns"], requests["ended_ns"]])
    changes = np.repeat([1, -1], len(requests))
    in_order = np.lexsort((changes, times))  # who ends at the moment of a sending ends first
    return int(np.cumsum(changes[in_order]).max())


def _why_late(frames: RunFrames) -> str:
    max_streams = int(frames.manifest["arrivals"]["max_streams"])
    if most_open(frames.requests) >= max_streams:
        return (
            f"as many streams were open as there may be (`arrivals.max_streams`, {max_streams:,}): "
            "the server could not keep up with the schedule; raise the cap or lower the rate"
        )
    return (
        "the load generator could not keep up with the schedule: give it more processes "
        "(`--processes`) or lower the rate"
    )
