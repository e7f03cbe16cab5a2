"""Every odd server ends in a row that says what was odd, and none in waiting without end."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.load.client import StreamClient
from harness.records import Delivery, Outcome, RequestRow, Way
from harness.workload.abandon import never
from tests.harness.load.asking import PLAN, Client, body_of, connected, plan_of

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[..., ScriptedServer]

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
COMPRESSED = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"


def row_of(url: str, *, delivery: Delivery = Delivery.STREAM, **changes: object) -> RequestRow:
    return Client(url, **changes).ask(never, Way.FIN, delivery=delivery)


def says(text: bytes) -> Script:
    return lambda x: x.send(text)


@pytest.mark.parametrize(
    ("text", "outcome", "status", "error"),
    [
        (
            b"HTTP/1.1 308 X\r\nlocation: https://elsewhere/v1\r\ncontent-length: 0\r\n\r\n",
            Outcome.FAILED,
            308,
            "HTTP 308: the server redirects to https://elsewhere/v1: name that address",
        ),
        (b"HTTP/1.1 304 X\r\n\r\n", Outcome.FAILED, 304, "HTTP 304"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Outcome.FAILED, 204, "HTTP 204"),
        (
            OK + b"content-encoding: gzip\r\n\r\n" + COMPRESSED,
            Outcome.FAILED,
            200,
            "the answer is encoded (content-encoding: gzip), though the request did not allow that",
        ),
        (
            b"HTTP/1.1 503 X\r\ncontent-encoding: br\r\n\r\n" + COMPRESSED,
            Outcome.REJECTED,
            503,
            "HTTP 503: the body is compressed, though the request did not allow that",
        ),
        (
            b"HTTP/1.1 101 X\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
            Outcome.FAILED,
            None,
            "unasked",
        ),
        (OK + b"a: b\r\n" * 300, Outcome.FAILED, None, "headers without end"),
        (OK + b"content-length: 4\r\n\r\n: hi", Outcome.FAILED, 200, "the stream ended early"),
        (CHUNKED + b"zz\r\n", Outcome.FAILED, 200, "not HTTP/1.1: Invalid character in chunk size"),
        (
            OK + b"\r\ndata: \xff\xfe\n\n",
            Outcome.FAILED,
            200,
            "an event of the stream makes no sense",
        ),
        (OK + b"\r\n<html>Log in</html>", Outcome.FAILED, 200, "the stream ended early"),
        (b"+OK POP3 ready\r\n", Outcome.FAILED, None, r"it begins b'+OK POP3 ready\r\n'"),
    ],
)
def test_answers(
    serve: Serve, text: bytes, outcome: Outcome, status: int | None, error: str
) -> None:
    row = row_of(serve(says(text)).url)
    assert (row.outcome, row.status_code) == (outcome, status)
    assert row.error is not None
    assert error in row.error


def test_hints_come_before_the_answer(serve: Serve) -> None:
    def script(x: Exchange) -> None:
        x.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        x.accept()
        x.token(finish_reason="stop")
        x.finish()

    assert row_of(serve(script).url).outcome is Outcome.COMPLETED


def test_a_byte_now_and_then_is_no_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in time for the next byte; `test_answer` has the other places where it can drip."""

    def script(x: Exchange) -> None:
        x.send(b"HTTP/1.1 200 ")
        while not x.client_left_within(0.01):
            x.send(b"a")

    looks_s = count(step=10)
    clock = SimpleNamespace(
        perf_counter_ns=time.perf_counter_ns, perf_counter=lambda: next(looks_s)
    )
    monkeypatch.setattr("harness.load.connection.time", clock)
    row = row_of(serve(script).url)
    assert row.outcome is Outcome.TIMED_OUT
    assert row.error == "30 s after they began the headers had not come to an end"


def test_a_server_that_takes_no_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            pytest.raises(httpx.WriteTimeout, match=r"not taken within 0\.1 s"),
            connected(url, body=bytes(1 << 25), timeout_s=0.1),
        ):
            raise AssertionError("the request was taken")


def test_a_refusal_before_the_request_was_sent_is_read(ready: Exchange) -> None:
    """The server refuses, and leaves the request where it is."""
    ready.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
    with connected(PLAN.url, body=bytes(1 << 25), timeout_s=0.1) as connection:
        assert (connection.status_code, body_of(connection)) == (413, b"no")


def test_no_file_handle_left(serve: Serve) -> None:
    server = serve(says(OK + b"\r\n"))
    client, reasons = Client(server.url), list[str]()
    client.client = StreamClient(plan_of(server.url), api_key=None, give_up=reasons.append)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        row = client.ask(never, Way.FIN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert row.outcome is Outcome.FAILED
    assert row.error is not None
    assert row.error.startswith(f"no file handle is left, of {lowest_free}")
    assert reasons == [row.error]


def test_what_cannot_be_a_host() -> None:
    row = row_of(f"http://{'a' * 64}.example:9")
    assert row.outcome is Outcome.FAILED
    assert "label" in (row.error or "")
