"""What a load shows of itself while it goes on: no figure of the result, but enough to see early
that something is wrong.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import Final

from harness.records import LifecycleEvent

MOST_REMEMBERED: Final = 1000
FORGOTTEN_NS: Final = 10_000_000_000  # who was freed so long ago had not left, but was answered


class LatencySoFar:
    """The cancel latency of those who left, from their t0 and the engine's own log.

    Its state: who left and is not yet known to be freed, the other way round, and the latest
    latencies. A request that is never freed stays among the first and is in no latency: the live
    figure knows nothing of ghosts.
    """

    def __init__(self) -> None:
        self._left_ns: dict[str, int] = {}
        self._freed_ns: dict[str, int] = {}
        self._latest_s: deque[float] = deque(maxlen=MOST_REMEMBERED)

    def add(self, left_ns: Mapping[str, int], new: Sequence[LifecycleEvent]) -> None:
        """Who left since the last call, with their t0, and what has come to the log since."""
        self._left_ns |= left_ns
        for event in new:
            if event.event == "blocks_freed" and event.client_request_id is not None:
                self._freed_ns[event.client_request_id] = event.t_ns
        for request in self._left_ns.keys() & self._freed_ns.keys():
            self._latest_s.append((self._freed_ns.pop(request) - self._left_ns.pop(request)) / 1e9)
        if new:
            self._forget(new[-1].t_ns - FORGOTTEN_NS)

    @property
    def typical_s(self) -> float | None:
        """The median of the latest; None while there is none."""
        return median(self._latest_s) if self._latest_s else None

    def _forget(self, before_ns: int) -> None:
        old = takewhile(lambda freed: freed[1] < before_ns, self._freed_ns.items())
        for request, _ in list(old):
            del self._freed_ns[request]
