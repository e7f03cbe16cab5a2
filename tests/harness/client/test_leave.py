"""Leaving, against a real server: when, what was read by then, and what the server saw of it."""

import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from harness.client.connection import ClientProcess, Http1Connection
from harness.client.exchange import StreamClient
from harness.client.leave import leave
from harness.client.reader import StreamReader
from harness.records import Delivery, Outcome, RequestRow, Way, WireClose
from harness.workload.abandon import RequestSpec
from tests.harness.client.asking import (
    LONG_NS,
    MS,
    PLAN,
    Leaping,
    after,
    five_tokens,
    plan_of,
    refuse,
    until_left,
)
from tests.harness.client.conftest import Ask, Connect, Exchange, Script, Secrets

HOUR_NS = 3_600_000 * MS


def silent(x: Exchange) -> None:
    """As a server whose headers come with the first token, which never does."""
    assert x.client_left_within(30)


def assert_left(ask: Ask, row: RequestRow, tokens: int) -> None:
    assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, tokens)
    assert 0 < (ask.seen.closed_ns or 0) - (row.abandoned_ns or 0) < 5_000 * MS


ENDING = [
    (Way.FIN, WireClose.FIN, "fin", "fin"),
    (Way.RST, WireClose.RST, "rst", "cut"),
    (Way.KILLED, WireClose.KERNEL, "fin", "cut"),
]


