"""How long a client waits: each limit ends in a row that names it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from harness.load.plan import Timeouts
from harness.records import Delivery, Outcome, Way
from tests.harness.load.asking import MS, after, two_tokens

if TYPE_CHECKING:
    from tests.harness.load.conftest import Connect, Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]


class TestTimeouts:
    def test_no_first_token(self, serve: Serve, connect: Connect) -> None:
        """Bytes keep coming, heartbeats, so that the limit for the next byte never passes."""

        def script(x: Exchange) -> None:
            x.accept()
            while not x.client_left_within(0.01):
                x.chunk(b": heartbeat\n\n")

        timeouts = Timeouts(connect_s=30, next_byte_s=30, first_token_s=0.1)
        row = connect(serve(script).url, timeouts=timeouts).ask(after(10**6), Way.FIN)
        assert (row.outcome, row.error) == (
            Outcome.TIMED_OUT,
            "no token came 0.1 s after the sending",
        )
        assert 100 * MS <= row.ended_ns - row.sent_ns < 5_000 * MS

    def test_a_first_token_in_time_ends_its_limit(self, serve: Serve, connect: Connect) -> None:
        def script(x: Exchange) -> None:
            x.accept()
            x.stream(tokens=4, gap_s=0.1)

        timeouts = Timeouts(connect_s=30, next_byte_s=30, first_token_s=0.25)
        row = connect(serve(script).url, timeouts=timeouts).ask(after(10**6), Way.FIN)
        assert row.outcome is Outcome.COMPLETED

    @pytest.mark.parametrize("delivery", [Delivery.STREAM, Delivery.UNARY])
    def test_the_whole_answer(self, serve: Serve, connect: Connect, delivery: Delivery) -> None:
        def script(x: Exchange) -> None:
            if delivery is Delivery.UNARY:
                assert x.client_left_within(30)
                return
            x.accept()
            x.stream(tokens=1000, gap_s=0.01)

        timeouts = Timeouts(connect_s=30, next_byte_s=30, first_token_s=30, total_s=0.1)
        row = connect(serve(script).url, timeouts=timeouts).ask(
            after(10**6), Way.FIN, delivery=delivery
        )
        assert (row.outcome, row.error) == (
            Outcome.TIMED_OUT,
            "the answer was not complete 0.1 s after the sending",
        )

    def test_they_hold_while_the_user_thinks(self, serve: Serve, connect: Connect) -> None:
        timeouts = Timeouts(connect_s=30, next_byte_s=30, total_s=0.1)
        client = connect(serve(two_tokens).url, timeouts=timeouts)
        row = client.ask(after(1, think_ns=3_600_000 * MS), Way.FIN)
        assert row.outcome is Outcome.TIMED_OUT

    def test_no_connection(self, connect: Connect) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            address = full.getsockname()
            crowd = [socket.socket() for _ in range(4)]
            for one in crowd:
                one.setblocking(False)
                one.connect_ex(address)
            timeouts = Timeouts(connect_s=0.1, next_byte_s=30)
            url = f"http://127.0.0.1:{address[1]}"
            row = connect(url, timeouts=timeouts).ask(after(10**6), Way.FIN)
            for one in crowd:
                one.close()
        assert row.outcome is Outcome.TIMED_OUT
        assert row.error == f"no connection to 127.0.0.1:{address[1]} within 0.1 s"
