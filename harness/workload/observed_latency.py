"""Latencies and answer lengths seen by the load so far; some plans of leaving use them."""

import statistics
from collections import deque
from typing import Final

from harness.records import Delivery, Outcome, RequestRow

_WINDOW: Final = 101  # latest observations; enough that one stall does not move the median
_FIRST_STEP_NS: Final = 20_000_000  # assumed until a gap was seen: a usual decode step


class ObservedLatency:
    """Medians of the latest times to first token, and of the answers that ended by themselves."""

    def __init__(self) -> None:
        self._ttfts_ns: deque[int] = deque(maxlen=_WINDOW)
        self._own_ends: deque[int] = deque(maxlen=_WINDOW)

    def observe(self, row: RequestRow) -> None:
        if row.delivery is Delivery.STREAM and row.first_token_ns is not None:
            self._ttfts_ns.append(row.first_token_ns - row.sent_ns)
        if row.outcome is Outcome.COMPLETED and row.finish_reason == "stop":
            self._own_ends.append(row.tokens_read // row.n)

    def with_answers_of(self, tokens: int) -> "ObservedLatency":
        known = ObservedLatency()
        known._ttfts_ns = self._ttfts_ns
        known._own_ends.append(tokens)
        return known

    def ttft_ns(self) -> int | None:
        return int(statistics.median(self._ttfts_ns)) if self._ttfts_ns else None

    def answer_tokens(self, max_tokens: int) -> int:
        if not self._own_ends:
            return max_tokens
        return min(max_tokens, int(statistics.median(self._own_ends)))


class StepEstimate:
    def __init__(self) -> None:
        self._gaps_ns: deque[int] = deque(maxlen=_WINDOW)

    def observe(self, gap_ns: int) -> None:
        if gap_ns > 0:  # two tokens in one receive say nothing of the step
            self._gaps_ns.append(gap_ns)

    def observe_streams(self, gap_ns: int, streams: int) -> None:
        """One gap that this number of streams had."""
        if gap_ns > 0:
            self._gaps_ns.extend([gap_ns] * min(streams, _WINDOW))

    def median_ns(self) -> int:
        return int(statistics.median(self._gaps_ns)) if self._gaps_ns else _FIRST_STEP_NS
