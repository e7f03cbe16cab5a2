"""Where a host is, is asked once in a while, and anew when it was not there."""

from __future__ import annotations

import socket
import ssl
import threading

import httpx
import pytest

from harness.load.dial import dial
from harness.load.places import KEPT_S, Place, Places, look_up

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


def test_nobody_waits_for_a_look_up_longer_than_they_may() -> None:
    may_answer, asked = threading.Event(), []

    def look_up_late(host: str, port: int) -> list[Place]:
        asked.append((host, port))
        may_answer.wait()
        return [(V4, ("192.0.2.1", 80))]

    places = Places(look_up_late)
    for _ in range(2):
        with pytest.raises(httpx.ConnectTimeout, match=r"host:80 within 0\.01 s"):
            dial(("http", "host", 80), 0.01, trust=ssl.create_default_context, places=places)
    may_answer.set()
    assert places.of("host", 80, None) == [(V4, ("192.0.2.1", 80))]
    assert asked == [("host", 80)], "one question for all who wait"


def test_what_is_an_address_already_is_where_it_says() -> None:
    assert look_up("127.0.0.1", 80) == [(V4, ("127.0.0.1", 80))]
    assert look_up("::1", 80) == [(V6, ("::1", 80, 0, 0))]
