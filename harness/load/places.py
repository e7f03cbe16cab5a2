"""Where hosts are: what a look-up found is kept for a while.

Under gevent a look-up goes through a thread and costs as much as a dozen tokens; in a cluster, with
its search domains, it is several questions to a name server. All of that would be in each request's
time to first token. Clients in the field keep what they found, too.

The system's look-up takes no time limit and cannot be broken off. So it is made aside, once for all
who want it at that moment, and each waits for it as long as they may.

A name with several addresses of a kind may stand for as many servers. Whoever asks by turns gets
each of them first, as a name server would have it that is asked each time.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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


class NotFoundInTimeError(TimeoutError):
    """The look-up took longer than who asked could wait."""


class _Found(NamedTuple):
    places: list[Place]
    until_s: float


class Places:
    """Its state, by host and port: `_found`, what was found and until when it is believed, and
    `_asked`, the look-ups under way, each of which ends by taking itself out."""

    def __init__(
        self,
        look_up: Callable[[str, int], list[Place]] = look_up,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._look_up = look_up
        self._now_s = now_s
        self._found: dict[tuple[str, int], _Found] = {}
        self._asked: dict[tuple[str, int], Future[list[Place]]] = {}
        self._turns = count()

    def of(self, host: str, port: int, timeout_s: float | None) -> list[Place]:
        """Where a host may be, in the order to try.

        Raises OSError, NotFoundInTimeError and UnicodeError.
        """
        found = self._found.get((host, port))
        if found is not None and found.until_s > self._now_s():
            return _in_turn(found.places, next(self._turns))
        answer = self._asked.get((host, port)) or self._ask(host, port)
        try:
            return _in_turn(answer.result(timeout_s), next(self._turns))
        except TimeoutError as error:
            if answer.done():  # it is the system's own
                raise
            raise NotFoundInTimeError from error

    def forget(self, host: str, port: int) -> None:
        """Look it up anew the next time: it could not be reached where it was."""
        self._found.pop((host, port), None)

    def _ask(self, host: str, port: int) -> Future[list[Place]]:
        answer = self._asked[host, port] = Future()
        threading.Thread(
            target=self._answer, args=(answer, host, port), name=f"look up {host}", daemon=True
        ).start()
        return answer

    def _answer(self, answer: Future[list[Place]], host: str, port: int) -> None:
        try:
            places = self._look_up(host, port)
        except Exception as error:  # noqa: BLE001  whatever it is, who waits must hear of it
            del self._asked[host, port]
            answer.set_exception(error)
            return
        self._found[host, port] = _Found(places, self._now_s() + KEPT_S)
        del self._asked[host, port]
        answer.set_result(places)


def _in_turn(places: list[Place], turn: int) -> list[Place]:
    """Another of the first one's family first each time; those of other families stay behind."""
    alike = [place for place in places if place[0] == places[0][0]]
    others = [place for place in places if place[0] != places[0][0]]
    first = turn % len(alike) if alike else 0
    return alike[first:] + alike[:first] + others
