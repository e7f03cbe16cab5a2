"""How long a client waits: each limit ends in a row that names it."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from harness.records import Delivery, Outcome, Way, WireClose
from harness.workload.abandon import never
from tests.harness.load.asking import (
    MS,
    PLAN,
    SPEC,
    Leaping,
    User,
    after,
    two_tokens,
)

if TYPE_CHECKING:
    from tests.harness.load.conftest import Connect, Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]


AT_A_TIME = dataclasses.replace(SPEC, plan="time:x", planned_abandon=0, way=Way.FIN, pause=1)
SAID = (
    "no token came 0.1 s after the sending",
    "the answer was not complete 0.1 s after the sending",
    "the answer was not complete 0.05 s after the sending",
)


@pytest.fixture
def full() -> Iterator[str]:
    """The address of a server that has no room for another connection: it says nothing to it."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        crowd = [socket.socket() for _ in range(4)]
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for one in crowd:
            one.close()


class TestTimeouts:
    def test_no_first_token(self, serve: Serve, connect: Connect) -> None:
        """Bytes keep coming, heartbeats, so that the limit for the next byte never passes."""

        def script(x: Exchange) -> None:
            x.accept()
            while not x.client_left_within(0.01):
                x.chunk(b": heartbeat\n\n")

        row = connect(serve(script).url, first_token_timeout_s=0.1).ask(after(10**6), Way.FIN)
        assert (row.outcome, row.error) == (
            Outcome.TIMED_OUT,
            "no token came 0.1 s after the sending",
        )
        assert 100 * MS <= row.ended_ns - row.sent_ns < 5_000 * MS

    def test_a_first_token_in_time_ends_its_limit(
        self, ready: Exchange, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others come when it would have passed."""
        clock = Leaping()
        monkeypatch.setattr("harness.load.connection.time", clock)
        monkeypatch.setattr("harness.load.connection.time", clock)

        def stay(tokens_read: int) -> int | None:
            if tokens_read == 1 and not clock.ahead_ns:
                clock.ahead_ns = 60_000 * MS
                ready.token()
                ready.token(finish_reason="length")
                ready.finish()
            return None

        ready.accept()
        ready.token()
        row = connect(PLAN.url, first_token_timeout_s=30.0).ask(stay, Way.FIN)
        assert (row.outcome, row.tokens_read) == (Outcome.COMPLETED, 3)

    @pytest.mark.parametrize("delivery", [Delivery.STREAM, Delivery.UNARY])
    def test_the_whole_answer(self, serve: Serve, connect: Connect, delivery: Delivery) -> None:
        def script(x: Exchange) -> None:
            if delivery is Delivery.UNARY:
                assert x.client_left_within(30)
                return
            x.accept()
            x.stream(tokens=1000, gap_s=0.01)

        row = connect(serve(script).url, first_token_timeout_s=30.0, total_timeout_s=0.1).ask(
            after(10**6), Way.FIN, delivery=delivery
        )
        assert (row.outcome, row.error) == (
            Outcome.TIMED_OUT,
            "the answer was not complete 0.1 s after the sending",
        )

    def test_they_hold_while_the_user_thinks(self, serve: Serve, connect: Connect) -> None:
        client = connect(serve(two_tokens).url, total_timeout_s=0.1)
        row = client.ask(after(1, think_ns=3_600_000 * MS), Way.FIN)
        assert row.outcome is Outcome.TIMED_OUT

    def test_no_connection(self, full: str, connect: Connect) -> None:
        client = connect(full, connect_timeout_s=0.1)
        row = client.ask(after(10**6), Way.FIN)
        assert (row.outcome, row.wire_close) == (Outcome.TIMED_OUT, WireClose.UNOPENED)
        assert row.error == f"no connection to {full.removeprefix('http://')} within 0.1 s"


class TestBeforeAnythingWasReceived:
    """All times count from the sending, however far that came."""

    @pytest.mark.parametrize("what", ["first_token_timeout_s", "total_timeout_s"])
    def test_a_limit_passes_while_the_connection_is_opened(
        self, full: str, connect: Connect, what: str
    ) -> None:
        row = connect(full, **{what: 0.1}).ask(after(10**6), Way.FIN)
        assert (row.outcome, row.wire_close) == (Outcome.TIMED_OUT, WireClose.UNOPENED)
        assert row.error in SAID
        assert row.ended_ns - row.sent_ns >= 100 * MS

    def test_a_user_leaves_while_the_connection_is_opened(self, full: str) -> None:
        row = User(full).ask(after(0, think_ns=50 * MS), AT_A_TIME)
        assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.UNOPENED)
        assert (row.tokens_read, row.think_ns, row.error) == (0, 50 * MS, None)
        assert row.abandoned_ns is not None
        assert row.abandoned_ns - row.sent_ns >= 50 * MS

    def test_the_nearest_of_them_ends_it(self, full: str) -> None:
        row = User(full, total_timeout_s=0.05).ask(after(0, think_ns=30_000 * MS), AT_A_TIME)
        assert (row.outcome, row.error in SAID) == (Outcome.TIMED_OUT, True)

    @pytest.mark.parametrize("leaves", [True, False])
    @pytest.mark.usefixtures("ready")
    def test_while_the_request_is_taken(self, leaves: bool) -> None:
        """The server's side of the connection is there, and nobody reads from it."""
        total_s = None if leaves else 0.1
        large = {"extra_body": {"x": "a" * 32_000_000}}
        user = User(PLAN.url, target=large, total_timeout_s=total_s)
        row = user.ask(after(0, think_ns=50 * MS) if leaves else never, AT_A_TIME)
        if leaves:
            assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.FIN)
            assert row.abandoned_ns is not None
            assert row.abandoned_ns - row.sent_ns >= 50 * MS
        else:
            assert (row.outcome, row.wire_close) == (Outcome.TIMED_OUT, None)
            assert row.error in SAID

    def test_a_pause_without_a_time_begins_when_the_request_has_gone_out(
        self, serve: Serve, connect: Connect
    ) -> None:
        """However short it is: the request comes to the server."""

        def script(x: Exchange) -> None:
            assert x.client_left_within(30)

        server = serve(script)
        row = connect(server.url).ask(after(0), Way.FIN)
        server.wait_for_arrivals(1)
        assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.FIN)
