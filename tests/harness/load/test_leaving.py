"""Every way to leave, against a real server: what the row says, and what the server saw of it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import msgspec
import psutil
import pytest

from harness.load.abandon import LeaveRule
from harness.load.cancel_endpoint import cancel_url
from harness.load.client import StreamClient
from harness.load.leaving import leave
from harness.load.plan import Timeouts
from harness.load.readers import StreamReader, UnaryReader
from harness.load.sse import EndlessEventError
from harness.load.stream import StreamMachine
from harness.load.ticket import Intent, Ticket
from harness.records import Delivery, Outcome, RequestRow, Role, TokenCounting, Way, WireClose
from tests.harness.load.test_client import PLAN

if TYPE_CHECKING:
    from harness.load.connection import Connection
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]

MS = 1_000_000
SOON = Timeouts(connect_s=30.0, next_byte_s=0.2)


def after(tokens: int, *, think_ns: int = 0) -> LeaveRule:
    return lambda read: think_ns if read >= tokens else None


class Client:
    """Asks with an intent; `rows` are what was kept."""

    def __init__(self, url: str, **changes: object) -> None:
        cancel = "/v1/requests/{id}/cancel"
        plan = msgspec.structs.replace(PLAN, url=url, cancel_path=cancel, **changes)
        self.client = StreamClient(plan, api_key="secret")
        self.rows: list[RequestRow] = []

    def ask(
        self, rule: LeaveRule, way: Way, *, delivery: Delivery = Delivery.STREAM, n: int = 1
    ) -> RequestRow:
        ticket = Ticket(
            request_id="r1",
            arm="main",
            role=Role.USER,
            trial=None,
            user=0,
            max_tokens=9,
            intended_start_ns=time.perf_counter_ns(),
            intent=Intent(plan="p", planned_abandon=1, way=way, delivery=delivery, n=n),
        )
        self.client.ask(ticket, "Hello", rule, self.rows.append)
        return self.rows[-1]


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(url: str, **changes: object) -> Client:
        clients.append(Client(url, **changes))
        return clients[-1]

    yield make
    for client in clients:
        client.client.close()


Connect = Callable[..., Client]


def two_tokens(x: Exchange) -> None:
    """Two tokens, and then an eye on the client."""
    x.accept()
    x.token()
    x.token()
    assert x.client_left_within(30)


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
    def script(x: Exchange) -> None:
        if tokens:
            two_tokens(x)
        else:
            assert x.client_left_within(30)

    server = serve(script)
    row = connect(server.url).ask(after(tokens, think_ns=20 * MS), way)
    exchange = server.exchanges["r1"]
    assert exchange.is_over.wait(30)
    assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, tokens)
    assert (row.way, row.wire_close, exchange.closed_how) == (way.value, wire_close, seen)
    assert row.tokens_after_leaving is None
    assert row.abandoned_ns is not None
    assert exchange.closed_ns is not None
    assert 0 < exchange.closed_ns - row.abandoned_ns < 5_000 * MS


class TestHalfClose:
    def test_what_still_comes_is_told_apart(self, serve: Serve, connect: Connect) -> None:
        def script(x: Exchange) -> None:
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
        def script(x: Exchange) -> None:
            x.accept()
            x.token()
            assert x.client_left_within(30)

        row = connect(serve(script).url).ask(after(1), Way.HALF_CLOSE)
        assert (row.outcome, row.tokens_after_leaving) == (Outcome.ABANDONED, 0)
        assert row.server_ended_ns is not None

    def test_before_the_headers(self, serve: Serve, connect: Connect) -> None:
        def script(x: Exchange) -> None:
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

    def test_a_server_that_only_falls_silent_is_left(self, serve: Serve, connect: Connect) -> None:
        def silent(x: Exchange) -> None:
            x.accept()
            x.token()
            assert x.client_left_within(30)
            assert is_given_up.wait(30)

        is_given_up = threading.Event()
        row = connect(serve(silent).url, timeouts=SOON).ask(after(1), Way.HALF_CLOSE)
        is_given_up.set()
        assert (row.outcome, row.server_ended_ns) == (Outcome.ABANDONED, None)


class TestStayingOpen:
    def test_who_stops_reading_acknowledges_and_says_nothing(
        self, serve: Serve, connect: Connect
    ) -> None:
        has_left = threading.Event()
        is_full: list[bool] = []

        def script(x: Exchange) -> None:
            x.accept()
            x.token()
            assert has_left.wait(30)
            assert not x.client_left_within(0)
            x.sock.settimeout(0.2)
            try:
                while True:
                    x.token(text="word" * 1000)
            except TimeoutError:
                is_full.append(True)
            x.sock.settimeout(None)
            assert x.client_left_within(30)

        server = serve(script)
        client = connect(server.url)
        row = client.ask(after(1), Way.STOP_READING)
        has_left.set()
        assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 1)
        assert row.wire_close is WireClose.NOTHING
        assert not server.exchanges["r1"].is_over.wait(0.3)
        client.client.close()  # the load ends
        assert server.exchanges["r1"].is_over.wait(30)
        assert server.exchanges["r1"].closed_how == "rst"
        assert is_full == [True]

    def test_who_vanished_does_not_even_acknowledge(self, serve: Serve, connect: Connect) -> None:
        has_left = threading.Event()
        errors: list[OSError] = []

        def script(x: Exchange) -> None:
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
    def test_what_the_process_had_read_counts(self, serve: Serve, connect: Connect) -> None:
        has_arrived = threading.Event()

        def script(x: Exchange) -> None:
            x.accept()
            x.token()
            x.token()
            x.token()
            x.wait_until_received()
            has_arrived.set()
            assert x.client_left_within(30)

        def rule(tokens_read: int) -> int | None:
            if tokens_read == 0:
                return None
            assert has_arrived.wait(30)
            return 0

        row = connect(serve(script).url).ask(rule, Way.KILLED)
        assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 3)
        assert max(row.token_times_ns) <= row.ended_ns + 50 * MS

    def test_no_process_is_left_behind(self, serve: Serve, connect: Connect) -> None:
        def script(x: Exchange) -> None:
            x.accept()
            x.stream(tokens=2, gap_s=0.001)

        client = connect(serve(script).url)
        assert client.ask(after(9), Way.KILLED).outcome is Outcome.COMPLETED
        assert client.ask(after(1), Way.KILLED).outcome in (Outcome.ABANDONED, Outcome.COMPLETED)
        assert [p for p in psutil.Process().children() if p.name() == "cat"] == []

    def test_it_may_die_by_another_hand(self, serve: Serve, connect: Connect) -> None:
        def script(x: Exchange) -> None:
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

    def __call__(self, x: Exchange) -> None:
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


def _unary(x: Exchange, *, n: int = 1) -> None:
    choices = [{"index": i, "text": "word", "finish_reason": "length"} for i in range(n)]
    body = {"choices": choices, "usage": {"prompt_tokens": 8, "completion_tokens": 7 * n}}
    data = json.dumps(body).encode()
    x.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))


class TestUnary:
    def test_read_to_its_end(self, serve: Serve, connect: Connect) -> None:
        server = serve(lambda x: _unary(x, n=2))
        row = connect(server.url).ask(after(10**6), Way.FIN, delivery=Delivery.UNARY, n=2)
        body = server.exchanges["r1"].body
        assert (body["stream"], body["n"], "stream_options" in body) == (False, 2, False)
        assert server.exchanges["r1"].headers["accept"] == "application/json"
        assert (row.outcome, row.tokens_read, row.completion_tokens) == (Outcome.COMPLETED, 14, 14)
        assert (row.delivery, row.stream, row.n) == (Delivery.UNARY, False, 2)
        assert (row.first_token_ns, row.token_times_ns) == (None, [])
        assert row.token_counting is TokenCounting.USAGE

    @pytest.mark.parametrize("has_headers", [False, True])
    def test_left_before_the_body(self, serve: Serve, connect: Connect, has_headers: bool) -> None:
        def script(x: Exchange) -> None:
            if has_headers:
                x.send(b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"choices":')
            assert x.client_left_within(30)

        server = serve(script)
        row = connect(server.url).ask(after(0, think_ns=50 * MS), Way.FIN, delivery=Delivery.UNARY)
        assert server.exchanges["r1"].is_over.wait(30)
        assert (row.outcome, row.tokens_read, row.wire_close) == (
            Outcome.ABANDONED,
            0,
            WireClose.FIN,
        )

    @pytest.mark.parametrize(
        ("body", "error"),
        [
            (b"nonsense", "the answer makes no sense"),
            (b'{"error":{"message":"out of blocks"}}', "out of blocks"),
            (b'{"choices":[]}', "the answer has no finish reason"),
            (b'{"choices":[{"text":"a","finish_reason":"abort"}]}', "the server aborted"),
        ],
    )
    def test_an_answer_that_is_none(
        self, serve: Serve, connect: Connect, body: bytes, error: str
    ) -> None:
        def script(x: Exchange) -> None:
            x.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

        row = connect(serve(script).url).ask(after(10**6), Way.FIN, delivery=Delivery.UNARY)
        assert row.outcome is Outcome.FAILED
        assert row.error is not None
        assert error in row.error

    def test_a_token_came_when_its_bytes_did(self) -> None:
        stream = StreamMachine(self._ticket(Delivery.STREAM), sent_ns=0, continuous_usage=False)
        stream.headers(200)
        StreamReader(stream, None).read(
            b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n', 4711
        )
        stream.cut(4712)
        assert stream.row().token_times_ns == [4711]

    def _ticket(self, delivery: Delivery) -> Ticket:
        return Ticket(
            request_id="r1",
            arm="main",
            role=Role.USER,
            trial=None,
            user=0,
            max_tokens=9,
            intended_start_ns=0,
            intent=Intent(delivery=delivery),
        )

    def test_an_answer_without_end(self) -> None:
        stream = StreamMachine(self._ticket(Delivery.UNARY), sent_ns=0, continuous_usage=True)
        reader = UnaryReader(stream, max_bytes=100)
        reader.read(bytes(100), 0)
        with pytest.raises(EndlessEventError, match="the answer has more than 100 bytes"):
            reader.read(b"x", 0)


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
