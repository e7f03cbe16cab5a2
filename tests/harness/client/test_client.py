"""One request against a real server: what it reads, how it ends, what its row says."""

import json
import os
import resource
import socket
import struct
import time
from dataclasses import replace
from typing import Any

import pytest

from harness.client.exchange import StreamClient
from harness.client.reader import StreamReader, UnaryReader
from harness.client.sse import MAX_EVENT_BYTES, EndlessEventError
from harness.client.stream import StreamMachine
from harness.client.transport import WireRequest
from harness.records import Delivery, Outcome, Role, TokenCounting, WireClose
from harness.workload.abandon import RequestSpec, never
from tests.harness.client.asking import (
    LONG_NS,
    PLAN,
    SPEC,
    Leaping,
    after,
    five_tokens,
    limited,
    plan_of,
    refuse,
    until_left,
)
from tests.harness.client.conftest import Ask, Connect, Exchange, Script, Serve

OK = b"HTTP/1.1 200 OK\r\n"
COMPRESSED = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"
UNARY: dict[str, Any] = {"delivery": Delivery.UNARY}


def says(text: bytes, *, after_a_token: bool = False) -> Script:
    def script(x: Exchange) -> None:
        if after_a_token:
            x.accept(tokens=1)
        x.send(text)

    return script


def test_a_priority_is_sent_where_the_server_has_a_field_for_it() -> None:
    asked = replace(SPEC, priority=-1)
    for key, sent in ((None, {}), ("priority", {"priority": -1})):
        client = StreamClient(plan_of(PLAN.url, target={"priority_key": key}), api_key=None)
        body = json.loads(client.message(asked, "Hello")[2])
        assert {name: body[name] for name in body if name == "priority"} == sent


