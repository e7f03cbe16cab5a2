"""Connections that users left open: nothing on the wire tells the server that nobody reads.

The load resets them when it ends (`harness.load.client`). What the server learns from that reset it
did not find out by itself: how long it would have taken is only known to be longer.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.stats import Ints
from harness.records import Way

NEVER: Final = int(np.iinfo(np.int64).max)
_HELD: Final = (Way.STOP_READING, Way.VANISH)


def reset_by_us_ns(left: pd.DataFrame, requests: pd.DataFrame, facts: Facts) -> Ints:
    """For each request that was left: the earliest moment at which the load may have reset its
    connection, NEVER for those whose connection ended as they left.

    A load resets when all its requests have ended; of several loads on one server (`run.loops`) a
    request is of the one that was next to be read idle after it.
    """
    idle_ns = np.array([t_ns for t_ns, _ in facts.idle_loops], dtype=np.int64)
    ended_ns = requests["ended_ns"].to_numpy(dtype=np.int64)
    load_of = np.searchsorted(idle_ns, ended_ns)
    load_end = pd.Series(ended_ns).groupby(load_of).max()
    own_load = np.searchsorted(idle_ns, left["t0_ns"].to_numpy(dtype=np.int64))
    resets = pd.Series(own_load).map(load_end).fillna(NEVER).to_numpy(dtype=np.int64)
    return np.where(left["way"].isin(_HELD), resets, NEVER)


def reset_warnings(requests: pd.DataFrame, cancels: pd.DataFrame, facts: Facts) -> Iterator[str]:
    """How many figures end with the load's own reset."""
    held = int(requests.loc[requests["abandoned_ns"].notna(), "way"].isin(_HELD).sum())
    if not held:
        return
    what = f"{held} users left their connections open (stop_reading, vanish)"
    if not facts.has_lifecycle or not facts.clocks_agree:
        yield (
            f"{what}; the load resets these when it ends, so that latencies by gauge and counter "
            "are of that reset where the server had not noticed before"
        )
        return
    unnoticed = int(cancels["was_reset_by_us"].sum())
    if unnoticed:
        yield (
            f"{what}, of which the server had not noticed {unnoticed} when the load ended and "
            "reset them: their latencies are censored there"
        )
