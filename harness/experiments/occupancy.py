"""Occupancy: how many requests run together, and so how many slots are still held after leaves.

One request per slot is sent at once: the number of requests that do not run together is the number
of slots still held. A server that refuses requests beyond its slots refuses that number of them.
"""

import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final, NamedTuple

from harness.client.live_stream import join_all
from harness.client.shards import most_at_once
from harness.experiments.idle_server import TOGETHER_FLUSHES, TOGETHER_TOKENS
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.experiments.streams import Streams, is_refused, whole
from harness.records import RequestRow, Role

_TOGETHER_S: Final = 0.3  # that requests run together, which begin within this client's lateness
_FEWEST_TOKENS: Final = 12


class Counted(NamedTuple):
    """Requests sent at once. `at_once`: the most that ran together or, where requests beyond the
    slots are refused, how many were served. `waiting`: how many got no token; `refused`: how many
    of these were refused. `first_ns`: when the first tokens came; `begun_ns`: the longest time from
    a request's sending to its first token."""

    at_once: int
    waiting: int
    refused: int = 0
    first_ns: Sequence[int] = ()
    begun_ns: int = 0


class Occupancy:
    """`refused`: the requests that the last count found refused though nothing of ours ran."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.refused = 0

    def held(self, leave: Callable[[], int]) -> int:
        """`leave` makes some streams leave and returns their number. Returns how many slots are
        still held when the settle time is over. A count that finds none is final: it cannot get
        better. Raises CannotDecideError if the answers that were left may have ended."""
        left = leave()
        server = self._streams
        settled_ns = time.perf_counter_ns() + int(server.settle_s * 1e9)
        counted, late = self._count(server.patience.filler_s), 0
        if counted.at_once < server.slots and (not counted.waiting or counted.refused):
            server.pause(max(0.0, (settled_ns - time.perf_counter_ns()) / 1e9))
            begun = counted.first_ns
            counted = self._count(self._together_s)
            # As many requests take a while to begin; those that began later waited for a slot.
            late_ns = settled_ns + 2 * counted.begun_ns + int(_TOGETHER_S * 1e9)
            late = sum(first_ns > late_ns for first_ns in begun)
        held = max(server.slots - counted.at_once, late)
        if left and held <= 0:
            server.check_ran_on()
        return held

    def running_at_once(self, extra: int = 0) -> int:
        """How many of one request per slot, and `extra` more, run at the same time."""
        return self._count(self._together_s, extra).at_once

    @property
    def _together_s(self) -> float:
        """One short request per slot takes half of it on a server with nothing else to do."""
        server = self._streams
        return 2 * (server.ttft_s * (1 + server.slots) + 2 * self._tokens * server.step_s)

    @property
    def _tokens(self) -> int:
        """The tokens of an answer that counts slots; fewer than to find them if steps are long."""
        server = self._streams
        spared = max(0, TOGETHER_TOKENS - max(_FEWEST_TOKENS, ceil(_TOGETHER_S / server.step_s)))
        return max(
            server.facts.together_tokens - spared, int(TOGETHER_FLUSHES * server.facts.flush_tokens)
        )

    def _count(self, longest_s: float, extra: int = 0) -> Counted:
        """The requests are read to their end: abandoned, they could themselves hold slots. Each has
        `longest_s` since it was sent: by the time that a slow client has sent the last one, answers
        that nobody reads any more may have ended."""
        server = self._streams
        asked = server.short(self._tokens, role=Role.CHECK)
        streams = [server.start(asked) for _ in range(server.slots + extra)]
        join_all(streams, longest_s)
        refused = [one for one in streams if server.facts.refuses and is_refused(one)]
        for stream in streams:
            if stream.row is not None and stream not in refused:
                whole(stream.row, "a request that counts the slots")
        longest_ns = int(longest_s * 1e9)
        times = [
            [t_ns for t_ns in stream.token_times_ns if t_ns <= (stream.sent_ns or 0) + longest_ns]
            for stream in streams
        ]
        self.refused = len(refused)
        waiting = sum(not one for one in times)
        served = len(times) - waiting
        begun = [
            (stream.sent_ns or 0, one[0]) for stream, one in zip(streams, times, strict=True) if one
        ]
        shows_all = server.facts.refuses and served <= server.slots  # else one after the other
        at_once = served if shows_all else most_at_once(times)
        begun_ns = max((first_ns - sent_ns for sent_ns, first_ns in begun), default=0)
        return Counted(at_once, waiting, len(refused), [one for _, one in begun], begun_ns)

    def whole_at_once(self, tokens: int, count: int) -> list[RequestRow]:
        """Whole answers that are asked for at once."""
        server = self._streams
        asked = server.short(tokens, role=Role.CHECK)
        rows = join_all([server.start(asked) for _ in range(count)], READY_S)
        if None in rows:
            raise CannotDecideError(f"short requests were not answered in {READY_S:g} s")
        return [whole(row, "a short request") for row in rows if row is not None]
