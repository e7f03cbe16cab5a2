"""When replicas go and come back.

An outage is due at its time; what has gone is known only when it has, since a replica that drains
goes once it has no requests. So its way back, and the next turn of a rolling outage, count from
there.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from typing import Literal, NamedTuple

from harness.simulate.lags import NS
from harness.workload.cluster import Outage

Change = Literal["die", "drain", "back"]


class OutageTurn(NamedTuple):
    """A change of one replica; in a rolling outage `rest` are the replicas that come after it."""

    t_ns: int
    order: int
    change: Change
    worker: str
    outage: Outage
    rest: tuple[str, ...]


class Outages:
    """The owner asks `due_ns`, takes the turn, and says `gone` when its replica has gone.

    A replica that is away already, or on its way, is passed over.
    """

    def __init__(
        self, outages: Sequence[Outage], workers: Sequence[str], random: Random, *, start_ns: int
    ) -> None:
        self._turns: list[OutageTurn] = []
        self._num_turns = 0
        self._away: dict[str, OutageTurn | None] = {}  # None: a fault's doing
        for outage in outages:
            hit = sorted(random.sample(range(len(workers)), num_hit(outage, len(workers))))
            names = tuple(workers[place] for place in hit)
            at_ns = start_ns + round(outage.at_s * NS)
            if outage.rolling:
                self._add(at_ns, outage.kind, names[0], outage, names[1:])
            else:
                for name in names:
                    self._add(at_ns, outage.kind, name, outage, ())

    def due_ns(self) -> int | None:
        return self._turns[0].t_ns if self._turns else None

    def take(self) -> OutageTurn | None:
        """The turn that is due; None if it is of a replica that is away already."""
        turn = heappop(self._turns)
        if turn.change == "back":
            del self._away[turn.worker]
            self._roll_on(turn)
            return turn
        if turn.worker in self._away:
            self._roll_on(turn)
            return None
        self._away[turn.worker] = turn
        return turn

    def gone(self, worker: str, t_ns: int) -> None:
        """A replica that a fault has killed is gone, too, and never comes back."""
        turn = self._away.setdefault(worker, None)
        if turn is None or turn.outage.back_after_s is None:
            return
        back_ns = t_ns + round(turn.outage.back_after_s * NS)
        self._add(back_ns, "back", worker, turn.outage, turn.rest)

    def _roll_on(self, turn: OutageTurn) -> None:
        if turn.rest:
            self._add(turn.t_ns, turn.outage.kind, turn.rest[0], turn.outage, turn.rest[1:])

    def _add(
        self, t_ns: int, change: Change, worker: str, outage: Outage, rest: tuple[str, ...]
    ) -> None:
        self._num_turns += 1
        heappush(self._turns, OutageTurn(t_ns, self._num_turns, change, worker, outage, rest))


def num_hit(outage: Outage, num_replicas: int) -> int:
    """At least one: the share that is hit is then larger than planned."""
    return max(1, round(outage.share * num_replicas))


def coarse_shares(outages: Sequence[Outage], num_replicas: int) -> list[str]:
    """A note for each outage that so few replicas cannot have at its share."""
    notes = []
    for outage in outages:
        hit = num_hit(outage, num_replicas)
        if abs(hit / num_replicas - outage.share) > 0.01:
            notes.append(
                f"the outage at {outage.at_s:g} s hits {hit} of {num_replicas} simulated replicas "
                f"instead of {outage.share:.0%}"
            )
    return notes
