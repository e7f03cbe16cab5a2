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


class _Question(NamedTuple):
    answer: Future[list[Place]]
    kept_until_s: float


class Places:
    """Its state: `_asked`, the question of each host and port whose answer is awaited or kept."""

    def __init__(
        self,
        look_up: Callable[[str, int], list[Place]] = look_up,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._look_up = look_up
        self._now_s = now_s
        self._asked: dict[tuple[str, int], _Question] = {}
        self._turns = count()

    def of(self, host: str, port: int, timeout_s: float | None) -> list[Place]:
        """Where a host may be, in the order to try.

        Raises OSError, TimeoutError when it is not known in time, and UnicodeError.
        """
        question = self._asked.get((host, port))
        if question is None or (question.answer.done() and question.kept_until_s <= self._now_s()):
            question = self._ask(host, port)
        try:
            places = question.answer.result(timeout_s)
        except (OSError, UnicodeError):
            if question.answer.done():
                self.forget(host, port)
            raise
        return _in_turn(places, next(self._turns))

    def _ask(self, host: str, port: int) -> _Question:
        question = _Question(Future(), self._now_s() + KEPT_S)
        self._asked[host, port] = question
        answering = (question.answer, self._look_up, host, port)
        threading.Thread(target=_answer, args=answering, daemon=True).start()
        return question

    def forget(self, host: str, port: int) -> None:
        """Look it up anew the next time: it could not be reached where it was."""
        self._asked.pop((host, port), None)


def _answer(
    answer: Future[list[Place]], look_up: Callable[[str, int], list[Place]], host: str, port: int
) -> None:
    try:
        answer.set_result(look_up(host, port))
    except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
        answer.set_exception(error)


def _in_turn(places: list[Place], turn: int) -> list[Place]:
    """Another of the first one's family first each time; those of other families stay behind."""
    alike = [place for place in places if place[0] == places[0][0]]
    others = [place for place in places if place[0] != places[0][0]]
    first = turn % len(alike) if alike else 0
    return alike[first:] + alike[:first] + others
