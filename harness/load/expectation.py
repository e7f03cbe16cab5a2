"""What a user may expect of a server, from what the load has seen so far: pure.

Some plans need it: who leaves at a share of the time to first token must know how long that takes
here, under this load (the wait in the queue is part of it). Only those who saw a first token tell
it, so a load in which everybody leaves before one learns nothing new.
"""

import statistics
from collections import deque
from typing import Final

from harness.records import Delivery, Outcome, RequestRow

_WINDOW: Final = 101  # latest observations; enough that one stall does not move the median


class Expectation:
    """Medians of the latest times to first token, and of the answers that ended by themselves."""

    def __init__(self) -> None:
        self._ttfts_ns: deque[int] = deque(maxlen=_WINDOW)
        self._own_ends: deque[int] = deque(maxlen=_WINDOW)

    def observe(self, row: RequestRow) -> None:
        """Note what a request that has ended tells."""
        if row.delivery is Delivery.STREAM and row.first_token_ns is not None:
            self._ttfts_ns.append(row.first_token_ns - row.sent_ns)
        if row.outcome is Outcome.COMPLETED and row.finish_reason == "stop":
            self._own_ends.append(row.tokens_read // row.n)

    def ttft_ns(self) -> int | None:
        """The usual time to first token; None before any was seen."""
        return int(statistics.median(self._ttfts_ns)) if self._ttfts_ns else None

    def answer_tokens(self, max_tokens: int) -> int:
        """The usual length of one answer: all that was asked for, unless answers end before."""
        if not self._own_ends:
            return max_tokens
        return min(max_tokens, int(statistics.median(self._own_ends)))
