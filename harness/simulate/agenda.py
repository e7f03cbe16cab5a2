"""The acts that are to come, in virtual time.

At the same instant what a step has made comes first, then leaving, then what happens to replicas,
then arriving, then the boundary at which an engine applies what it has heard, then the end of the
load. Equal kinds come in the order in which they were put down.
"""

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush

Act = Callable[[int], object]


class Kind(IntEnum):
    COMPLETION = 0
    LEAVE = 1
    OUTAGE = 2
    ARRIVAL = 3
    BOUNDARY = 4
    LOAD_END = 5


class Agenda:
    def __init__(self) -> None:
        self._acts: list[tuple[int, int, int, Act]] = []
        self._count = 0

    def put(self, t_ns: int, kind: Kind, act: Act) -> None:
        self._count += 1
        heappush(self._acts, (t_ns, kind, self._count, act))

    def do_next(self, until_ns: int) -> int | None:
        """The instant of the next act, which is done; None if there is none up to the given one."""
        if not self._acts or self._acts[0][0] > until_ns:
            return None
        t_ns, _, _, act = heappop(self._acts)
        act(t_ns)
        return t_ns
