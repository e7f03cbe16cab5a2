"""What the clients read, in tokens, as well as the run can tell.

Tokens are not events. Where the server said in each event how many there were, that count stands.
Else events were counted, and the requests that were read to the end tell how many tokens an event
brought: their own final usage / the events that showed text.
"""

import math

import numpy as np
import pandas as pd

from harness.analysis.distributions import t_quantile
from harness.analysis.stats import Bools, Floats
from harness.analysis.token_times import without_tokens
from harness.records import Outcome, TokenCounting


def tokens_per_event(requests: pd.DataFrame) -> float | None:
    """Sum of final usage / sum of counted events, over completed event-counted requests.

    None where no such request told its usage.
    """
    told = without_tokens(requests)[
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


def prompt_total(requests: pd.DataFrame, wanted: Bools) -> tuple[float, float] | None:
    """Prompt tokens of the `wanted` requests, and by how much that may be off (95 %).

    Many servers tell it only at the end of an answer, so of those who left nobody knows it: their
    mean is taken to be that of the k requests that were told. The sum of g such prompts lies within
    t(k - 1) * s * sqrt(g + g^2 / k), where the first term is their own scatter and the second that
    of the mean. None where too few were told to tell the sum from 0. Source: Hahn and Meeker,
    Statistical Intervals, section 4.8 (prediction interval of a future mean).
    """
    known = requests["prompt_tokens"].dropna().astype(float)
    prompts = requests.loc[wanted, "prompt_tokens"].astype(float)
    guessed = int(prompts.isna().sum())
    if len(known) < (2 if guessed else 1):
        return None
    total = float(prompts.fillna(known.mean()).sum())
    if not guessed:
        return total, 0.0
    k, scatter = len(known), float(known.std(ddof=1))
    spread = t_quantile(0.975, k - 1) * scatter * math.sqrt(guessed + guessed**2 / k)
    return (total, spread) if spread < total else None


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
