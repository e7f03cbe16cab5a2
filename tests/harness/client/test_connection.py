"""A connection hands over what was received, at once, and knows what it has not read."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from harness.client.connection import Http1Connection
from harness.client.leave import leave
from harness.records import Way, WireClose
from tests.harness.client.asking import PLAN, body_of, connected
from tests.harness.client.conftest import Exchange, Secrets, Serve


@pytest.fixture
def pair() -> Iterator[tuple[Http1Connection, socket.socket]]:
    """A connection whose headers have come, and the server's end."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        connection = Http1Connection(near, 30)
        connection.receive_head()
        yield connection, far
        connection.close()


def test_an_answer_that_is_complete_stays_so(ready: Exchange) -> None:
    ready.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
    with connected(PLAN.url) as connection:
        assert body_of(connection) == b"hello"
        assert (connection.status_code, connection.is_complete) == (200, True)
        assert connection.receive() is None
        assert connection.receive_within(0) is None
        assert not connection.receive_each(lambda _chunk, _t_ns: True)


def test_bytes_are_stamped_before_anything_is_done_with_them() -> None:
    class Slow(Http1Connection):
        parsed_ns = 0

        def parse(self, data: bytes) -> None:
            self.parsed_ns = time.perf_counter_ns()
            super().parse(data)

    ours, peer = socket.socketpair()
    with ours, peer:
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\nbody")
        connection = Slow(ours, 30)
        connection.receive_head()
        assert 0 < connection.received_ns <= connection.parsed_ns
        head_ns = connection.received_ns
        assert connection.receive() == b"body"
        assert connection.received_ns == head_ns  # it came along
        connection.close()


def test_nothing_received_is_held_back(ready: Exchange) -> None:
    ready.accept()
    ready.send(b"1\r\na\r\n1\r\nb\r\n2\r\nc")
    with connected(PLAN.url) as connection:
        assert connection.receive() == b"abc"
        assert connection.receive_within(0) is None
        assert connection.receive_within(0.01) is None
        assert not connection.is_complete


def test_records_of_tls_are_handed_over_at_once(serve: Serve, secrets: Secrets) -> None:
    """None of several kilobytes waits in the TLS library for the next receive."""
    has_head, has_sent = threading.Event(), threading.Event()

    def script(x: Exchange) -> None:
        x.send(b"HTTP/1.1 200 OK\r\n\r\n")
        assert has_head.wait(30)
        for _ in range(8):
            x.send(b"a" * 5000)
        x.wait_until_received()
        has_sent.set()
        assert x.client_left_within(30)

    server = serve(script, tls=secrets.server_of(ssl.TLSVersion.TLSv1_3))
    with connected(server.url, ca_file=secrets.ca_file) as connection:
        has_head.set()
        assert has_sent.wait(30)
        assert connection.unread_bytes() > 8 * 5000
        assert connection.receive() == b"a" * 8 * 5000
        assert connection.unread_bytes() == 0
        assert leave(Way.FIN, connection).wire_close is WireClose.FIN


def test_what_is_there_is_read_and_what_comes_meanwhile_is_not_waited_for(
    pair: tuple[Http1Connection, socket.socket],
) -> None:
    connection, far = pair
    far.sendall(b"there")
    chunks = []
    for chunk in connection.receive_present():
        chunks.append(chunk)
        far.sendall(b"more")
    assert chunks in ([b"there"], [b"there", b"more"])
    assert connection.unread_bytes() == len(b"more")
    assert list(connection.receive_present()) == [b"more"]
    assert list(connection.receive_present()) == []


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_end_that_is_there_is_noticed(ready: Exchange, is_whole: bool) -> None:
    length = b"" if is_whole else b"content-length: 10\r\n"
    ready.send(b"HTTP/1.1 200 OK\r\n%b\r\n" % length)
    with connected(PLAN.url) as connection:
        ready.send(b"last")
        ready.sock.shutdown(socket.SHUT_WR)
        present = connection.receive_present()
        assert next(present) == b"last"
        if is_whole:
            assert list(present) == []
            assert connection.is_complete
        else:
            with pytest.raises(httpx.RemoteProtocolError, match="before the answer was complete"):
                next(present)


@pytest.mark.parametrize("patience_ns", [0, 10_000_000])
@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-ty"], ids=["none", "half"])
def test_patience_may_end_before_the_headers(
    ready: Exchange, sent: bytes, patience_ns: int
) -> None:
    ready.send(sent)
    before_ns = time.perf_counter_ns()
    with connected(PLAN.url, patience_ns=patience_ns) as connection:
        assert not connection.has_head
        ready.sock.recv(65536)
        t0_ns, wire_close = leave(Way.FIN, connection)
    assert ready.client_left_within(30)
    assert before_ns + patience_ns <= t0_ns < (ready.closed_ns or 0)
    assert (wire_close, ready.closed_how) == (WireClose.FIN, "fin")


def test_headers_in_time_leave_the_rest_of_the_patience(ready: Exchange) -> None:
    ready.accept()
    before_ns = time.perf_counter_ns()
    with connected(PLAN.url, patience_ns=60_000_000_000) as connection:
        assert connection.status_code == 200
        assert (connection.leaves_at_ns or 0) > before_ns + 60_000_000_000


def test_a_request_that_is_not_taken_times_out(ready: Exchange) -> None:
    with (
        pytest.raises(httpx.WriteTimeout, match=r"not taken within 0\.1 s"),
        connected(PLAN.url, body=bytes(1 << 25), timeout_s=0.1),
    ):
        raise AssertionError("the request was taken")


def test_a_refusal_before_the_request_was_sent_is_read(ready: Exchange) -> None:
    """The server refuses, and leaves the request where it is."""
    ready.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
    with connected(PLAN.url, body=bytes(1 << 25), timeout_s=0.1) as connection:
        assert (connection.status_code, body_of(connection)) == (413, b"no")
