"""One request against a real server: what it reads, when it leaves, what its row says."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest

from harness.load.abandon import LeaveRule, never
from harness.load.client import StreamClient
from harness.load.plan import AbandonLoad, LoadPlan, Timeouts
from harness.load.ticket import STAYS, Intent, Ticket
from harness.records import Outcome, RequestRow, Role, WireClose

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]

MS = 1_000_000
PLAN = LoadPlan(
    url="http://127.0.0.1:1",
    path="/v1/completions",
    model="m",
    api_key_env=None,
    headers={"x-extra": "1"},
    extra_body={"ignore_eos": True},
    stream_options={"include_usage": True},
    continuous_usage=True,
    rows_dir=None,
    seed=0,
    arm="main",
    users=1,
    timeouts=Timeouts(connect_s=30.0, next_byte_s=30.0),
    max_seconds=60.0,
    load=AbandonLoad(
        mix=[],
        think="none",
        prompt_tokens=(8, 8),
        answer_tokens=9,
        stay_tokens=9,
        shared_prefix_tokens=0,
        stop_after_abandons=None,
    ),
)


def after(tokens: int, *, think_ns: int = 0) -> LeaveRule:
    return lambda read: think_ns if read >= tokens else None


class User:
    """Asks once at a time; `row` is what was kept of the latest request."""

    def __init__(self, url: str, **changes: object) -> None:
        plan = msgspec.structs.replace(PLAN, url=url, **changes)
        self._client = StreamClient(plan, api_key="secret")
        self._rows: list[RequestRow] = []

    @property
    def row(self) -> RequestRow:
        (row,) = self._rows
        return row

    def close(self) -> None:
        self._client.close()

    def ask(self, rule: LeaveRule = never, intent: Intent = STAYS) -> RequestRow:
        self._rows.clear()
        ticket = Ticket(
            request_id="r1",
            arm="main",
            role=Role.USER,
            trial=None,
            user=0,
            max_tokens=9,
            intended_start_ns=time.perf_counter_ns(),
            intent=intent,
        )
        try:
            self._client.ask(ticket, "Hello", rule, self._rows.append)
        finally:
            assert self._client.open_streams == 0
        return self.row


def _stream(x: Exchange) -> None:
    x.accept()
    x.stream(tokens=5, gap_s=0.001)


class _Builder(StreamClient):
    """Notes when a request was ready to be sent."""

    built_ns = 0

    def _build(self, ticket: Ticket, prompt: str) -> httpx.Request:
        request = super()._build(ticket, prompt)
        self.built_ns = time.perf_counter_ns()
        return request


class TestStaying:
    def test_a_request_counts_from_its_sending_not_from_its_making(self, serve: Serve) -> None:
        user = User(serve(_stream).url)
        plan = msgspec.structs.replace(PLAN, url=user._client._plan.url)
        user._client = client = _Builder(plan, api_key=None)
        assert user.ask().sent_ns >= client.built_ns > 0

    def test_no_stamp_is_of_a_time_to_come(self, serve: Serve) -> None:
        row = User(serve(_stream).url).ask()
        assert row.last_token_ns is not None
        assert max(row.token_times_ns) == row.last_token_ns
        assert row.last_token_ns <= row.ended_ns <= time.perf_counter_ns()

    def test_a_stream_read_to_its_end(self, serve: Serve) -> None:
        server = serve(_stream)
        row = User(server.url).ask()
        assert (row.outcome, row.error) == (Outcome.COMPLETED, None)
        assert (row.tokens_read, row.completion_tokens, row.prompt_tokens) == (5, 5, 8)
        assert row.token_times_ns == sorted(row.token_times_ns)
        assert row.intended_start_ns <= row.sent_ns < row.token_times_ns[0]
        exchange = server.exchanges["r1"]
        assert exchange.body == {
            "model": "m",
            "prompt": "Hello",
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        assert exchange.headers["authorization"] == "Bearer secret"
        assert exchange.headers["x-extra"] == "1"

    def test_chat(self, serve: Serve) -> None:
        server = serve(_stream)
        User(server.url, path="/v1/chat/completions", stream_options=None).ask()
        body = server.exchanges["r1"].body
        assert body["messages"] == [{"role": "user", "content": "Hello"}]
        assert not {"prompt", "stream_options"} & set(body)


class TestLeaving:
    @pytest.mark.parametrize("tokens", [0, 1, 4])
    def test_the_server_sees_the_close_and_the_row_says_when(
        self, serve: Serve, tokens: int
    ) -> None:
        def script(x: Exchange) -> None:
            x.accept()
            for _ in range(tokens):
                x.token()
            assert x.client_left_within(30)

        server = serve(script)
        # With no token to wait for, the think time is what lets the headers come first.
        row = User(server.url).ask(after(tokens, think_ns=0 if tokens else 50 * MS))
        exchange = server.exchanges["r1"]
        assert exchange.is_over.wait(30)
        assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, tokens)
        assert row.wire_close is WireClose.FIN
        assert exchange.closed_how == "fin"
        assert row.abandoned_ns is not None
        assert exchange.closed_ns is not None
        assert 0 < exchange.closed_ns - row.abandoned_ns < 5_000 * MS

    def test_leaving_at_once_needs_no_headers(self, serve: Serve) -> None:
        def script(x: Exchange) -> None:
            assert x.client_left_within(30)  # headers come with the first token, which never does

        server = serve(script)
        row = User(server.url).ask(after(0, think_ns=20 * MS))
        assert server.exchanges["r1"].is_over.wait(30)
        assert (row.outcome, row.status_code, row.tokens_read) == (Outcome.ABANDONED, None, 0)
        assert (row.wire_close, server.exchanges["r1"].closed_how) == (WireClose.FIN, "fin")
        assert row.abandoned_ns is not None
        assert 20 * MS <= row.abandoned_ns - row.sent_ns < 5_000 * MS

    def test_what_came_before_leaving_at_once_was_read(self, serve: Serve) -> None:
        has_arrived = threading.Event()

        def script(x: Exchange) -> None:
            x.accept()
            x.token()
            x.wait_until_received()
            x.token()
            x.wait_until_received()
            has_arrived.set()
            x.client_left_within(30)

        def rule(tokens_read: int) -> int | None:
            if tokens_read == 0:
                return None
            assert has_arrived.wait(30)
            return 0

        row = User(serve(script).url).ask(rule)
        assert (row.outcome, row.status_code, row.tokens_read) == (Outcome.ABANDONED, 200, 2)
        assert row.wire_close is WireClose.FIN

    def test_who_wants_to_leave_can_be_refused_first(self, serve: Serve) -> None:
        row = User(serve(_refuse).url).ask(after(0, think_ns=3_600_000 * MS))
        assert (row.outcome, row.status_code) == (Outcome.REJECTED, 429)
        assert (row.error, row.abandoned_ns) == ("HTTP 429: come back later", None)

    def test_tokens_that_came_in_one_receive_were_all_read(self, serve: Serve) -> None:
        def script(x: Exchange) -> None:
            frames = b""
            for _ in range(3):
                x.tokens_sent += 1
                frames += b"%x\r\n%b\r\n" % (len(x.event()), x.event())
            x.accept()
            x.send(frames + b"40\r\ndata: {half an eve")
            x.client_left_within(30)

        row = User(serve(script).url).ask(after(1))
        assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 3)
        assert row.wire_close is WireClose.FIN

    def test_what_came_while_the_client_was_busy_was_read(self, serve: Serve) -> None:
        is_busy, has_arrived = threading.Event(), threading.Event()

        def script(x: Exchange) -> None:
            x.accept()
            x.token()
            assert is_busy.wait(30)
            x.token()
            x.token()
            x.wait_until_received()
            has_arrived.set()
            x.client_left_within(30)

        def rule(tokens_read: int) -> int | None:
            if tokens_read == 0:
                return None
            is_busy.set()
            assert has_arrived.wait(30)
            return 0  # leave at once

        row = User(serve(script).url).ask(rule)
        assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 3)
        assert row.wire_close is WireClose.FIN

    def test_reading_goes_on_while_thinking(self, serve: Serve) -> None:
        thinks = threading.Event()

        def script(x: Exchange) -> None:
            x.accept()
            x.token()
            assert thinks.wait(30)
            x.token()
            x.token()
            x.client_left_within(30)

        def rule(tokens_read: int) -> int | None:
            if tokens_read == 0:
                return None
            thinks.set()
            return 50 * MS

        row = User(serve(script).url).ask(rule)
        assert (row.outcome, row.tokens_read, row.think_ns) == (Outcome.ABANDONED, 3, 50 * MS)
        assert row.abandoned_ns is not None
        assert row.abandoned_ns - row.token_times_ns[0] >= 50 * MS
        assert row.abandoned_ns - row.token_times_ns[2] > 10 * MS  # stamped when they came

    def test_an_answer_that_ends_while_the_user_thinks_is_complete(self, serve: Serve) -> None:
        thinks = threading.Event()

        def script(x: Exchange) -> None:
            x.accept()
            x.token()
            assert thinks.wait(30)
            x.token(finish_reason="stop")
            x.finish()

        def rule(tokens_read: int) -> int | None:
            if tokens_read == 0:
                return None
            thinks.set()
            return 3_600_000 * MS

        row = User(serve(script).url).ask(rule)
        assert (row.outcome, row.tokens_read) == (Outcome.COMPLETED, 2)
        assert (row.abandoned_ns, row.wire_close) == (None, None)


def _refuse(x: Exchange) -> None:
    body = b'{"error":{"message":"come back later"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n"
    x.send(head % len(body) + body)


def _refuse_and_vanish(x: Exchange) -> None:
    x.send(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 99\r\n\r\nbusy")


def _error_inside(x: Exchange) -> None:
    x.accept()
    x.token()
    x.chunk(b'data: {"error":{"message":"the engine died"}}\n\n')


def _stop_early(x: Exchange) -> None:
    x.accept()
    x.token()
    x.send(b"0\r\n\r\n")


def _vanish(x: Exchange) -> None:
    x.accept()
    x.token()


def _reset(x: Exchange) -> None:
    x.accept()
    x.token()
    x.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _speak_gibberish(x: Exchange) -> None:
    x.send(b"SSH-2.0-OpenSSH_9.6\r\n")


def _never_end_an_event(x: Exchange) -> None:
    x.accept()
    while True:
        x.chunk(b"data: " + b"a" * 65536 + b"\n")


class TestTrouble:
    @pytest.mark.parametrize(
        ("script", "outcome", "error"),
        [
            (_refuse, Outcome.REJECTED, "HTTP 429: come back later"),
            (_refuse_and_vanish, Outcome.REJECTED, "HTTP 503: busy"),
            (_error_inside, Outcome.FAILED, "the engine died"),
            (_stop_early, Outcome.FAILED, "ended early"),
            (_vanish, Outcome.FAILED, "closed the connection before the answer was complete"),
            (_reset, Outcome.FAILED, "the connection broke"),
            (_speak_gibberish, Outcome.FAILED, "not HTTP/1.1"),
            (_never_end_an_event, Outcome.FAILED, "event of more than"),
        ],
    )
    def test_servers(self, serve: Serve, script: Script, outcome: Outcome, error: str) -> None:
        row = User(serve(script).url).ask(after(5))
        assert row.outcome is outcome
        assert row.error is not None
        assert error in row.error
        assert row.abandoned_ns is None

    def test_a_stream_that_stops_while_the_user_thinks(self, serve: Serve) -> None:
        row = User(serve(_stop_early).url).ask(after(1, think_ns=3_600_000 * MS))
        assert (row.outcome, row.tokens_read) == (Outcome.FAILED, 1)
        assert row.error is not None
        assert "ended early" in row.error

    def test_nobody_there(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        row = User(f"http://127.0.0.1:{port}").ask()
        assert (row.outcome, row.status_code) == (Outcome.FAILED, None)
        assert row.error is not None
        assert "refused" in row.error

    @pytest.mark.parametrize("answers", [False, True])
    def test_silence(self, serve: Serve, answers: bool) -> None:
        def script(x: Exchange) -> None:
            if answers:
                x.accept()
                x.token()
            assert x.client_left_within(30)

        row = User(serve(script).url, timeouts=Timeouts(connect_s=30.0, next_byte_s=0.05)).ask()
        assert (row.outcome, row.tokens_read) == (Outcome.TIMED_OUT, int(answers))
        assert row.error == "nothing came for 0.05 s"

    def test_a_killed_request_leaves_a_row_and_no_connection(self, serve: Serve) -> None:
        class Killed(BaseException):
            """Like gevent's GreenletExit: no Exception."""

        def script(x: Exchange) -> None:
            x.accept()
            x.token()
            assert x.client_left_within(30)

        def rule(tokens_read: int) -> int | None:
            if tokens_read:
                raise Killed
            return None

        server = serve(script)
        user = User(server.url)
        with pytest.raises(Killed):
            user.ask(rule)
        assert (user.row.outcome, user.row.tokens_read) == (Outcome.CUT_OFF, 1)
        assert user.row.error is None
        assert server.exchanges["r1"].is_over.wait(30)

    def test_a_bug_of_ours_is_a_failure_and_no_secret(self, serve: Serve) -> None:
        def script(x: Exchange) -> None:
            x.accept()
            assert x.client_left_within(30)

        def rule(_tokens_read: int) -> int | None:
            raise KeyError("oops")

        user = User(serve(script).url)
        with pytest.raises(KeyError):
            user.ask(rule)
        assert user.row.outcome is Outcome.FAILED
        assert user.row.error == "a bug of the client: KeyError('oops')"
