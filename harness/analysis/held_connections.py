"""Connections that users left open: nothing on the wire tells the server that nobody reads.

They are held until the server had time to settle after the load, and then reset
(`harness.load.keeper`). What the server learns from that reset it did not find out by itself: how
long it would have taken is only known to be longer. A run that was cut short resets them as its
load ends.
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

    Where the run did not come as far as to say until when it held them, that is when all requests
    of the load had ended; of several loads on one server (`run.loops`) a request is of the one that
    was next to be read idle after it.
    """
    t0_ns = left["t0_ns"].to_numpy(dtype=np.int64)
    held_ns = np.array([*facts.held_until_ns, NEVER], dtype=np.int64)
    ends_ns = held_ns[np.searchsorted(held_ns, t0_ns)]
    resets = np.where(ends_ns < NEVER, ends_ns, _ends_of_loads(t0_ns, requests, facts))
    return np.where(left["way"].isin(_HELD), resets, NEVER)


def _ends_of_loads(t0_ns: Ints, requests: pd.DataFrame, facts: Facts) -> Ints:
    """For each moment, when the last request of its load had ended."""
    idle_ns = np.array([t_ns for t_ns, _ in facts.idle_loops], dtype=np.int64)
    ended_ns = requests["ended_ns"].to_numpy(dtype=np.int64)
    load_of = np.searchsorted(idle_ns, ended_ns)
    load_end = pd.Series(ended_ns).groupby(load_of).max()
    own_load = np.searchsorted(idle_ns, t0_ns)
    return pd.Series(own_load).map(load_end).fillna(NEVER).to_numpy(dtype=np.int64)


def reset_warnings(requests: pd.DataFrame, cancels: pd.DataFrame, facts: Facts) -> Iterator[str]:
    """How many figures end with the load's own reset."""
    held = int(requests.loc[requests["abandoned_ns"].notna(), "way"].isin(_HELD).sum())
    if not held:
        return
    what = f"{held} users left their connections open (stop_reading, vanish)"
    if not facts.has_lifecycle or not facts.clocks_agree:
        yield (
            f"{what}; these are reset when the server had time to settle: where it had not noticed "
            "before, latencies by gauge and counter are of that reset"
        )
        return
    unnoticed = int(cancels["was_reset_by_us"].sum())
    if unnoticed:
        yield (
            f"{what}, of which the server had not noticed {unnoticed} when the run ended and "
            "reset them: their latencies are censored there"
        )
