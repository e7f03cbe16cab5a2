"""When steps began, as clients see it: the tokens of a step come together, when it has ended.

A server that works in steps takes in who has come since, and drops who has gone, when the next step
begins. So a request that is sent at any time waits until the next tokens of anybody come; where
nobody holds anything, it need not wait.
"""

from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.held_open import Held
from harness.analysis.stats import Bools, Ints
from harness.analysis.token_times import first_times, token_gaps

_TOGETHER: Final = 0.5  # of the median gap: tokens no further apart than this are of one step
_ENDS: Final = ("first_token_ns", "last_token_ns")
_GRAINS: Final = 16  # of that time: of the tokens in one of these only the first is looked at


def step_boundaries(requests: pd.DataFrame) -> Ints:
    """The first token of each step that brought any (ns), ascending."""
    gaps, _ = token_gaps(requests)
    if not len(gaps):
        return np.empty(0, dtype=np.int64)
    together_ns = int(_TOGETHER * float(np.median(gaps, overwrite_input=True)) * 1e9)
    times = first_times(requests, every_ns=max(1, together_ns // _GRAINS))
    boundaries = []
    following = 0
    while following < len(times):
        boundaries.append(times[following])
        following = int(times.searchsorted(times[following] + together_ns, side="right"))
    return np.array(boundaries, dtype=np.int64)


def mean_wait_s(requests: pd.DataFrame, held: Held, step_s: float) -> float:
    """How long requests wait for a step to begin, on average over all that were sent.

    Only while somebody reads does the end of each step show. Who was sent while all others were
    still in their prefill waited no longer than until the next tokens, nor than a step.
    """
    boundaries, sent = step_boundaries(requests), held.started_ns
    following = np.searchsorted(boundaries, sent)
    is_busy = (held.at(sent - 1) > 0) & (following < len(boundaries))
    sent = sent[is_busy]
    waits_s = (boundaries[following[is_busy]] - sent) / 1e9
    waits_s = np.where(_is_read(requests, sent), waits_s, np.minimum(waits_s, step_s))
    return float(waits_s.sum()) / max(1, len(is_busy))


def _is_read(requests: pd.DataFrame, t_ns: Ints) -> Bools:
    """Whether there is an answer at each time of which a token had come, and more was to come."""
    first, last = (requests[name].dropna().astype("int64") for name in _ENDS)
    begun, over = (np.searchsorted(np.sort(times), t_ns, side="right") for times in (first, last))
    return begun > over