@pytest.mark.parametrize(("way", "wire_close", "plain", "over_tls"), ENDING)
@pytest.mark.parametrize("tls", [None, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("script", "tokens", "delivery"),
    [
        (until_left, 1, Delivery.STREAM),
        (silent, 0, Delivery.STREAM),
        (silent, 0, Delivery.UNARY),
    ],
    ids=["after a token", "before the headers", "before the headers, in one piece"],
)
def test_the_connection_ends(
    ask: Ask,
    secrets: Secrets,
    script: Script,
    tokens: int,
    delivery: Delivery,
    tls: ssl.TLSVersion | None,
    way: Way,
    wire_close: WireClose,
    plain: str,
    over_tls: str,
) -> None:
    context = None if tls is None else secrets.server_of(tls)
    rule, spec = after(tokens, think_ns=20 * MS), {"delivery": delivery}
    row = ask(script, rule, way, spec=spec, tls=context, ca_file=secrets.ca_file)
    assert_left(ask, row, tokens)
    assert (row.way, row.wire_close, row.tokens_after_leaving) == (way.value, wire_close, None)
    assert row.status_code == (200 if tokens else None)
    assert ask.seen.closed_how == (plain if tls is None else over_tls)
    assert (row.abandoned_ns or 0) - (row.first_token_ns or row.sent_ns) >= 20 * MS


@pytest.mark.parametrize("delivery", [Delivery.STREAM, Delivery.UNARY])
def test_leaving_between_headers_and_body(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, delivery: Delivery
) -> None:
    clock = Leaping()
    clock.ahead_ns = LONG_NS  # the pause ends as the headers come
    monkeypatch.setattr("harness.client.exchange.time", clock)

    def script(x: Exchange) -> None:
        x.accept()
        assert x.client_left_within(30)

    row = ask(script, after(0, think_ns=LONG_NS), spec={"delivery": delivery})
    assert (row.outcome, row.tokens_read, row.status_code) == (Outcome.ABANDONED, 0, 200)
    assert (row.wire_close, ask.seen.closed_how) == (WireClose.FIN, "fin")


@pytest.mark.parametrize("leaves_after", [0, 1])
def test_what_had_come_by_then_was_read(ask: Ask, leaves_after: int) -> None:
    """The client is busy while tokens come; `leaves_after` 0: before it read the headers."""
    is_busy, has_arrived = threading.Event(), threading.Event()

    def script(x: Exchange) -> None:
        x.accept(tokens=1)
        assert leaves_after == 0 or is_busy.wait(30)
        x.token()
        x.chunk(x.event() + b"data: {half an eve")
        x.wait_until_received()
        has_arrived.set()
        x.client_left_within(30)

    def rule(tokens_read: int) -> int | None:
        if tokens_read < 1:
            return None
        is_busy.set()
        assert has_arrived.wait(30)
        return 0

    row = ask(script, rule)
    read = (row.outcome, row.tokens_read, row.wire_close)
    assert read == (Outcome.ABANDONED, 2, WireClose.FIN)


def test_bytes_without_a_pause_keep_no_user_from_leaving(
    ready: Exchange, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whatever is read the server sends more."""

    class Feeding(StreamReader):
        def read(self, chunk: bytes, t_ns: int, /) -> None:
            super().read(chunk, t_ns)
            ready.token()

    ready.accept(tokens=1)
    monkeypatch.setattr("harness.client.exchange.StreamReader", Feeding)
    row = connect(PLAN.url).ask(after(1), Way.FIN)
    assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.RST)
    assert 1 <= row.tokens_read <= 3


def test_reading_goes_on_while_thinking(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but 50 ms of the pause are over when the third token has been read."""
    clock, thinks = Leaping(), threading.Event()

    class Reader(StreamReader):
        def read(self, chunk: bytes, t_ns: int, /) -> None:
            super().read(chunk, t_ns)
            if self._stream.tokens_read:
                thinks.set()
            if self._stream.tokens_read == 3:
                clock.ahead_ns = LONG_NS

    def script(x: Exchange) -> None:
        x.accept(tokens=1)
        assert thinks.wait(30)
        x.token()
        x.token()
        x.client_left_within(30)

    think_ns = LONG_NS + 50 * MS
    monkeypatch.setattr("harness.client.exchange.time", clock)
    monkeypatch.setattr("harness.client.exchange.StreamReader", Reader)
    row = ask(script, after(1, think_ns=think_ns))
    assert (row.outcome, row.tokens_read, row.think_ns) == (Outcome.ABANDONED, 3, think_ns)
    assert (row.abandoned_ns or 0) - row.token_times_ns[0] >= 50 * MS
    assert row.token_times_ns[2] - row.token_times_ns[0] < LONG_NS  # stamped when they came


def test_an_answer_that_ends_first_is_not_abandoned(ask: Ask) -> None:
    thinks = threading.Event()

    def rule(tokens_read: int) -> int | None:
        if tokens_read:
            thinks.set()
        return HOUR_NS if tokens_read else None

    def finish(x: Exchange) -> None:
        x.accept(tokens=1)
        assert thinks.wait(30)
        x.token(finish_reason="stop")
        x.finish()

    def stop_early(x: Exchange) -> None:
        x.accept(tokens=1)
        x.send(b"0\r\n\r\n")

    completed, refused, failed = ask(finish, rule), ask(refuse, rule), ask(stop_early, rule)
    assert (completed.outcome, completed.tokens_read) == (Outcome.COMPLETED, 2)
    assert (refused.outcome, refused.error) == (Outcome.REJECTED, "HTTP 429: come back later")
    assert (failed.outcome, failed.tokens_read) == (Outcome.FAILED, 1)
    for row in (completed, refused, failed):
        assert (row.abandoned_ns, row.wire_close) == (None, None)


# Before the request is at the server: a time counts from the sending, however far that came.

AT_A_TIME: dict[str, Any] = {"plan": "time:x", "planned_abandon": 0, "way": Way.FIN, "pause": 1}


def test_a_user_leaves_while_the_connection_is_opened(full: str, connect: Connect) -> None:
    row = connect(full).ask(after(0, think_ns=50 * MS), **AT_A_TIME)
    assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.UNOPENED)
    assert (row.tokens_read, row.think_ns, row.error) == (0, 50 * MS, None)
    assert (row.abandoned_ns or 0) - row.sent_ns >= 50 * MS
    late = connect(full, total_timeout_s=0.05).ask(after(0, think_ns=LONG_NS), **AT_A_TIME)
    assert late.outcome is Outcome.TIMED_OUT, "the nearest end counts"


@pytest.mark.usefixtures("ready")
def test_a_user_leaves_while_the_request_is_taken(connect: Connect) -> None:
    large = {"extra_body": {"x": "a" * 32_000_000}}
    row = connect(PLAN.url, target=large).ask(after(0, think_ns=50 * MS), **AT_A_TIME)
    assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.FIN)
    assert (row.abandoned_ns or 0) - row.sent_ns >= 50 * MS


