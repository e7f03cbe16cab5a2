"""Opening a connection: look-ups, addresses in order, and TLS as a matter of bytes."""

import socket
import ssl
import threading
from queue import Queue

import httpx
import pytest

from harness.client.connect import Address, Dns, Tls, connect, dns_of, known
from harness.errors import ConfigError
from harness.http_client import tls_context
from harness.place import look_up
from harness.records import Way
from tests.harness.client.asking import (
    Client,
    after,
    body_of,
    connected,
    listening,
    refuse,
    until_left,
)
from tests.harness.client.conftest import Ask, Connect, Exchange, Secrets, Serve

V4, V6 = socket.AF_INET, socket.AF_INET6
SOMEWHERE = (V4, ("192.0.2.1", 80))
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Resolver:
    """Answers with addresses or an error once it `may_answer`, and counts the questions."""

    def __init__(self, *addresses: Address, error: Exception | None = None) -> None:
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._addresses = list(addresses)
        self._error = error
        self.dns = Dns("host", 80, self._look_up)

    def _look_up(self, _host: str, _port: int) -> list[Address]:
        self.asked += 1
        self.may_answer.wait()
        if self._error is not None:
            raise self._error
        return list(self._addresses)


def nobody() -> Address:
    """An address at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return V4, listener.getsockname()


def test_a_host_is_looked_up_once_and_the_address_that_answered_is_tried_first(
    serve: Serve,
) -> None:
    dead, alive = nobody(), (V4, ("127.0.0.1", serve(lambda _x: None).port))
    resolver = Resolver(dead, alive)
    assert [resolver.dns.addresses(None) for _ in range(2)] == [[dead, alive]] * 2
    connect(resolver.dns, 30.0, context=None)[0].close()
    assert resolver.dns.addresses(None) == [alive, dead]
    assert resolver.asked == 1


def test_where_no_server_was_is_forgotten() -> None:
    resolver = Resolver(nobody())
    for asked in (1, 2):
        with pytest.raises(httpx.ConnectError):
            connect(resolver.dns, 30.0, context=None)
        assert resolver.asked == asked


def test_an_address_that_the_run_has_found_is_the_only_one(serve: Serve, connect: Connect) -> None:
    """Nobody is asked for the name, and the server still gets it."""
    server = serve(refuse)
    place = f"name.invalid:{server.port}"
    dns = dns_of(httpx.URL(f"http://{place}"), "127.0.0.1")
    assert dns.addresses(None) == [(V4, ("127.0.0.1", server.port))]
    assert dns.host == "name.invalid"
    row = connect(f"http://{place}", address="127.0.0.1").ask()
    assert row.status_code == 429
    assert server.exchanges["r1"].headers["host"] == place


def test_no_caller_waits_for_a_look_up_longer_than_it_may() -> None:
    resolver = Resolver(SOMEWHERE)
    resolver.may_answer.clear()
    for _ in range(2):
        with pytest.raises(httpx.ConnectTimeout, match=r"of host was not known within 0\.01"):
            connect(resolver.dns, 0.01, context=None)
    resolver.may_answer.set()
    assert resolver.dns.addresses(None) == [SOMEWHERE]
    assert resolver.asked == 1, "one question for all"


def test_a_failure_is_heard_by_all_that_wait_and_forgotten() -> None:
    resolver = Resolver(error=socket.gaierror(socket.EAI_NONAME, "unknown"))
    resolver.may_answer.clear()
    heard: Queue[OSError] = Queue()

    def ask() -> None:
        try:
            resolver.dns.addresses(None)
        except OSError as error:
            heard.put(error)

    with pytest.raises(httpx.ConnectTimeout):
        resolver.dns.addresses(0.01)
    users = [threading.Thread(target=ask) for _ in range(3)]
    for user in users:
        user.start()
    resolver.may_answer.set()
    for user in users:
        user.join()
    assert heard.qsize() == 3
    asked = resolver.asked
    ask()
    assert resolver.asked == asked + 1


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", [(V4, ("127.0.0.1", 80))]),
        ("::1", [(V6, ("::1", 80))]),
        ("localhost", []),  # the system says in which order
        ("example.org", []),
    ],
)
def test_addresses_need_no_question(host: str, addresses: list[Address]) -> None:
    assert known(host, 80) == addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("is_tls", [False, True])
def test_localhost(serve: Serve, secrets: Secrets, host: str, is_tls: bool) -> None:
    """By address, and by name where that is one of its addresses."""
    tls = secrets.server if is_tls else None
    try:
        server = serve(lambda x: x.send(HEAD + b"hi"), host=host, tls=tls)
    except OSError:
        pytest.skip(f"{host} is not on this machine")
    by_name = f"{server.url.partition(':')[0]}://localhost:{server.port}"
    for url in (server.url, by_name) if host in look_up(by_name) else (server.url,):
        with connected(url, ca_file=secrets.ca_file) as connection:
            assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert body_of(connection) == b"hi"


class Peer:
    """The server's end of TLS, as a matter of bytes."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.end = context.wrap_bio(self._received, self._to_send, server_side=True)

    def take(self, data: bytes) -> None:
        self._received.write(data)

    def sent(self) -> bytes:
        return self._to_send.read()


