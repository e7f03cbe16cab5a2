"""Every way to leave, against a real server: what the row says, and what the server saw of it."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import psutil
import pytest

from harness.load.cancel_endpoint import cancel_url
from harness.load.client_process import ClientProcess
from harness.load.connection import Connection
from harness.load.exchange import Exchange
from harness.load.leaving import leave
from harness.load.plan import Timeouts
from harness.load.readers import StreamReader
from harness.load.stream import StreamMachine
from harness.load.ticket import Intent
from harness.records import Outcome, Way, WireClose
from tests.harness.load.asking import MS, PLAN, after, ticket_for, two_tokens

if TYPE_CHECKING:
    from tests.harness.load.conftest import Connect, Script, ScriptedServer
    from tests.harness.load.conftest import Exchange as Played

    Serve = Callable[[Script], ScriptedServer]

SOON = Timeouts(connect_s=30.0, next_byte_s=0.2)


@pytest.mark.parametrize(
    ("way", "wire_close", "seen"),
    [
        (Way.FIN, WireClose.FIN, "fin"),
        (Way.RST, WireClose.RST, "rst"),
        (Way.KILLED, WireClose.KERNEL, "fin"),
    ],
)
@pytest.mark.parametrize("tokens", [0, 2])
def test_the_connection_ends(
    serve: Serve, connect: Connect, tokens: int, way: Way, wire_close: WireClose, seen: str
) -> None:
    def script(x: Played) -> None:
        if tokens:
            two_tokens(x)
        else:
            assert x.client_left_within(30)

    server = serve(script)
    row = connect(server.url).ask(after(tokens, think_ns=20 * MS), way)
    server.wait_for_arrivals(1)  # it may read the request only after the client has left
    exchange = server.exchanges["r1"]
    assert exchange.is_over.wait(30)
    assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, tokens)
    assert (row.way, row.wire_close, exchange.closed_how) == (way.value, wire_close, seen)
    assert row.tokens_after_leaving is None
    assert row.abandoned_ns is not None
    assert exchange.closed_ns is not None
    assert 0 < exchange.closed_ns - row.abandoned_ns < 5_000 * MS


class _Feeding(StreamReader):
    """For whatever it reads it has the server send more."""

    def __init__(self, stream: StreamMachine, server: socket.socket) -> None:
        super().__init__(stream, None)
        self._server = server

    def read(self, chunk: bytes, t_ns: int, /) -> None:
        super().read(chunk, t_ns)
        self._server.sendall(b'data: {"choices":[{"index":0,"text":"x"}]}\n\n')


def test_bytes_without_a_pause_keep_nobody_from_leaving() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        intent = Intent(plan="tokens:0", planned_abandon=0, way=Way.FIN)
        stream = StreamMachine(ticket_for(intent), sent_ns=0, continuous_usage=False)
        reader = _Feeding(stream, far)
        connection = Connection(near, 30)
        connection.receive_head(None)
        reader.read(b"", 0)
        Exchange(
            connection,
            stream,
            reader,
            leave_rule=after(1),
            way=Way.FIN,
            after_first_token=None,
            cancel=lambda: pytest.fail("nobody asks"),
        ).see_through(None)
        row = stream.row()
    assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.RST)
    assert 1 <= row.tokens_read <= 3


class TestHalfClose:
    def test_what_still_comes_is_told_apart(self, serve: Serve, connect: Connect) -> None:
        def script(x: Played) -> None:
            x.accept()
            x.token()
            assert x.client_left_within(30)  # it may still read
            for _ in range(3):
                x.token()
            x.token(finish_reason="length")
            x.finish()

        server = serve(script)
        row = connect(server.url).ask(after(1), Way.HALF_CLOSE)
        assert (row.outcome, row.tokens_read, row.tokens_after_leaving) == (
            Outcome.ABANDONED,
            1,
            4,
        )
        assert (row.wire_close, row.finish_reason) == (WireClose.FIN, "length")
        assert server.exchanges["r1"].closed_how == "fin"
        assert row.abandoned_ns is not None
        assert row.server_ended_ns is not None
        assert row.abandoned_ns < row.server_ended_ns

    def test_a_server_that_hangs_up_then_is_noted(self, serve: Serve, connect: Connect) -> None:
        def script(x: Played) -> None:
            x.accept()
            x.token()
            assert x.client_left_within(30)

        row = connect(serve(script).url).ask(after(1), Way.HALF_CLOSE)
        assert (row.outcome, row.tokens_after_leaving) == (Outcome.ABANDONED, 0)
        assert row.server_ended_ns is not None

    def test_before_the_headers(self, serve: Serve, connect: Connect) -> None:
        def script(x: Played) -> None:
            assert x.client_left_within(30)
            x.accept()
            x.token(finish_reason="length")
            x.finish()

        row = connect(serve(script).url).ask(after(0), Way.HALF_CLOSE)
        assert (row.outcome, row.tokens_read, row.tokens_after_leaving) == (
            Outcome.ABANDONED,
            0,
            1,
        )

    def test_a_server_that_only_falls_silent_is_left(self, ready: Played, connect: Connect) -> None:
        ready.accept()
        ready.token()
        row = connect(PLAN.url, timeouts=SOON).ask(after(1), Way.HALF_CLOSE)
        assert (row.outcome, row.server_ended_ns) == (Outcome.ABANDONED, None)


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


class TestKilled:
    def test_what_the_process_had_read_counts(
        self, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leaves = threading.Event()

        class Process(ClientProcess):
            """It has read two more tokens when it is killed."""

            def kill(self) -> None:
                if not leaves.is_set():
                    leaves.set()
                    self.output.setblocking(True)
                    while b"last words" not in self.output.recv(65536, socket.MSG_PEEK):
                        """They are on their way."""
                super().kill()

        def script(x: Played) -> None:
            x.accept()
            x.token()
            assert leaves.wait(30)
            x.token()
            x.token(text="last words")
            assert x.client_left_within(30)

        monkeypatch.setattr("harness.load.transport.ClientProcess", Process)
        row = connect(serve(script).url).ask(after(1), Way.KILLED)
        assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 3)
        assert row.ended_ns < row.token_times_ns[1] <= row.token_times_ns[2]
        assert row.token_times_ns[2] <= time.perf_counter_ns()

    def test_no_process_is_left_behind(self, serve: Serve, connect: Connect) -> None:
        def script(x: Played) -> None:
            x.accept()
            x.stream(tokens=2, gap_s=0.001)

        client = connect(serve(script).url)
        assert client.ask(after(9), Way.KILLED).outcome is Outcome.COMPLETED
        assert client.ask(after(1), Way.KILLED).outcome in (Outcome.ABANDONED, Outcome.COMPLETED)
        assert [p for p in psutil.Process().children() if p.name() == "cat"] == []

    def test_it_may_die_by_another_hand(self, serve: Serve, connect: Connect) -> None:
        def script(x: Played) -> None:
            x.accept()
            x.token()
            assert x.client_left_within(30)

        def kill_it(tokens_read: int) -> int | None:
            if tokens_read:
                (child,) = [p for p in psutil.Process().children() if p.name() == "cat"]
                os.kill(child.pid, signal.SIGKILL)
            return None

        row = connect(serve(script).url).ask(kill_it, Way.KILLED)
        assert (row.outcome, row.tokens_read) == (Outcome.FAILED, 1)


class CancelServer:
    """A stream that ends when its cancel endpoint is asked, which answers `status`."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.was_asked = threading.Event()
        self.asked_ns = 0
        self.paths: list[str] = []

    def __call__(self, x: Played) -> None:
        if x.target.endswith("/cancel"):
            self.asked_ns = time.perf_counter_ns()
            self.paths.append(x.target)
            self.was_asked.set()
            head = b"HTTP/1.1 %d Whatever\r\ncontent-length: 2\r\n\r\n{}"
            x.send(head % self.status)
            return
        x.accept()
        x.token()
        assert self.was_asked.wait(30)
        x.token()
        x.token(text="", finish_reason="abort")
        x.finish()


class TestCancel:
    def test_the_stream_is_read_to_its_end(self, serve: Serve, connect: Connect) -> None:
        script = CancelServer()
        row = connect(serve(script).url).ask(after(1), Way.CANCEL)
        assert script.paths == ["/v1/requests/r1/cancel"]
        assert (row.outcome, row.error) == (Outcome.ABANDONED, None)
        assert (row.tokens_read, row.tokens_after_leaving, row.finish_reason) == (1, 1, "abort")
        assert row.wire_close is WireClose.NOTHING
        assert row.abandoned_ns is not None
        assert row.server_ended_ns is not None
        assert row.abandoned_ns < script.asked_ns < row.server_ended_ns

    def test_an_endpoint_that_refuses_is_told(self, serve: Serve, connect: Connect) -> None:
        row = connect(serve(CancelServer(404)).url).ask(after(1), Way.CANCEL)
        assert row.outcome is Outcome.ABANDONED
        assert row.error == "the cancel endpoint answered HTTP 404"

    def test_an_id_that_needs_quoting(self) -> None:
        assert cancel_url("http://h/", "/a/{id}/b", "x/y z") == "http://h/a/x%2Fy%20z/b"
