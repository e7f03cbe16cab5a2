"""What the clients read, in tokens, as well as the run can tell.

Tokens are not events. Where the server said in each event how many there were, that count stands.
Else events were counted, and the requests that were read to the end tell how many tokens an event
brought: their own final usage / the events that showed text.
"""

import numpy as np
import pandas as pd

from harness.analysis.stats import Floats
from harness.records import Outcome, TokenCounting


def tokens_per_event(requests: pd.DataFrame) -> float | None:
    """Sum of final usage / sum of counted events, over completed event-counted requests.

    None where no such request told its usage.
    """
    told = requests[
        (requests["token_counting"] == TokenCounting.EVENTS)
        & (requests["outcome"] == Outcome.COMPLETED)
        & requests["completion_tokens"].notna()
    ]
    events = int(told["tokens_read"].sum())
    return int(told["completion_tokens"].sum()) / events if events else None


def tokens_read(requests: pd.DataFrame) -> Floats:
    """Tokens that each client had read when it ended or left.

    A completed request's own final count where it has one; else the count of the row, with events
    turned into tokens by `tokens_per_event`.
    """
    counted = requests["tokens_read"].to_numpy(dtype=float)
    by_events = (requests["token_counting"] == TokenCounting.EVENTS).to_numpy(dtype=bool)
    scaled = counted * np.where(by_events, tokens_per_event(requests) or 1.0, 1.0)
    final = requests["completion_tokens"].to_numpy(dtype=float, na_value=np.nan)
    completed = (requests["outcome"] == Outcome.COMPLETED).to_numpy(dtype=bool)
    return np.where(completed & ~np.isnan(final), final, scaled)


def token_counting(requests: pd.DataFrame) -> str | None:
    """What `tokens_read` rests on: usage, events, events_calibrated, or mixed."""
    kinds = set(requests["token_counting"])
    if not kinds:
        return None
    if len(kinds) > 1:
        return "mixed"
    if kinds == {TokenCounting.EVENTS} and tokens_per_event(requests) is not None:
        return "events_calibrated"
    return str(kinds.pop())
