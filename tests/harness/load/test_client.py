"""One request against a real server: what it reads, when it leaves, what its row says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from harness.load.client import StreamClient, StreamReader
from harness.load.transport import WireRequest
from harness.records import Outcome, WireClose
from harness.workload.abandon import RequestSpec
from tests.harness.load.asking import LONG_NS, MS, Leaping, User, after, refuse

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]


def _stream(x: Exchange) -> None:
    x.accept()
    x.stream(tokens=5, gap_s=0.001)


class _Builder(StreamClient):
    """Notes when a request was ready to be sent."""

    built_ns = 0

    def build(self, spec: RequestSpec, prompt: str) -> WireRequest:
        request = super().build(spec, prompt)
        self.built_ns = time.perf_counter_ns()
        return request


class TestStaying:
    def test_a_request_counts_from_its_sending_not_from_its_making(self, serve: Serve) -> None:
        user = User(serve(_stream).url)
        user._client = client = _Builder(user._client.plan, api_key=None)
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
        chat = {"path": "/v1/chat/completions", "stream_options": None}
        User(server.url, target=chat).ask()
        body = server.exchanges["r1"].body
        assert body["messages"] == [{"role": "user", "content": "Hello"}]
        assert not {"prompt", "stream_options"} & set(body)


class TestLeaving:
    @pytest.mark.parametrize("tokens", [0, 1, 4])
    def test_the_server_sees_the_close_and_the_row_says_when(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch, tokens: int
    ) -> None:
        clock = Leaping()
        clock.ahead_ns = LONG_NS  # with no token to wait for, the pause ends as the headers come
        monkeypatch.setattr("harness.load.client.time", clock)

        def script(x: Exchange) -> None:
            x.accept()
            for _ in range(tokens):
                x.token()
            assert x.client_left_within(30)

        server = serve(script)
        row = User(server.url).ask(after(tokens, think_ns=0 if tokens else LONG_NS))
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
        server.wait_for_arrivals(1)  # it may read the request only after the client has left
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
        row = User(serve(refuse).url).ask(after(0, think_ns=3_600_000 * MS))
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

    def test_reading_goes_on_while_thinking(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
            x.accept()
            x.token()
            assert thinks.wait(30)
            x.token()
            x.token()
            x.client_left_within(30)

        think_ns = LONG_NS + 50 * MS
        monkeypatch.setattr("harness.load.client.time", clock)
        monkeypatch.setattr("harness.load.client.StreamReader", Reader)
        row = User(serve(script).url).ask(after(1, think_ns=think_ns))
        assert (row.outcome, row.tokens_read, row.think_ns) == (Outcome.ABANDONED, 3, think_ns)
        assert row.abandoned_ns is not None
        assert row.abandoned_ns - row.token_times_ns[0] >= 50 * MS
        assert row.token_times_ns[2] - row.token_times_ns[0] < LONG_NS  # stamped when they came

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
