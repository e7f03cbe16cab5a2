"""Hanging up, against a real server: what the row says, and what the server saw of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from harness.load.client import StreamReader
from harness.records import Outcome, Way, WireClose
from tests.harness.load.asking import MS, PLAN, after, two_tokens

if TYPE_CHECKING:
    from tests.harness.load.conftest import Connect, Script, ScriptedServer
    from tests.harness.load.conftest import Exchange as Played

    Serve = Callable[[Script], ScriptedServer]

SOON_S = 0.2


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


def test_bytes_without_a_pause_keep_no_user_from_leaving(
    ready: Played, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whatever is read the server sends more."""

    class Feeding(StreamReader):
        def read(self, chunk: bytes, t_ns: int, /) -> None:
            super().read(chunk, t_ns)
            ready.token()

    ready.accept()
    ready.token()
    monkeypatch.setattr("harness.load.client.StreamReader", Feeding)
    row = connect(PLAN.url).ask(after(1), Way.FIN)
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
        row = connect(PLAN.url, timeout_s=SOON_S).ask(after(1), Way.HALF_CLOSE)
        assert (row.outcome, row.server_ended_ns) == (Outcome.ABANDONED, None)