def agreed(secrets: Secrets) -> tuple[Tls, Peer]:
    ours, peer = Tls(tls_context(secrets.ca_file), "localhost"), Peer(secrets.server)
    assert not ours.shake_hands(b"")
    peer.take(ours.owed())
    with pytest.raises(ssl.SSLWantReadError):
        peer.end.do_handshake()
    assert ours.shake_hands(peer.sent())
    peer.take(ours.owed())
    peer.end.do_handshake()
    return ours, peer


def test_a_record_is_read_when_it_is_complete_and_the_protocols_own_are_no_content(
    secrets: Secrets,
) -> None:
    ours, peer = agreed(secrets)
    tickets = peer.sent()
    assert tickets
    assert ours.decrypt(tickets) == b""
    assert not ours.is_over
    peer.end.write(b"hello")
    data = peer.sent()
    assert [ours.decrypt(data[:9]), ours.decrypt(data[9:])] == [b"", b"hello"]


def test_after_our_farewell_the_server_may_go_on(secrets: Secrets) -> None:
    ours, peer = agreed(secrets)
    ours.decrypt(peer.sent())
    peer.take(ours.farewell())
    assert peer.end.read(1) == b""
    peer.end.write(b"more")
    assert ours.decrypt(peer.sent()) == b"more"
    peer.end.unwrap()
    assert (ours.decrypt(peer.sent()), ours.is_over) == (b"", True)


def test_noise_is_no_tls(secrets: Secrets) -> None:
    with pytest.raises(ssl.SSLError):
        agreed(secrets)[0].decrypt(b"\x17\x03\x03\x00\x20" + bytes(32))


@pytest.mark.parametrize("says_so", [True, False])
def test_the_server_may_end_tls_with_or_without_a_word(
    serve: Serve, secrets: Secrets, says_so: bool
) -> None:
    def script(x: Exchange) -> None:
        x.send(HEAD + b"hello")
        if says_so:  # and leaves the connection open: its close_notify alone is the end
            assert isinstance(x.sock, ssl.SSLSocket)
            x.sock.unwrap()

    with connected(serve(script, tls=secrets.server).url, ca_file=secrets.ca_file) as connection:
        assert body_of(connection) == b"hello"


def test_an_unknown_ca(ask: Ask, secrets: Secrets) -> None:
    error = str(ask(until_left, tls=secrets.server).error)
    assert error.startswith("the certificate of 127.0.0.1 is not trusted (")
    assert "--ca-file" in error


def test_a_certificate_for_another_host(serve: Serve, secrets: Secrets) -> None:
    server = serve(until_left, host="127.0.0.2", tls=secrets.server)
    error = str(Client(server.url, ca_file=secrets.ca_file).ask(after(1), Way.FIN).error)
    assert "is not valid for '127.0.0.2'" in error
    assert "--ca-file" not in error


def test_the_cas_are_read_before_the_first_request() -> None:
    """Reading them takes tens of ms, which would be the first request's."""
    Client("http://127.0.0.1:1", ca_file="absent.pem")
    with pytest.raises(ConfigError, match=r"--ca-file absent\.pem"):
        Client("https://127.0.0.1:1", ca_file="absent.pem")


@pytest.mark.parametrize(
    ("says", "hangs_up", "words"),
    [
        (b"HTTP/1.1 400 X\r\n\r\n", False, " does not speak TLS: should the URL begin with http:"),
        (b"", True, "the server hung up"),
        (b"", False, "no connection to 127.0.0.1:"),
    ],
)
def test_a_server_that_agrees_on_no_tls(says: bytes, hangs_up: bool, words: str) -> None:
    is_over = threading.Event()

    def speak(sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(says)
        assert hangs_up or is_over.wait(30)

    timeout_s = 30 if says or hangs_up else 0.2
    with listening(speak) as place:
        with (
            pytest.raises(httpx.TransportError, match=words),
            connected(f"https://{place}", timeout_s=timeout_s),
        ):
            raise AssertionError("nothing was agreed on")
        is_over.set()


def test_a_host_that_is_none() -> None:
    assert "label" in str(Client(f"http://{'a' * 64}.example:9").ask().error)