def test_a_pause_without_a_time_begins_when_the_request_has_gone_out(ask: Ask) -> None:
    """However short it is: the request comes to the server."""
    assert_left(ask, ask(silent, after(0), Way.FIN), 0)


# Half a close, and the cancel endpoint: what still comes after leaving is kept apart.


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("tokens", [0, 1])
def test_half_a_close_reads_on(ask: Ask, secrets: Secrets, is_tls: bool, tokens: int) -> None:
    def script(x: Exchange) -> None:
        if tokens:
            x.accept(tokens=1)
        assert x.client_left_within(30)  # it may still read
        if not tokens:
            x.accept()
        for _ in range(3):
            x.token()
        x.token(finish_reason="length")
        x.finish()

    tls = secrets.server if is_tls else None
    row = ask(script, after(tokens), Way.HALF_CLOSE, tls=tls, ca_file=secrets.ca_file)
    read = (row.outcome, row.tokens_read, row.tokens_after_leaving)
    assert read == (Outcome.ABANDONED, tokens, 4)
    assert (row.wire_close, row.finish_reason) == (WireClose.FIN, "length")
    assert ask.seen.closed_how == "fin"
    assert 0 < (row.abandoned_ns or 0) < (row.server_ended_ns or 0)


def test_a_server_may_hang_up_or_fall_silent_after_half_a_close(ask: Ask) -> None:
    row = ask(until_left, after(1), Way.HALF_CLOSE)
    assert (row.outcome, row.tokens_after_leaving) == (Outcome.ABANDONED, 0)
    assert row.server_ended_ns is not None
    is_over = threading.Event()

    def fall_silent(x: Exchange) -> None:
        until_left(x)
        assert is_over.wait(30)

    row = ask(fall_silent, after(1), Way.HALF_CLOSE, timeout_s=0.2)
    is_over.set()
    assert (row.outcome, row.server_ended_ns) == (Outcome.ABANDONED, None)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, None),
        (404, "the cancel endpoint answered HTTP 404"),
        (0, "the cancel endpoint did not answer: "),
    ],
)
@pytest.mark.parametrize("is_tls", [False, True])
def test_a_cancel_reads_the_stream_to_its_end(
    ask: Ask, secrets: Secrets, is_tls: bool, status: int, error: str | None
) -> None:
    asked_ns: list[int] = []
    is_asked = threading.Event()

    def script(x: Exchange) -> None:
        if x.target == "/v1/requests/r1/cancel":
            asked_ns.append(time.perf_counter_ns())
            is_asked.set()
            if status:
                x.send(b"HTTP/1.1 %d Whatever\r\ncontent-length: 2\r\n\r\n{}" % status)
            return
        x.accept(tokens=1)
        assert is_asked.wait(30)
        x.token()
        x.token(text="", finish_reason="abort")
        x.finish()

    tls = secrets.server if is_tls else None
    row = ask(script, after(1), Way.CANCEL, tls=tls, ca_file=secrets.ca_file)
    assert row.outcome is Outcome.ABANDONED
    assert (row.error or "").startswith(error) if error else row.error is None
    assert (row.tokens_read, row.tokens_after_leaving, row.finish_reason) == (1, 1, "abort")
    assert row.wire_close is WireClose.NOTHING
    assert 0 < (row.abandoned_ns or 0) < asked_ns[0] < (row.server_ended_ns or 0)


def test_an_id_is_quoted_in_the_path_of_its_cancel() -> None:
    spec = RequestSpec(request_id="x/y z", user=0, max_tokens=1, prompt_tokens=1)
    head = StreamClient(plan_of("http://h/"), api_key=None).build_cancel(spec).head
    assert head.startswith(b"POST /v1/requests/x%2Fy%20z/cancel HTTP/1.1")


