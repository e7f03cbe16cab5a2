"""Over TLS everything is as it is without, and whoever cannot be trusted is told."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.errors import ConfigError
from harness.load.connect import Tls
from harness.load.leave import leave
from harness.records import Outcome, Way, WireClose
from tests.harness.load.asking import Client, after, body_of, connected

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, ScriptedServer, Secrets

    Serve = Callable[..., ScriptedServer]

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def until_left(x: Exchange) -> None:
    x.accept()
    x.token()
    assert x.client_left_within(30)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("way", "wire_close", "seen"),
    [
        (Way.FIN, WireClose.FIN, "fin"),
        (Way.RST, WireClose.RST, "cut"),
        (Way.KILLED, WireClose.KERNEL, "cut"),
    ],
)
def test_the_ways_to_end_it(
    serve: Serve,
    secrets: Secrets,
    version: ssl.TLSVersion,
    way: Way,
    wire_close: WireClose,
    seen: str,
) -> None:
    context = secrets.server_of(version)
    server = serve(until_left, tls=context)
    client = Client(server.url, ca_file=secrets.ca_file)
    row = client.ask(after(1), way)
    exchange = server.exchanges["r1"]
    assert exchange.is_over.wait(30)
    assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 1)
    assert (row.wire_close, exchange.closed_how) == (wire_close, seen)


def test_half_of_it_can_be_closed(serve: Serve, secrets: Secrets) -> None:
    def script(x: Exchange) -> None:
        until_left(x)
        x.token()
        x.token(finish_reason="length")
        x.finish()

    server = serve(script, tls=secrets.server)
    row = Client(server.url, ca_file=secrets.ca_file).ask(after(1), Way.HALF_CLOSE)
    assert (row.outcome, row.tokens_read, row.tokens_after_leaving) == (Outcome.ABANDONED, 1, 2)
    assert (row.wire_close, server.exchanges["r1"].closed_how) == (WireClose.FIN, "fin")


def test_a_cancel_goes_over_tls_too(serve: Serve, secrets: Secrets) -> None:
    is_asked = threading.Event()

    def script(x: Exchange) -> None:
        if x.target.endswith("/cancel"):
            is_asked.set()
            x.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        x.accept()
        x.token()
        assert is_asked.wait(30)
        x.token(text="", finish_reason="abort")
        x.finish()

    server = serve(script, tls=secrets.server)
    row = Client(server.url, ca_file=secrets.ca_file).ask(after(1), Way.CANCEL)
    assert (row.outcome, row.error, row.finish_reason) == (Outcome.ABANDONED, None, "abort")


def test_all_that_was_received_is_handed_over_at_once(serve: Serve, secrets: Secrets) -> None:
    """Records of several kilobytes: none of them waits in the TLS library for the next receive."""
    has_head, has_sent = threading.Event(), threading.Event()

    def script(x: Exchange) -> None:
        x.send(HEAD)
        assert has_head.wait(30)
        for _ in range(8):
            x.send(b"a" * 5000)
        x.wait_until_received()
        has_sent.set()
        assert x.client_left_within(30)

    with connected(serve(script, tls=secrets.server).url, ca_file=secrets.ca_file) as connection:
        has_head.set()
        assert has_sent.wait(30)
        assert connection.unread_bytes() > 8 * 5000
        body = connection.receive()
        assert body == b"a" * 8 * 5000
        assert connection.unread_bytes() == 0
        assert leave(Way.FIN, connection).wire_close is WireClose.FIN


@pytest.mark.parametrize("says_so", [True, False])
def test_the_server_may_end_it_with_or_without_a_word(
    serve: Serve, secrets: Secrets, says_so: bool
) -> None:
    def script(x: Exchange) -> None:
        x.send(HEAD + b"hello")
        if says_so:  # and leaves the connection open: its close_notify alone is the end
            assert isinstance(x.sock, ssl.SSLSocket)
            x.sock.unwrap()

    with connected(serve(script, tls=secrets.server).url, ca_file=secrets.ca_file) as connection:
        assert body_of(connection) == b"hello"


class Peer:
    """The server's end, as a matter of bytes."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.end = context.wrap_bio(self._received, self._to_send, server_side=True)

    def take(self, data: bytes) -> None:
        self._received.write(data)

    def sent(self) -> bytes:
        return self._to_send.read()


def agreed(secrets: Secrets) -> tuple[Tls, Peer]:
    ours, peer = Tls(secrets.trust(), "localhost"), Peer(secrets.server)
    assert not ours.shake_hands(b"")
    peer.take(ours.owed())
    with pytest.raises(ssl.SSLWantReadError):
        peer.end.do_handshake()
    assert ours.shake_hands(peer.sent())
    peer.take(ours.owed())
    peer.end.do_handshake()
    return ours, peer


