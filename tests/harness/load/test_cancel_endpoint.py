"""Leaving by the server's cancel endpoint: what the row says, and what was asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.load.client import StreamClient
from harness.records import Outcome, Way, WireClose
from tests.harness.load.asking import after, plan_of

if TYPE_CHECKING:
    from tests.harness.load.conftest import Connect, Script, ScriptedServer
    from tests.harness.load.conftest import Exchange as Played

    Serve = Callable[[Script], ScriptedServer]


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
        client = StreamClient(plan_of("http://h/"), api_key=None)
        head = client.build_cancel("x/y z").head
        assert head.startswith(b"POST /v1/requests/x%2Fy%20z/cancel HTTP/1.1")
