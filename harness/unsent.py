"""Which arrivals of an open loop were never sent, and how long their users had waited in the end.

Where a cap keeps requests back or a load process dies, the schedule still tells who came and when:
it follows from the plan. They waited from their time until the load ended, at least; without them
the figures from the intended start would be of those alone who got through.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from harness.load.expectation import Expectation
from harness.load.plan import AbandonLoad, LoadPlan
from harness.load.schedule import Arrival, plan_arrival, planned_arrivals
from harness.manifest import Manifest, UnsentArrivals


class Sent(NamedTuple):
    """An arrival that was sent: its number in the schedule, and stamps of its row."""

    number: int
    intended_start_ns: int
    ended_ns: int


class _AnyExpectation(Expectation):
    """Enough to draw whether somebody leaves; when does not matter."""

    def ttft_ns(self) -> int:
        return 1


def find_unsent(plan: LoadPlan, manifest: Manifest, sent: Sequence[Sent]) -> UnsentArrivals:
    """Of all loops together. `plan` is the last loop's. Raises ConfigError for an unread trace."""
    found = UnsentArrivals()
    ends_ns = [reading.t_ns for reading in manifest.idle.loops]
    for number in range(plan.seed - manifest.seed + 1):
        of_loop = [one for one in sent if bisect(ends_ns, one.intended_start_ns) == number]
        loop = msgspec.structs.replace(plan, seed=manifest.seed + number)
        for waited_s, arrival in _still_waiting(loop, of_loop):
            waits = found.to_stay_s if _is_to_stay(loop, arrival) else found.to_leave_s
            waits.append(waited_s)
    return found


def _still_waiting(plan: LoadPlan, sent: Sequence[Sent]) -> Iterator[tuple[float, Arrival]]:
    """Who was due when the last request ended, and had waited how long, in seconds."""
    if plan.open_loop is None or not sent:
        return
    intended_ns = {one.number: one.intended_start_ns for one in sent}
    missing: list[Arrival] = []
    begins_ns = []
    for arrival in planned_arrivals(plan.open_loop.schedule, seed=plan.seed):
        if arrival.number in intended_ns:
            begins_ns.append(intended_ns[arrival.number] - int(arrival.offset_s * 1e9))
        else:
            missing.append(arrival)
    load_s = (max(one.ended_ns for one in sent) - min(begins_ns)) / 1e9
    for arrival in missing:
        if arrival.offset_s <= load_s:
            yield load_s - arrival.offset_s, arrival


def _is_to_stay(plan: LoadPlan, arrival: Arrival) -> bool:
    assert isinstance(plan.load, AbandonLoad)
    drawn = plan_arrival(plan.load, arrival, seed=plan.seed, seen=_AnyExpectation())
    return drawn.intent.planned_abandon is None
