"""When steps began, as clients see it: the tokens of a step come together, when it has ended.

A server that works in steps takes in who has come since, and drops who has gone, when the next step
begins. So a request that is sent at any time waits until the next tokens of anybody come; where
nobody holds anything, it need not wait.
"""

from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.held_open import Held
from harness.analysis.stats import Ints
from harness.analysis.token_times import sorted_times, token_gaps

_TOGETHER: Final = 0.5  # of the median gap: tokens no further apart than this are of one step


def step_boundaries(requests: pd.DataFrame) -> Ints:
    """The first token of each step that brought any (ns), ascending."""
    gaps, _ = token_gaps(requests)
    if not len(gaps):
        return np.empty(0, dtype=np.int64)
    times = sorted_times(requests)
    together_ns = int(_TOGETHER * float(np.median(gaps)) * 1e9)
    boundaries = []
    following = 0
    while following < len(times):
        boundaries.append(times[following])
        following = int(times.searchsorted(times[following] + together_ns, side="right"))
    return np.array(boundaries, dtype=np.int64)


def mean_wait_s(requests: pd.DataFrame, held: Held) -> float:
    """How long requests wait for a step to begin, on average over all that were sent."""
    boundaries, sent = step_boundaries(requests), held.started_ns
    following = np.searchsorted(boundaries, sent)
    is_busy = (held.at(sent - 1) > 0) & (following < len(boundaries))
    waits = boundaries[following[is_busy]] - sent[is_busy]
    return float(waits.sum()) / 1e9 / max(1, len(sent))