def test_a_stream_read_to_its_end(ask: Ask) -> None:
    row = ask(five_tokens)
    assert (row.outcome, row.error) == (Outcome.COMPLETED, None)
    assert (row.tokens_read, row.completion_tokens, row.prompt_tokens) == (5, 5, 8)
    assert row.token_times_ns == sorted(row.token_times_ns)
    assert row.intended_start_ns <= row.sent_ns < row.token_times_ns[0]
    assert row.token_times_ns[-1] == row.last_token_ns
    assert row.token_times_ns[-1] <= row.ended_ns <= time.perf_counter_ns()
    assert ask.seen.body == {
        "model": "m",
        "prompt": "Hello",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert ask.seen.headers["authorization"] == "Bearer secret"
    assert ask.seen.headers["x-extra"] == "1"


def test_a_request_counts_from_its_sending_not_from_its_making(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_ns: list[int] = []
    build = StreamClient.build

    def note(client: StreamClient, spec: RequestSpec, prompt: str) -> WireRequest:
        request = build(client, spec, prompt)
        built_ns.append(time.perf_counter_ns())
        return request

    monkeypatch.setattr(StreamClient, "build", note)
    assert ask(five_tokens).sent_ns >= built_ns[0]


def test_chat(ask: Ask) -> None:
    ask(five_tokens, target={"path": "/v1/chat/completions", "stream_options": None})
    body = ask.seen.body
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    assert not {"prompt", "stream_options"} & set(body)


def _never_end_an_event(x: Exchange) -> None:
    x.accept()
    while True:
        x.chunk(b"data: " + b"a" * 65536 + b"\n")


def _reset(x: Exchange) -> None:
    x.accept(tokens=1)
    x.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


ENDS: list[tuple[Script, Outcome, int | None, str]] = [
    (refuse, Outcome.REJECTED, 429, "HTTP 429: come back later"),
    (
        says(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 99\r\n\r\nbusy"),
        Outcome.REJECTED,
        503,
        "HTTP 503: busy",
    ),
    (
        says(b"HTTP/1.1 503 X\r\ncontent-encoding: br\r\n\r\n" + COMPRESSED),
        Outcome.REJECTED,
        503,
        "HTTP 503: the body is compressed, though the request did not allow that",
    ),
    (
        says(b"HTTP/1.1 308 X\r\nlocation: https://elsewhere/v1\r\ncontent-length: 0\r\n\r\n"),
        Outcome.FAILED,
        308,
        "HTTP 308: the server redirects to https://elsewhere/v1: name that address",
    ),
    (says(b"HTTP/1.1 204 No Content\r\n\r\n"), Outcome.FAILED, 204, "HTTP 204"),
    (
        says(b"7\r\ndata: {\r\n0\r\n\r\n", after_a_token=True),
        Outcome.FAILED,
        200,
        "the stream ended early",
    ),
    (
        says(b"", after_a_token=True),
        Outcome.FAILED,
        200,
        "closed the connection before the answer was complete",
    ),
    (_reset, Outcome.FAILED, 200, "the connection broke"),
    (_never_end_an_event, Outcome.FAILED, 200, "event of more than"),
]


@pytest.mark.parametrize(("script", "outcome", "status", "error"), ENDS)
def test_however_it_ends_the_row_says_so(
    ask: Ask, script: Script, outcome: Outcome, status: int | None, error: str
) -> None:
    row = ask(script, after(5))
    assert (row.outcome, row.status_code, row.abandoned_ns) == (outcome, status, None)
    assert error in (row.error or "")


def test_no_file_handle_is_left(serve: Serve, connect: Connect) -> None:
    server = serve(says(OK + b"\r\n"))
    client, reasons = connect(server.url), list[str]()
    client.client = StreamClient(plan_of(server.url), api_key=None, give_up=reasons.append)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with limited(resource.RLIMIT_NOFILE, lowest_free):
        row = client.ask()
    assert row.outcome is Outcome.FAILED
    assert (row.error or "").startswith(f"no file handle is left, of {lowest_free}")
    assert reasons == [row.error]


class Killed(BaseException):
    """Like gevent's GreenletExit: no Exception."""


@pytest.mark.parametrize(
    ("raised", "outcome", "error"),
    [
        (Killed(), Outcome.CUT_OFF, None),
        (KeyError("oops"), Outcome.FAILED, "a bug of the client: KeyError('oops')"),
    ],
)
def test_a_request_that_is_killed_or_meets_a_bug_leaves_a_row_and_no_connection(
    serve: Serve, connect: Connect, raised: BaseException, outcome: Outcome, error: str | None
) -> None:
    def rule(tokens_read: int) -> int | None:
        if tokens_read:
            raise raised
        return None

    server = serve(until_left)
    client = connect(server.url)
    with pytest.raises(type(raised)):
        client.ask(rule)
    (row,) = client.rows
    assert (row.outcome, row.tokens_read, row.error) == (outcome, 1, error)
    assert server.exchanges["r1"].is_over.wait(30)


# Answers in one piece: nothing is read before all of it has come.


def one_piece(body: bytes) -> Script:
    return says(OK + b"content-length: %d\r\n\r\n%b" % (len(body), body))


def test_an_answer_in_one_piece(ask: Ask) -> None:
    body = (
        b'{"choices":[{"index":0,"text":"a","finish_reason":"length"},'
        b'{"index":1,"text":"b","finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":8,"completion_tokens":14}}'
    )
    row = ask(one_piece(body), after(10**6), spec={**UNARY, "n": 2})
    asked = ask.seen.body
    assert (asked["stream"], asked["n"], "stream_options" in asked) == (False, 2, False)
    assert ask.seen.headers["accept"] == "application/json"
    assert (row.outcome, row.tokens_read, row.completion_tokens) == (Outcome.COMPLETED, 14, 14)
    assert (row.delivery, row.stream, row.n) == (Delivery.UNARY, False, 2)
    assert (row.first_token_ns, row.token_times_ns) == (None, [])
    assert row.token_counting is TokenCounting.USAGE
    assert row.answer is None
    row = ask(one_piece(body), after(10**6), spec={**UNARY, "n": 2, "role": Role.CANARY})
    assert row.answer == "ab"


def test_a_token_came_when_its_bytes_did() -> None:
    stream = StreamMachine(SPEC, sent_ns=0, continuous_usage=False)
    stream.headers(200)
    StreamReader(stream, None).read(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n', 4711)
    stream.cut(4712)
    assert stream.row().token_times_ns == [4711]


def test_an_event_without_end_fails_the_request(ask: Ask) -> None:
    def endless(x: Exchange) -> None:
        x.accept()
        x.chunk(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n')
        x.chunk(b"data: " + b"x" * (MAX_EVENT_BYTES + 100))

    row = ask(endless, never)
    assert (row.outcome, row.tokens_read) == (Outcome.FAILED, 1)
    assert row.error == f"the server sent an event of more than {MAX_EVENT_BYTES} bytes"


def test_an_answer_in_one_piece_is_bounded() -> None:
    reader = UnaryReader(StreamMachine(SPEC, sent_ns=0, continuous_usage=True), max_bytes=100)
    reader.read(bytes(100), 0)
    with pytest.raises(EndlessEventError, match="the answer has more than 100 bytes"):
        reader.read(b"x", 0)


# Tokens are not events: what an event brings is learned from answers that were read whole.


def fours(x: Exchange) -> None:
    """Four tokens an event, and how many there were at the end."""
    x.accept()
    for _ in range(6):
        x.chunk(b'data: {"choices": [{"text": " a b c d"}]}\n\n')
        if x.client_left_within(0.02):
            return
    x.chunk(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n')
    x.chunk(b'data: {"choices": [], "usage": {"completion_tokens": 24}}\n\n')
    x.finish()


def test_a_user_leaves_by_tokens_once_it_is_known_what_an_event_brings(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve(fours).url, target={"continuous_usage": False})
    unknown = client.ask(after(5), max_tokens=24)
    assert (unknown.token_counting, unknown.event_tokens) == (TokenCounting.EVENTS, [1] * 5)
    assert (unknown.tokens_per_event, unknown.tokens_error) == (None, None)
    whole = client.ask(max_tokens=24)
    assert (whole.outcome, whole.completion_tokens) == (Outcome.COMPLETED, 24)
    left = client.ask(after(5), max_tokens=24)
    assert (left.outcome, left.tokens_read, left.event_tokens) == (Outcome.ABANDONED, 8, [4, 4])
    assert left.token_counting is TokenCounting.CALIBRATED
    assert (left.tokens_per_event, left.tokens_error) == (4.0, 3 / 8)


def test_nothing_is_learned_where_the_plan_says_so(serve: Serve, connect: Connect) -> None:
    client = connect(serve(fours).url, target={"continuous_usage": False}, learns_events=False)
    client.ask(max_tokens=24)
    assert client.ask(after(5), max_tokens=24).event_tokens == [1] * 5


# How long a client waits: each limit ends in a row that names it.


@pytest.mark.parametrize("answers", [False, True])
def test_silence(ready: Exchange, connect: Connect, answers: bool) -> None:
    if answers:
        ready.accept(tokens=1)
    row = connect(PLAN.url, connect_timeout_s=30.0, timeout_s=0.05).ask()
    assert (row.outcome, row.tokens_read) == (Outcome.TIMED_OUT, int(answers))
    assert row.error == "nothing came for 0.05 s"
    assert ready.sock.recv(65536).startswith(b"POST ")
    assert ready.client_left_within(0)


def _heartbeats(x: Exchange) -> None:
    x.accept()
    while not x.client_left_within(0.01):
        x.chunk(b": heartbeat\n\n")


def _tokens(x: Exchange) -> None:
    x.accept()
    x.stream(tokens=1000, gap_s=0.01)


NO_TOKEN = "no token came 0.1 s after the sending"
NOT_COMPLETE = "the answer was not complete 0.1 s after the sending"


@pytest.mark.parametrize(
    ("script", "limits", "spec", "think_ns", "error"),
    [
        (_heartbeats, {"first_token_timeout_s": 0.1}, {}, None, NO_TOKEN),
        (_tokens, {"first_token_timeout_s": 30.0, "total_timeout_s": 0.1}, {}, None, NOT_COMPLETE),
        (until_left, {"total_timeout_s": 0.1}, {}, 10**15, NOT_COMPLETE),
        (
            lambda x: x.client_left_within(30),
            {"first_token_timeout_s": 0.05, "total_timeout_s": 0.1},
            UNARY,
            None,
            NOT_COMPLETE,
        ),
    ],
    ids=["first token", "whole answer", "while the user thinks", "in one piece"],
)
def test_a_limit_passes(
    ask: Ask,
    script: Script,
    limits: dict[str, Any],
    spec: dict[str, Any],
    think_ns: int | None,
    error: str,
) -> None:
    rule = after(10**6) if think_ns is None else after(1, think_ns=think_ns)
    row = ask(script, rule, spec=spec, **limits)
    assert (row.outcome, row.error) == (Outcome.TIMED_OUT, error)
    assert 100_000_000 <= row.ended_ns - row.sent_ns < 5_000_000_000


def test_a_first_token_in_time_ends_its_limit(
    ready: Exchange, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others come when it would have passed."""
    clock = Leaping()
    for module in ("connection", "receiver"):
        monkeypatch.setattr(f"harness.client.{module}.time", clock)

    def stay(tokens_read: int) -> None:
        if tokens_read == 1 and not clock.ahead_ns:
            clock.ahead_ns = 2 * LONG_NS
            ready.token()
            ready.token(finish_reason="length")
            ready.finish()

    ready.accept(tokens=1)
    row = connect(PLAN.url, first_token_timeout_s=30.0).ask(stay)
    assert (row.outcome, row.tokens_read) == (Outcome.COMPLETED, 3)


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"connect_timeout_s": 0.1}, "no connection to PLACE within 0.1 s"),
        ({"first_token_timeout_s": 0.1}, NO_TOKEN),
        ({"total_timeout_s": 0.1}, NOT_COMPLETE),
    ],
)
def test_limits_hold_while_the_connection_is_opened(
    full: str, connect: Connect, limits: dict[str, float], error: str
) -> None:
    row = connect(full, **limits).ask(after(10**6))
    assert (row.outcome, row.wire_close) == (Outcome.TIMED_OUT, WireClose.UNOPENED)
    assert row.error == error.replace("PLACE", full.removeprefix("http://"))
    assert row.ended_ns - row.sent_ns >= 100_000_000


@pytest.mark.usefixtures("ready")
def test_limits_hold_while_the_request_is_taken(connect: Connect) -> None:
    """The server's side of the connection is there, and nothing is read from it."""
    large = {"extra_body": {"x": "a" * 32_000_000}}
    row = connect(PLAN.url, target=large, total_timeout_s=0.1).ask()
    assert (row.outcome, row.wire_close, row.error) == (Outcome.TIMED_OUT, None, NOT_COMPLETE)
