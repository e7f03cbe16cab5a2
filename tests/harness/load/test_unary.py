"""Answers in one piece: nothing is read before all of it has come."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from harness.load.client import StreamReader, UnaryReader
from harness.load.sse import EndlessEventError
from harness.load.stream import StreamMachine
from harness.records import Delivery, Outcome, TokenCounting, Way, WireClose
from tests.harness.load.asking import LONG_NS, MS, SPEC, Leaping, after

if TYPE_CHECKING:
    from tests.harness.load.conftest import Connect, Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]


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
    def test_left_before_the_body(
        self,
        serve: Serve,
        connect: Connect,
        monkeypatch: pytest.MonkeyPatch,
        has_headers: bool,
    ) -> None:
        clock = Leaping()
        clock.ahead_ns = LONG_NS  # where headers are to come, the pause ends with them
        monkeypatch.setattr("harness.load.client.time", clock)
        think_ns = LONG_NS if has_headers else 20 * MS

        def script(x: Exchange) -> None:
            if has_headers:
                x.send(b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"choices":')
            assert x.client_left_within(30)

        server = serve(script)
        row = connect(server.url).ask(after(0, think_ns=think_ns), Way.FIN, delivery=Delivery.UNARY)
        server.wait_for_arrivals(1)  # it may read the request only after the client has left
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
        stream = StreamMachine(SPEC, sent_ns=0, continuous_usage=False)
        stream.headers(200)
        StreamReader(stream, None).read(
            b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n', 4711
        )
        stream.cut(4712)
        assert stream.row().token_times_ns == [4711]

    def test_an_answer_without_end(self) -> None:
        unary = dataclasses.replace(SPEC, delivery=Delivery.UNARY)
        stream = StreamMachine(unary, sent_ns=0, continuous_usage=True)
        reader = UnaryReader(stream, max_bytes=100)
        reader.read(bytes(100), 0)
        with pytest.raises(EndlessEventError, match="the answer has more than 100 bytes"):
            reader.read(b"x", 0)
