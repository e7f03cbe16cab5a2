"""The waiting requests, in the order in which they are to be admitted.

Both find whatever they are asked for without walking through all that wait.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from reference_engine.config import SchedulingPolicy
from reference_engine.request import Request


class WaitingQueue(Protocol):
    """What the scheduler needs of a queue. `head` and `pop` are for a queue that is not empty."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    @property
    def head(self) -> Request: ...
    def push(self, request: Request) -> None: ...
    def push_front(self, request: Request) -> None: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...


class FcfsQueue:
    """First come, first served; who was preempted goes first."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def head(self) -> Request:
        return next(iter(self._requests.values()))

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]


class PriorityQueue:
    """The most important first, of equals the first to arrive: a preempted one is before those."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # sorted by rank, the head last: popping moves nothing

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return reversed(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[-1]

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_urgency)

    def push_front(self, request: Request) -> None:
        self.push(request)

    def pop(self) -> Request:
        return self._requests.pop()

    def remove(self, request: Request) -> None:
        at = bisect_left(self._requests, _urgency(request), key=_urgency)
        assert self._requests[at] is request
        del self._requests[at]


def make_queue(policy: SchedulingPolicy) -> WaitingQueue:
    return FcfsQueue() if policy == "fcfs" else PriorityQueue()


def _urgency(request: Request) -> tuple[int, int]:
    """Unique, since arrivals are; the largest is the head."""
    return -request.priority, -request.arrival
