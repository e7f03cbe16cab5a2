"""Where a host is, is asked once in a while, and anew when it was not there."""

from __future__ import annotations

import socket
import ssl
import threading
from queue import Queue

import httpx
import pytest

from harness.load.connect import KEPT_S, NotFoundInTimeError, Place, Places, dial, look_up

V4, V6 = socket.AF_INET, socket.AF_INET6


class Resolver:
    """Tells what it is told, and counts who asks; `now_s` is the time."""

    def __init__(self, *places: Place) -> None:
        self.places = list(places)
        self.asked = 0
        self.now_s = 100.0

    def look_up(self, _host: str, _port: int) -> list[Place]:
        self.asked += 1
        return self.places

    def kept(self) -> Places:
        return Places(self.look_up, lambda: self.now_s)


def test_it_is_asked_once_in_a_while() -> None:
    resolver = Resolver((V4, ("192.0.2.1", 80)))
    places = resolver.kept()
    for _ in range(3):
        assert places.of("host", 80, None) == [(V4, ("192.0.2.1", 80))]
    assert resolver.asked == 1
    resolver.now_s += KEPT_S
    places.of("host", 80, None)
    assert resolver.asked == 2
    places.of("host", 81, None)
    assert resolver.asked == 3


def test_addresses_of_the_first_kind_take_turns() -> None:
    one, two, other = (V4, ("192.0.2.1", 80)), (V4, ("192.0.2.2", 80)), (V6, ("::1", 80, 0, 0))
    places = Resolver(one, two, other).kept()
    found = [places.of("host", 80, None) for _ in range(3)]
    assert found == [[one, two, other], [two, one, other], [one, two, other]]


def test_a_host_without_an_address_is_asked_for_again() -> None:
    asked = 0

    def fail(_host: str, _port: int) -> list[Place]:
        nonlocal asked
        asked += 1
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    places = Places(fail)
    for _ in range(2):
        with pytest.raises(socket.gaierror):
            places.of("host", 80, None)
    assert asked == 2


def test_where_nobody_was_is_forgotten() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
    resolver = Resolver((V4, place))
    places = resolver.kept()
    for asked in (1, 2):
        with pytest.raises(httpx.ConnectError):
            dial(("http", "host", 80), 30.0, trust=ssl.create_default_context, places=places)
        assert resolver.asked == asked


class LateResolver:
    """Answers when it may, each time it is asked; `now_s` is the time, which passes meanwhile."""

    def __init__(self, answer: list[Place] | Exception) -> None:
        self.may_answer = threading.Event()
        self.asked = 0
        self.askers: Queue[threading.Thread] = Queue()
        self.now_s = 100.0
        self._answer = answer

    def look_up(self, _host: str, _port: int) -> list[Place]:
        self.asked += 1
        self.askers.put(threading.current_thread())
        self.may_answer.wait()
        self.now_s += KEPT_S
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_nobody_waits_for_a_look_up_longer_than_they_may() -> None:
    resolver = LateResolver([(V4, ("192.0.2.1", 80))])
    places = Places(resolver.look_up, lambda: resolver.now_s)
    for _ in range(2):
        with pytest.raises(httpx.ConnectTimeout, match="the address of host was not known within"):
            dial(("http", "host", 80), 0.01, trust=ssl.create_default_context, places=places)
    resolver.may_answer.set()
    for _ in range(2):
        assert places.of("host", 80, None) == [(V4, ("192.0.2.1", 80))]
    assert resolver.asked == 1, "one question for all; its answer is kept from when it came"


def test_a_failure_that_comes_when_nobody_waits_is_forgotten() -> None:
    resolver = LateResolver(socket.gaierror(socket.EAI_NONAME, "unknown"))
    places = Places(resolver.look_up)
    with pytest.raises(NotFoundInTimeError):
        places.of("host", 80, 0.01)
    looking = resolver.askers.get()
    resolver.may_answer.set()
    looking.join()
    with pytest.raises(socket.gaierror):
        places.of("host", 80, None)
    assert resolver.asked == 2


def test_all_who_wait_hear_of_a_failure() -> None:
    resolver = LateResolver(socket.gaierror(socket.EAI_NONAME, "unknown"))
    places = Places(resolver.look_up)
    heard: Queue[Exception] = Queue()

    def ask() -> None:
        try:
            places.of("host", 80, None)
        except OSError as error:
            heard.put(error)

    users = [threading.Thread(target=ask) for _ in range(3)]
    for user in users:
        user.start()
    resolver.may_answer.set()
    for user in users:
        user.join()
    assert heard.qsize() == 3


def test_what_is_an_address_already_is_where_it_says() -> None:
    assert look_up("127.0.0.1", 80) == [(V4, ("127.0.0.1", 80))]
    assert look_up("::1", 80) == [(V6, ("::1", 80, 0, 0))]
