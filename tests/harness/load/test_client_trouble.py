"""One request that goes wrong: its row says how, and no connection is left."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from harness.records import Outcome
from tests.harness.load.asking import MS, PLAN, User, after, refuse

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]


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


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        (refuse, Outcome.REJECTED, "HTTP 429: come back later"),
        (_refuse_and_vanish, Outcome.REJECTED, "HTTP 503: busy"),
        (_error_inside, Outcome.FAILED, "the engine died"),
        (_stop_early, Outcome.FAILED, "ended early"),
        (_vanish, Outcome.FAILED, "closed the connection before the answer was complete"),
        (_reset, Outcome.FAILED, "the connection broke"),
        (_speak_gibberish, Outcome.FAILED, "not HTTP/1.1"),
        (_never_end_an_event, Outcome.FAILED, "event of more than"),
    ],
)
def test_odd_ends(serve: Serve, script: Script, outcome: Outcome, error: str) -> None:
    row = User(serve(script).url).ask(after(5))
    assert row.outcome is outcome
    assert row.error is not None
    assert error in row.error
    assert row.abandoned_ns is None


def test_a_stream_that_stops_while_the_user_thinks(serve: Serve) -> None:
    row = User(serve(_stop_early).url).ask(after(1, think_ns=3_600_000 * MS))
    assert (row.outcome, row.tokens_read) == (Outcome.FAILED, 1)
    assert row.error is not None
    assert "ended early" in row.error


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    row = User(f"http://127.0.0.1:{port}").ask()
    assert (row.outcome, row.status_code) == (Outcome.FAILED, None)
    assert row.error is not None
    assert "refused" in row.error


@pytest.mark.parametrize("answers", [False, True])
def test_silence(ready: Exchange, answers: bool) -> None:
    if answers:
        ready.accept()
        ready.token()
    row = User(PLAN.url, connect_timeout_s=30.0, timeout_s=0.05).ask()
    assert (row.outcome, row.tokens_read) == (Outcome.TIMED_OUT, int(answers))
    assert row.error == "nothing came for 0.05 s"
    assert ready.sock.recv(65536).startswith(b"POST ")
    assert ready.client_left_within(0)


def test_a_killed_request_leaves_a_row_and_no_connection(serve: Serve) -> None:
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


def test_a_bug_of_ours_is_a_failure_and_no_secret(serve: Serve) -> None:
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
