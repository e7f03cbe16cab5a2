"""A schedule that broke an invariant is made small, on a live server on which it may not break it
each time.

A smaller schedule is kept if somebody still leaves in it and it breaks the same invariant. The
number of its tries is such that one that breaks it half as often as the first would be missed with
a chance of 5 % at most; the first failure ends them. So a failure that comes now and then stays
one, and is never made rarer by more than half at once. First visits go, by halves (Zeller and
Hildebrandt's delta debugging), and then what is special about those that are left.
"""

import math
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from harness.records import Delivery, Way
from harness.search.schedule import Leave, Schedule, Visit

MOST_TRIES: Final = 12  # of a reduction
_MISSED: Final = 0.05
_USUAL: Final = Visit().prompt  # tokens

# Plays a schedule once, on a fresh server: whether it breaks the invariant.
Breaks = Callable[[Schedule], bool]


def tries_for(rate: float) -> int:
    """How many tries a reduction gets, of a schedule that breaks the invariant this often."""
    half = rate / 2
    return min(MOST_TRIES, max(1, math.ceil(math.log(_MISSED) / math.log(1 - half))))


def shrink(
    schedule: Schedule, breaks: Breaks, *, rate: float, go_on: Callable[[], bool]
) -> Schedule:
    """The smallest schedule that was found. `go_on`: whether there is still time."""
    tries = tries_for(rate)

    def still_breaks(smaller: Schedule) -> bool:
        return bool(smaller.leaves) and any(breaks(smaller) for _ in range(tries) if go_on())

    schedule = _fewer_visits(schedule, still_breaks)
    is_smaller = True
    while is_smaller and go_on():
        is_smaller = False
        for simpler in simplifications(schedule):
            if still_breaks(simpler):
                schedule, is_smaller = simpler, True
                break
    return schedule


def _fewer_visits(schedule: Schedule, still_breaks: Breaks) -> Schedule:
    size = len(schedule.visits)
    while size >= 1:
        size = min(size, len(schedule.visits))
        number = 0
        while number < len(schedule.visits) > 1:
            gone = frozenset(range(number, min(number + size, len(schedule.visits))))
            smaller = schedule.without(gone)
            if smaller.visits and still_breaks(smaller):
                schedule = smaller
            else:
                number += size
        size //= 2
    return schedule


def simplifications(schedule: Schedule) -> Iterator[Schedule]:
    """One thing simpler, the greatest step first."""
    if schedule.bystanders:
        yield msgspec.structs.replace(schedule, bystanders=0)
    for number, visit in enumerate(schedule.visits):
        for simpler in _simpler(visit):
            yield schedule.with_visit(number, simpler)


def _simpler(visit: Visit) -> Iterator[Visit]:
    changes: list[dict[str, object]] = [
        {"features": tuple(one for one in visit.features if one is not feature)}
        for feature in visit.features
    ]
    changes += [
        {"n": 1},
        {"delivery": Delivery.STREAM},
        {"shared": 0},
        {"same_id": False},
        {"repeats": None, "same_id": False},
        {"at": 0.0},
        {"prompt": min(visit.prompt, _USUAL), "shared": min(visit.shared, _USUAL)},
    ]
    if visit.leave is not None:
        changes += [{"leave": leave} for leave in _simpler_leaves(visit.leave)]
    for change in changes:
        if (simpler := msgspec.structs.replace(visit, **change)) != visit:
            yield simpler


def _simpler_leaves(leave: Leave) -> Iterator[Leave]:
    if leave.way is not Way.FIN:
        yield msgspec.structs.replace(leave, way=Way.FIN)
    if leave.late:
        yield msgspec.structs.replace(leave, late=0.0)
    if leave != (plain := Leave(way=leave.way)):
        yield plain
