"""Where connections are kept: which requests share one, and what happens when the server closed
it."""

import socket
import threading
from contextlib import closing

import httpx
import pytest

from harness.client.connection import Http1Connection
from harness.client.transport import SocketTransport
from harness.records import Outcome, Way
from tests.harness.client.asking import body_of, wire_request
from tests.harness.client.conftest import Connect, Exchange, Secrets, Serve

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


def answer(x: Exchange) -> None:
    x.send(ANSWER)
    x.goes_on = True


class Asker:
    """Sends one request after the other; `ports`: of our ends of the connections, in order."""

    def __init__(self, url: str, *, ca_file: str | None = None, keep_alive: bool = True) -> None:
        self.transport = SocketTransport(httpx.URL(url), ca_file=ca_file, keep_alive=keep_alive)
        self.ports: list[int] = []

    def ask(self, *, way: Way | None = None) -> bytes:
        request = wire_request(request_id=f"r{len(self.ports)}", way=way)
        with self.transport.open(request) as connection:
            self.ports.append(connection.sock.getsockname()[1])
            return body_of(connection)

    def close(self) -> None:
        self.transport.close()


@pytest.mark.parametrize(
    ("is_tls", "keep_alive", "ports"), [(False, False, 3), (False, True, 1), (True, True, 1)]
)
def test_kept_a_connection_carries_one_request_after_the_other(
    serve: Serve, secrets: Secrets, is_tls: bool, keep_alive: bool, ports: int
) -> None:
    server = serve(answer, tls=secrets.server if is_tls else None)
    with closing(Asker(server.url, ca_file=secrets.ca_file, keep_alive=keep_alive)) as asker:
        assert [asker.ask() for _ in range(3)] == [b"hi"] * 3
        assert len(set(asker.ports)) == ports


def test_what_does_not_go_on(serve: Serve) -> None:
    """`test_http1` has all reasons."""

    def script(x: Exchange) -> None:
        x.send(ANSWER + b"more than declared")
        x.goes_on = True

    with closing(Asker(serve(script).url)) as asker:
        assert asker.ask() == asker.ask()
        assert len(set(asker.ports)) == 2


def test_an_answer_that_was_not_read_to_its_end_is_not_passed_on(serve: Serve) -> None:
    def script(x: Exchange) -> None:
        x.send(ANSWER[:-1])
        assert x.client_left_within(30)

    with closing(Asker(serve(script).url)) as asker:
        for _ in range(2):
            with asker.transport.open(wire_request()) as connection:
                asker.ports.append(connection.sock.getsockname()[1])
        assert len(set(asker.ports)) == 2


@pytest.mark.parametrize("way", [Way.FIN, Way.RST, Way.HALF_CLOSE, Way.STOP_READING])
def test_a_request_to_be_left_neither_takes_nor_gives(serve: Serve, way: Way) -> None:
    with closing(Asker(serve(answer).url)) as asker:
        for each in (None, way, way, None):
            assert asker.ask(way=each) == b"hi"
    first, left, left_too, last = asker.ports
    assert first == last
    assert len({first, left, left_too}) == 3


@pytest.mark.parametrize(("size", "is_passed_on"), [(2, True), (1 << 25, False)])
def test_only_what_took_the_whole_request_carries_another(size: int, is_passed_on: bool) -> None:
    """A server that reads on would take the next request for the rest of this one."""
    ours, peer = socket.socketpair()
    transport = SocketTransport(httpx.URL("http://h/"), keep_alive=True)
    connection = Http1Connection(ours, 0.01)
    with ours, peer:
        peer.sendall(ANSWER)
        transport._ask(wire_request(body=b"x" * size, timeout_s=0.01), connection)
        assert body_of(connection) == b"hi"
        connection.close()
        assert (transport._pooled() is not None) is is_passed_on
        assert (ours.fileno() != -1) is is_passed_on


def test_a_server_that_has_closed_it_meanwhile(serve: Serve) -> None:
    server = serve(lambda x: x.send(ANSWER))
    with closing(Asker(server.url)) as asker:
        for number in range(3):
            assert asker.ask() == b"hi"
            assert server.exchanges[f"r{number}"].is_over.wait(30)
        assert len(set(asker.ports)) == 3


def test_a_server_that_closes_with_a_word_that_answers_nothing(serve: Serve) -> None:
    """As servers do that give an idle connection up: no request may take it for its answer."""
    is_idle = threading.Event()

    def script(x: Exchange) -> None:
        x.send(ANSWER)
        if x.request_id == "r0":
            assert is_idle.wait(30)
            x.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
            x.wait_until_received()

    server = serve(script)
    with closing(Asker(server.url)) as asker:
        assert asker.ask() == b"hi"
        is_idle.set()
        assert server.exchanges["r0"].is_over.wait(30)
        assert asker.ask() == b"hi"


@pytest.mark.parametrize("with_reset", [False, True])
def test_a_server_that_closes_just_as_it_is_used(
    serve: Serve, connect: Connect, with_reset: bool
) -> None:
    """The request goes out once more, and the row says so; not twice more, and not from a new
    connection. `positions`: of each request in its connection."""
    positions: list[int] = []
    used: set[socket.socket] = set()
    is_mute = threading.Event()

    def script(x: Exchange) -> None:
        positions.append(2 if x.sock in used else 1)
        if x.sock not in used and not is_mute.is_set():
            used.add(x.sock)
            answer(x)
        elif with_reset:
            x.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    client = connect(serve(script).url, keep_alive=True)
    assert [client.ask().resent for _ in range(3)] == [False, True, True]
    assert positions == [1, 2, 1, 2, 1]
    is_mute.set()
    assert client.ask().outcome is Outcome.FAILED
    assert positions == [1, 2, 1, 2, 1, 2, 1]


def test_an_answer_that_had_begun_is_not_asked_for_again(serve: Serve) -> None:
    asked: list[str] = []

    def script(x: Exchange) -> None:
        asked.append(x.request_id)
        x.send(ANSWER if x.request_id == "r0" else b"HTTP/1.1 2")
        x.goes_on = x.request_id == "r0"

    with closing(Asker(serve(script).url)) as asker:
        assert asker.ask() == b"hi"
        with pytest.raises(httpx.RemoteProtocolError, match="before the answer was complete"):
            asker.ask()
    assert asked == ["r0", "r1"]
