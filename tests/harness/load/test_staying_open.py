"""Leaving without a word, against a real server: reading no more, and vanishing."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from harness.load.leave import leave
from harness.records import Outcome, Way, WireClose
from tests.harness.load.asking import after

if TYPE_CHECKING:
    from harness.load.connection import Connection
    from tests.harness.load.conftest import Connect, Script, ScriptedServer
    from tests.harness.load.conftest import Exchange as Played

    Serve = Callable[[Script], ScriptedServer]


class TestStayingOpen:
    def test_who_stops_reading_acknowledges_and_says_nothing(
        self, serve: Serve, connect: Connect
    ) -> None:
        has_left, is_full = threading.Event(), threading.Event()

        def script(x: Played) -> None:
            x.accept()
            x.token()
            assert has_left.wait(30)
            assert not x.client_left_within(0)
            x.sock.settimeout(0.2)
            try:
                while True:
                    x.token(text="word" * 1000)
            except TimeoutError:
                is_full.set()
            x.sock.settimeout(None)
            assert x.client_left_within(30)

        server = serve(script)
        client = connect(server.url)
        row = client.ask(after(1), Way.STOP_READING)
        has_left.set()
        assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 1)
        assert row.wire_close is WireClose.NOTHING
        assert is_full.wait(30)
        assert not server.exchanges["r1"].is_over.is_set()
        client.client.close()  # the load ends
        assert server.exchanges["r1"].is_over.wait(30)
        assert server.exchanges["r1"].closed_how == "rst"

    def test_who_vanished_does_not_even_acknowledge(self, serve: Serve, connect: Connect) -> None:
        has_left = threading.Event()
        errors: list[OSError] = []

        def script(x: Played) -> None:
            x.accept()
            x.token()
            assert has_left.wait(30)
            x.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 200)
            x.token()
            assert select.select([x.sock], [], [], 30)[0]
            try:
                x.sock.recv(1)
            except OSError as error:
                errors.append(error)

        server = serve(script)
        row = connect(server.url).ask(after(1), Way.VANISH)
        has_left.set()
        assert server.exchanges["r1"].is_over.wait(30)
        assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.SILENCE)
        assert [type(error) for error in errors] == [TimeoutError]


class _Stamped:
    """A connection, and its socket, that note when something was done to them."""

    def __init__(self) -> None:
        self.sock = self
        self.acted_ns = 0

    def keep_open(self) -> None:
        """Not yet the act."""

    def setsockopt(self, *_: object) -> None:
        self.acted_ns = time.perf_counter_ns()


def test_t0_of_who_vanishes_is_before_the_act() -> None:
    stamped = _Stamped()
    departure = leave(Way.VANISH, cast("Connection", stamped))
    assert departure.wire_close is WireClose.SILENCE
    assert 0 < departure.t0_ns <= stamped.acted_ns
