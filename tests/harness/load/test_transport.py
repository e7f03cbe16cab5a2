"""The transport hands over what was received, at once, and knows what it has not read."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.load.connection import Connection
from harness.load.leave import leave
from harness.records import Way, WireClose
from tests.harness.load.asking import body_of, connected

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]


def test_what_is_sent_goes_out_at_once(serve: Serve) -> None:
    with connected(serve(lambda x: x.send(b"HTTP/1.1 204 X\r\n\r\n")).url) as connection:
        assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
    ids=["length", "chunked", "until it closes", "after a 100"],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_framings(serve: Serve, answer: bytes, size: int) -> None:
    def script(x: Exchange) -> None:
        for i in range(0, len(answer), size):
            x.send(answer[i : i + size])

    with connected(serve(script).url) as connection:
        assert body_of(connection) == b"hello"
        assert connection.status_code == 200
        assert connection.is_complete
        assert connection.receive() is None
        assert connection.receive_within(0) is None
        assert not connection.receive_each(lambda _chunk, _t_ns: True)


def test_each_receive_is_handed_over_until_that_is_enough(serve: Serve) -> None:
    has_had: list[tuple[bytes, int]] = []
    goes_on = threading.Semaphore(0)

    def script(x: Exchange) -> None:
        x.accept()
        for word in (b"one", b"two", b"three"):
            x.chunk(word)
            assert goes_on.acquire(timeout=30)
        x.send(b"0\r\n\r\n")

    def take(chunk: bytes, t_ns: int) -> bool:
        assert t_ns == connection.received_ns
        has_had.append((chunk, t_ns))
        goes_on.release()
        return len(has_had) != 2

    with connected(serve(script).url) as connection:
        assert connection.receive_each(take)
        assert [chunk for chunk, _ in has_had] == [b"one", b"two"]
        while connection.receive_each(take):
            """There is more."""
        assert [chunk for chunk, _ in has_had] == [b"one", b"two", b"three"]
        assert connection.is_complete


def test_bytes_are_stamped_before_anything_is_done_with_them() -> None:
    class Slow(Connection):
        parsed_ns = 0

        def parse(self, data: bytes) -> None:
            self.parsed_ns = time.perf_counter_ns()
            super().parse(data)

    ours, peer = socket.socketpair()
    with ours, peer:
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\nbody")
        connection = Slow(ours, 30)
        connection.receive_head(None)
        assert 0 < connection.received_ns <= connection.parsed_ns
        head_ns = connection.received_ns
        assert connection.receive() == b"body"
        assert connection.received_ns == head_ns  # it came along
        connection.close()


def test_nothing_received_is_held_back(serve: Serve) -> None:
    def script(x: Exchange) -> None:
        x.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n2\r\nc")
        x.client_left_within(30)

    with connected(serve(script).url) as connection:
        assert connection.receive() == b"abc"
        assert connection.receive_within(0) is None
        assert not connection.is_complete


@pytest.mark.parametrize("reads", [True, False])
def test_unread_bytes_make_a_reset(serve: Serve, reads: bool) -> None:
    has_headers = threading.Event()

    def script(x: Exchange) -> None:
        x.accept()
        assert has_headers.wait(30)
        x.token()
        assert x.client_left_within(30)

    server = serve(script)
    with connected(server.url) as connection:
        has_headers.set()
        if reads:
            assert connection.receive()
        else:
            while connection.unread_bytes() == 0:
                pass
        _, wire_close = leave(Way.FIN, connection)
        exchange = server.exchanges["r1"]
        assert exchange.is_over.wait(30)
        assert wire_close is (WireClose.FIN if reads else WireClose.RST)
        assert wire_close == exchange.closed_how


def test_draining_takes_what_has_arrived_and_does_not_wait(serve: Serve) -> None:
    def script(x: Exchange) -> None:
        x.accept()
        x.chunk(b"data")
        x.client_left_within(30)

    with connected(serve(script).url) as connection:
        received = b""
        while not received:
            received = connection.receive_within(0) or b""
        assert received == b"data"
        assert connection.receive_within(0) is None
        assert connection.receive_within(0.01) is None


def test_what_is_there_is_read_and_what_comes_meanwhile_is_not_waited_for() -> None:
    ours, peer = socket.socketpair()
    with ours, peer:
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        connection = Connection(ours, 30)
        connection.receive_head(None)
        peer.sendall(b"there")
        chunks = []
        for chunk in connection.receive_present():
            chunks.append(chunk)
            peer.sendall(b"more")
        assert chunks in ([b"there"], [b"there", b"more"])
        assert connection.unread_bytes() == len(b"more")
        assert list(connection.receive_present()) == [b"more"]
        assert list(connection.receive_present()) == []
        connection.close()


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_end_that_is_there_is_noticed(is_whole: bool) -> None:
    length = b"" if is_whole else b"content-length: 10\r\n"
    ours, peer = socket.socketpair()
    with ours, peer:
        peer.sendall(b"HTTP/1.1 200 OK\r\n%b\r\n" % length)
        connection = Connection(ours, 30)
        connection.receive_head(None)
        peer.sendall(b"last")
        peer.shutdown(socket.SHUT_WR)
        present = connection.receive_present()
        assert next(present) == b"last"
        if is_whole:
            assert list(present) == []
            assert connection.is_complete
        else:
            with pytest.raises(httpx.RemoteProtocolError, match="before the answer was complete"):
                next(present)
        connection.close()


@pytest.mark.parametrize("patience_ns", [0, 10_000_000])
@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-ty"], ids=["none", "half"])
def test_patience_may_end_before_the_headers(serve: Serve, sent: bytes, patience_ns: int) -> None:
    def script(x: Exchange) -> None:
        x.send(sent)
        assert x.client_left_within(30)

    server = serve(script)
    before_ns = time.perf_counter_ns()
    with connected(server.url, patience_ns=patience_ns) as connection:
        assert not connection.has_head
        t0_ns, wire_close = leave(Way.FIN, connection)
    server.wait_for_arrivals(1)  # it may read the request only after the client has left
    exchange = server.exchanges["r1"]
    assert exchange.is_over.wait(30)
    assert exchange.closed_ns is not None
    assert before_ns + patience_ns <= t0_ns < exchange.closed_ns
    if patience_ns or not sent:  # without patience, what was sent may not have been read
        assert wire_close is WireClose.FIN
        assert exchange.closed_how == "fin"


def test_headers_in_time_leave_the_rest_of_the_patience(serve: Serve) -> None:
    def script(x: Exchange) -> None:
        x.accept()
        assert x.client_left_within(30)

    before_ns = time.perf_counter_ns()
    with connected(serve(script).url, patience_ns=60_000_000_000) as connection:
        assert connection.status_code == 200
        assert connection.leaves_at_ns is not None
        assert connection.leaves_at_ns > before_ns + 60_000_000_000


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_an_end_before_the_headers_is_no_answer(serve: Serve, sent: bytes) -> None:
    complaint = pytest.raises(httpx.RemoteProtocolError, match="before the answer was complete")
    with complaint, connected(serve(lambda x: x.send(sent)).url):
        raise AssertionError("there are no headers to connect with")


def test_leaving_the_block_closes(serve: Serve) -> None:
    def script(x: Exchange) -> None:
        x.accept()
        assert x.client_left_within(30)

    server = serve(script)
    with pytest.raises(RuntimeError, match="anything"), connected(server.url):
        raise RuntimeError("anything")
    assert server.exchanges["r1"].is_over.wait(30)