def test_users_share_the_frontends_evenly_and_keep_to_theirs() -> None:
    plan = plan_of("http://h/").model_copy(update={"urls": ["http://a/", "http://b/x/"]})
    client = StreamClient(plan, api_key=None)
    assert [client.frontend_of(user).number for user in range(5)] == [0, 1, 0, 1, 0]
    spec = RequestSpec(request_id="r", user=3, max_tokens=1, prompt_tokens=1)
    for request in (client.build(spec, "hi"), client.build_cancel(spec)):
        assert request.head.startswith(b"POST /x/v1/")
        assert b"host: b\r\n" in request.head


# Without a word: connections that stay open.


def test_a_user_that_stops_reading_acknowledges_and_says_nothing(ask: Ask) -> None:
    """Its buffer fills; the connection ends with the load."""
    has_left, is_full = threading.Event(), threading.Event()

    def script(x: Exchange) -> None:
        x.accept(tokens=1)
        assert has_left.wait(30)
        assert not x.client_left_within(0)
        x.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            x.send(bytes(1 << 24))
        is_full.set()
        x.sock.settimeout(None)
        assert x.client_left_within(30)
        assert x.closed_how == "rst"

    row = ask(script, after(1), Way.STOP_READING)
    has_left.set()
    assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 1)
    assert row.wire_close is WireClose.NOTHING
    assert is_full.wait(30)


def test_a_user_that_vanished_does_not_even_acknowledge(ask: Ask) -> None:
    has_left = threading.Event()

    def script(x: Exchange) -> None:
        x.accept(tokens=1)
        assert has_left.wait(30)
        x.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 200)
        x.token()
        with pytest.raises(TimeoutError):
            x.client_left_within(30)

    row = ask(script, after(1), Way.VANISH)
    has_left.set()
    assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.SILENCE)
    assert ask.seen.closed_how is None


def test_t0_of_a_user_that_vanishes_is_before_the_act() -> None:
    acted_ns: list[int] = []
    sock = SimpleNamespace(setsockopt=lambda *_: acted_ns.append(time.perf_counter_ns()))
    connection = SimpleNamespace(sock=sock, keep_open=lambda: None)
    left = leave(Way.VANISH, cast("Http1Connection", connection))
    assert left.wire_close is WireClose.SILENCE
    assert left.t0_ns <= acted_ns[0]


HOLDER = """
import socket, sys
from harness.client.exchange import keep_open
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
keep_open([connection.fileno()])
connection.close()
"""


def test_a_connection_left_open_outlives_its_process_and_ends_with_standard_input() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HOLDER, port], stdin=subprocess.PIPE
        )
        peer, _ = listener.accept()
    with peer:
        assert process.wait(30) == 0
        peer.sendall(b"still there?")  # would be answered with a reset
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        assert process.stdin is not None
        process.stdin.close()
        peer.settimeout(30)
        with pytest.raises(ConnectionResetError):
            peer.recv(1)


# A client whose process is killed.


def test_what_a_killed_process_had_read_counts(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def script(x: Exchange) -> None:
        x.accept(tokens=1)
        assert leaves.wait(30)
        x.token()
        x.token(text="last words")
        assert x.client_left_within(30)

    monkeypatch.setattr("harness.client.connection.ClientProcess", Process)
    row = ask(script, after(1), Way.KILLED)
    assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 3)
    assert row.ended_ns < row.token_times_ns[1] <= row.token_times_ns[2] <= time.perf_counter_ns()


def clients() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.name() == "cat"]


def _die_by_another_hand(tokens_read: int) -> None:
    if tokens_read:
        clients()[0].kill()


@pytest.mark.parametrize(
    ("script", "rule", "outcome"),
    [
        (five_tokens, after(9), Outcome.COMPLETED),
        (until_left, after(1), Outcome.ABANDONED),
        (until_left, _die_by_another_hand, Outcome.FAILED),
    ],
)
def test_no_process_is_left_behind(
    ask: Ask,
    script: Callable[[Exchange], None],
    rule: Callable[[int], int | None],
    outcome: Outcome,
) -> None:
    assert ask(script, rule, Way.KILLED).outcome is outcome
    assert clients() == []
