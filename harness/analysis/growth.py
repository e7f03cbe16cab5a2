"""Does the server grow? Memory and open handles of its processes, in the calm after each loop.

After each loop nothing runs, so whatever is there more than after the last one was kept. The slope
is over the requests that were left by then, as with leaked slots and blocks.
"""

from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.cancel_figures import NOBODY_LEFT
from harness.analysis.facts import Facts
from harness.analysis.figure import Figure, Figures, NotMeasurable, same_reason
from harness.analysis.frames import RunFrames
from harness.analysis.held_open import held_open, num_abandoned
from harness.analysis.stats import Floats, Ints, theil_sen
from harness.records import Metric

# With n readings Sen's widest interval, from the least slope to the largest, holds the true one in
# 1 - 2 / n! of all cases: 67 % of three, 92 % of four, 98 % of five.
FEWEST_LOOPS: Final = 5
_NOT_THE_SERVER: Final = ("machine", "load")  # and "load 0", "load 1", ...
_FIGURES: Final = {
    "memory_per_abandon": ("rss_bytes", "bytes"),
    "handles_per_abandon": ("handles", "handles"),
}


def growth_figures(frames: RunFrames, facts: Facts) -> Figures:
    """memory_per_abandon and handles_per_abandon, of all the server's processes together.

    Theil and Sen's slope (JASA 63 (1968), 1379-1389) of the readings after each loop over the
    requests left by then. A server also grows by what it keeps on purpose (caches, logs of a
    bounded size) until these are full: the first loops of a short run show that.
    """
    server = frames.cpu[~frames.cpu["process"].str.startswith(_NOT_THE_SERVER)]
    times = np.array([t_ns for t_ns, _ in facts.idle_loops], dtype=np.int64)
    if len(times) < FEWEST_LOOPS:
        reason = (
            f"not enough data for a slope: {len(times)} calm readings, and {FEWEST_LOOPS} are "
            "needed (`run.loops`)"
        )
        return same_reason(tuple(_FIGURES), reason)
    if not num_abandoned(frames.requests):
        return same_reason(tuple(_FIGURES), NOBODY_LEFT)
    left = held_open(frames.requests).left_by(times).astype(float)
    return {
        name: _slope(server, column, unit, times, left) for name, (column, unit) in _FIGURES.items()
    }


def _slope(server: pd.DataFrame, column: str, unit: str, times: Ints, left: Floats) -> Figure:
    known = server.dropna(subset=column) if column in server else server.iloc[:0]
    if known.empty:
        return NotMeasurable("the server's processes are not on this machine, or not ours to see")
    of_processes = [_latest(rows, column, times) for _, rows in known.groupby("process")]
    values = np.sum(of_processes, axis=0)
    if len(np.unique(left)) < len(left):
        return NotMeasurable("in one of the loops nobody left")
    slope, interval = theil_sen(values, left)
    return Metric(
        unit=unit,
        n=len(times),
        mean=slope,
        mean_ci95=interval,
        method="gauge",
    )


def _latest(rows: pd.DataFrame, column: str, times: Ints) -> Floats:
    """The value at each time: the latest that was read by then."""
    ordered = rows.sort_values("t_ns", kind="stable")
    latest = np.searchsorted(ordered["t_ns"].to_numpy(dtype=np.int64), times, side="right") - 1
    values = ordered[column].to_numpy(dtype=float)
    return np.asarray(values[np.maximum(latest, 0)], dtype=np.float64)