class TestBytes:
    def test_what_the_protocol_itself_sends_is_neither_content_nor_an_end(
        self, secrets: Secrets
    ) -> None:
        ours, peer = agreed(secrets)
        tickets = peer.sent()
        assert tickets
        assert ours.decrypt(tickets) == b""
        assert not ours.is_over

    def test_a_record_is_read_when_it_is_complete(self, secrets: Secrets) -> None:
        ours, peer = agreed(secrets)
        ours.decrypt(peer.sent())
        peer.end.write(b"hello")
        data = peer.sent()
        assert [ours.decrypt(data[:9]), ours.decrypt(data[9:])] == [b"", b"hello"]

    def test_after_our_farewell_the_server_may_go_on(self, secrets: Secrets) -> None:
        ours, peer = agreed(secrets)
        ours.decrypt(peer.sent())
        peer.take(ours.farewell())
        assert peer.end.read(1) == b""
        peer.end.write(b"more")
        assert ours.decrypt(peer.sent()) == b"more"
        peer.end.unwrap()
        assert (ours.decrypt(peer.sent()), ours.is_over) == (b"", True)

    def test_noise(self, secrets: Secrets) -> None:
        ours, _ = agreed(secrets)
        with pytest.raises(ssl.SSLError):
            ours.decrypt(b"\x17\x03\x03\x00\x20" + bytes(32))


class TestNoConnection:
    def test_an_unknown_ca(self, serve: Serve, secrets: Secrets) -> None:
        row = Client(serve(until_left, tls=secrets.server).url).ask(after(1), Way.FIN)
        assert row.outcome is Outcome.FAILED
        assert row.error is not None
        assert row.error.startswith("the certificate of 127.0.0.1 is not trusted (")
        assert "--ca-file" in row.error

    def test_whom_to_trust_is_read_before_the_first_request(self) -> None:
        """Reading it takes tens of ms, which would be the first request's."""
        Client("http://127.0.0.1:1", ca_file="absent.pem")
        with pytest.raises(ConfigError, match=r"--ca-file absent\.pem"):
            Client("https://127.0.0.1:1", ca_file="absent.pem")

    def test_a_certificate_for_somebody_else(self, serve: Serve, secrets: Secrets) -> None:
        server = serve(until_left, host="127.0.0.2", tls=secrets.server)
        row = Client(server.url, ca_file=secrets.ca_file).ask(after(1), Way.FIN)
        assert row.error is not None
        assert "is not valid for '127.0.0.2'" in row.error
        assert "--ca-file" not in row.error

    def test_https_where_no_tls_is_spoken(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]

            def speak() -> None:
                with listener.accept()[0] as sock:
                    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    while sock.recv(4096):
                        pass

            thread = threading.Thread(target=speak)
            thread.start()
            row = Client(f"https://127.0.0.1:{port}").ask(after(1), Way.FIN)
            thread.join(30)
        assert row.error == (
            f"127.0.0.1:{port} does not speak TLS: should the URL begin with http://?"
        )

    def test_http_where_tls_is_spoken(self, serve: Serve, secrets: Secrets) -> None:
        server = serve(until_left, tls=secrets.server)
        row = Client(server.url.replace("https", "http")).ask(after(1), Way.FIN)
        assert (row.outcome, row.status_code) == (Outcome.FAILED, None)

    @pytest.mark.parametrize("hangs_up", [True, False])
    def test_a_server_that_agrees_on_nothing(self, hangs_up: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"https://127.0.0.1:{listener.getsockname()[1]}"
            is_over = threading.Event()

            def script() -> None:
                with listener.accept()[0] as sock:
                    sock.recv(65536)
                    assert hangs_up or is_over.wait(30)

            thread = threading.Thread(target=script)
            thread.start()
            with (
                pytest.raises(httpx.TransportError) as raised,
                connected(url, timeout_s=30 if hangs_up else 0.2),
            ):
                raise AssertionError("nothing was agreed on")
            is_over.set()
            thread.join(30)
        words = "the server hung up" if hangs_up else "no connection to 127.0.0.1:"
        assert words in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("is_tls", [False, True])
def test_localhost(serve: Serve, secrets: Secrets, host: str, is_tls: bool) -> None:
    """By address, and by name where that is one of its addresses."""
    try:
        server = serve(
            lambda x: x.send(HEAD + b"hi"), host=host, tls=secrets.server if is_tls else None
        )
    except OSError:
        pytest.skip(f"{host} is not on this machine")
    urls = [server.url, f"{server.url.partition(':')[0]}://localhost:{server.port}"]
    for url in urls:
        with connected(url, ca_file=secrets.ca_file) as connection:
            assert body_of(connection) == b"hi"
