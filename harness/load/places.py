"""Where hosts are: what a look-up found is kept for a while.

Under gevent a look-up goes through a thread and costs as much as a dozen tokens; in a cluster, with
its search domains, it is several questions to a name server. All of that would be in each request's
time to first token. Clients in the field keep what they found, too.

A name with several addresses of a kind may stand for as many servers. Whoever asks by turns gets
each of them first, as a name server would have it that is asked each time.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final, NamedTuple

KEPT_S: Final = 30.0

# A family, and an address as sockets take it.
Place = tuple[int, Any]


def look_up(host: str, port: int) -> list[Place]:
    """Ask the system, which puts the best first. What is an address already needs no question.
    Raises OSError and UnicodeError."""
    with contextlib.suppress(OSError):
        socket.inet_pton(socket.AF_INET, host)
        return [(socket.AF_INET, (host, port))]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, place) for family, _, _, _, place in found]


class _Found(NamedTuple):
    places: list[Place]
    until_s: float


class Places:
    """Its state: `_found`, what was found for each host and port and until when it is believed."""

    def __init__(
        self,
        look_up: Callable[[str, int], list[Place]] = look_up,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._look_up = look_up
        self._now_s = now_s
        self._found: dict[tuple[str, int], _Found] = {}
        self._turns = count()

    def of(self, host: str, port: int) -> list[Place]:
        """Where a host may be, in the order to try. Raises OSError and UnicodeError."""
        found = self._found.get((host, port))
        if found is None or found.until_s <= self._now_s():
            found = _Found(self._look_up(host, port), self._now_s() + KEPT_S)
            self._found[host, port] = found
        return _in_turn(found.places, next(self._turns))

    def forget(self, host: str, port: int) -> None:
        """Look it up anew the next time: it could not be reached where it was."""
        self._found.pop((host, port), None)


def _in_turn(places: list[Place], turn: int) -> list[Place]:
    """Another of the first one's family first each time; those of other families stay behind."""
    alike = [place for place in places if place[0] == places[0][0]]
    others = [place for place in places if place[0] != places[0][0]]
    first = turn % len(alike) if alike else 0
    return alike[first:] + alike[:first] + others
