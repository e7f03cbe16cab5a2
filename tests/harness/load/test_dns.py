"""A host is looked up once, and anew when it was not there; its addresses are tried in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from queue import Queue
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.load.connect import Address, Dns, connect, known

if TYPE_CHECKING:
    from tests.harness.load.conftest import ScriptedServer

V4, V6 = socket.AF_INET, socket.AF_INET6
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "unknown")


class Resolver:
    """Answers as it is told once it `may_answer`, and counts the questions."""

    def __init__(self, *addresses: Address, error: Exception | None = None) -> None:
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.askers: Queue[threading.Thread] = Queue()
        self._addresses = list(addresses)
        self._error = error

    def look_up(self, _host: str, _port: int) -> list[Address]:
        self.asked += 1
        self.askers.put(threading.current_thread())
        self.may_answer.wait()
        if self._error is not None:
            raise self._error
        return list(self._addresses)


def wire_to(dns: Dns, timeout_s: float = 30.0) -> socket.socket:
    return connect(dns, timeout_s, context=None)[0]


def nobody() -> Address:
    """An address at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return V4, listener.getsockname()


def test_it_is_asked_once() -> None:
    resolver = Resolver((V4, ("192.0.2.1", 80)))
    dns = Dns("host", 80, resolver.look_up)
    assert [dns.addresses(None) for _ in range(3)] == [[(V4, ("192.0.2.1", 80))]] * 3
    assert resolver.asked == 1


def test_the_address_that_answered_is_tried_first_from_then_on(
    serve: Callable[..., ScriptedServer],
) -> None:
    dead, alive = nobody(), (V4, ("127.0.0.1", serve(lambda _x: None).port))
    dns = Dns("host", 80, Resolver(dead, alive).look_up)
    assert dns.addresses(None) == [dead, alive]
    wire_to(dns).close()
    assert dns.addresses(None) == [alive, dead]


def test_where_no_server_was_is_forgotten() -> None:
    resolver = Resolver(nobody())
    dns = Dns("host", 80, resolver.look_up)
    for asked in (1, 2):
        with pytest.raises(httpx.ConnectError):
            wire_to(dns)
        assert resolver.asked == asked


def test_no_caller_waits_for_a_look_up_longer_than_it_may() -> None:
    resolver = Resolver((V4, ("192.0.2.1", 80)))
    resolver.may_answer.clear()
    dns = Dns("host", 80, resolver.look_up)
    for _ in range(2):
        with pytest.raises(httpx.ConnectTimeout, match="the address of host was not known within"):
            wire_to(dns, timeout_s=0.01)
    resolver.may_answer.set()
    assert dns.addresses(None) == [(V4, ("192.0.2.1", 80))]
    assert resolver.asked == 1, "one question for all"


def test_a_failure_is_heard_by_all_who_wait_and_forgotten() -> None:
    resolver = Resolver(error=UNKNOWN)
    resolver.may_answer.clear()
    dns = Dns("host", 80, resolver.look_up)
    heard: Queue[Exception] = Queue()

    def ask() -> None:
        try:
            dns.addresses(None)
        except OSError as error:
            heard.put(error)

    with pytest.raises(httpx.ConnectTimeout):
        dns.addresses(0.01)
    users = [threading.Thread(target=ask) for _ in range(3)]
    for user in users:
        user.start()
    resolver.may_answer.set()
    for thread in (*users, resolver.askers.get()):
        thread.join()
    assert heard.qsize() == 3
    asked = resolver.asked
    with pytest.raises(socket.gaierror):
        dns.addresses(None)
    assert resolver.asked == asked + 1


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", [(V4, ("127.0.0.1", 80))]),
        ("::1", [(V6, ("::1", 80))]),
        ("localhost", [(V6, ("::1", 80)), (V4, ("127.0.0.1", 80))]),
        ("example.org", []),
    ],
)
def test_localhost_and_addresses_need_no_question(host: str, addresses: list[Address]) -> None:
    assert known(host, 80) == addresses
