"""A real server on loopback whose every answer is a small function, and which notes what it did.

Each connection runs its script in a thread of its own. Scripts wait on the socket, never on time
alone, so that a client's leaving is seen when it happens.
"""

import fcntl
import json
import select
import socket
import ssl
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.client import parse_headers
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import trustme

from harness.client.connection import Http1Connection
from harness.client.transport import SocketTransport, WireRequest
from harness.records import RequestRow, Way
from harness.workload.abandon import LeaveRule, never
from tests.harness.client.asking import Client

OK_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass
class Exchange:
    """One request, the means to answer it, and what became of it."""

    sock: socket.socket
    request_id: str
    headers: Message
    body: dict[str, Any]
    target: str = ""
    tokens_sent: int = 0
    sent_ns: list[int] = field(default_factory=list)  # when each of them had gone
    closed_ns: int | None = None
    closed_how: str | None = None  # "fin" or "rst"; over TLS "cut" where it came without a word
    goes_on: bool = False  # whether the connection may carry another request
    is_over: threading.Event = field(default_factory=threading.Event)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def chunk(self, body: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(body), body))

    def accept(self, *, tokens: int = 0) -> None:
        self.send(OK_HEAD)
        for _ in range(tokens):
            self.token()

    def token(self, *, text: str = " word", finish_reason: str | None = None) -> None:
        self.tokens_sent += 1
        self.chunk(self.event(text=text, finish_reason=finish_reason))
        self.sent_ns.append(time.perf_counter_ns())

    def event(self, *, text: str = " word", finish_reason: str | None = None) -> bytes:
        chunk = {
            "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": 8, "completion_tokens": self.tokens_sent},
        }
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def finish(self) -> None:
        self.chunk(b"data: [DONE]\n\n")
        self.send(b"0\r\n\r\n")

    def wait_until_received(self) -> None:
        """Wait until the client's kernel has acknowledged all that was sent."""
        while fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4)) != bytes(4):
            pass

    def client_left_within(self, seconds: float | None) -> bool:
        """Wait so long for the client to hang up, and note when and how it did."""
        if not select.select([self.sock], [], [], seconds)[0]:
            return False
        self.closed_ns = time.perf_counter_ns()
        try:
            assert self.sock.recv(1) == b""
            self.closed_how = "fin"
        except ConnectionResetError:
            self.closed_how = "rst"
        except ssl.SSLEOFError:
            self.closed_how = "cut"
        return True

    def stream(self, *, tokens: int, gap_s: float) -> None:
        """A well-behaved engine: a token each gap, and an eye on the client meanwhile."""
        for number in range(1, tokens + 1):
            if self.client_left_within(gap_s):
                return
            self.token(finish_reason="length" if number == tokens else None)
        self.finish()


Script = Callable[[Exchange], None]


class ScriptedServer:
    """Listens on a free port; `exchanges` holds all requests, by their id."""

    def __init__(
        self, script: Script, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        self._script = script
        self._tls = tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        scheme, shown = "http" if tls is None else "https", f"[{host}]" if ":" in host else host
        self.port = self._listener.getsockname()[1]
        self.url = f"{scheme}://{shown}:{self.port}"
        self.exchanges: dict[str, Exchange] = {}
        self.arrivals = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def wait_for_arrivals(self, number: int) -> None:
        for _ in range(number):
            assert self.arrivals.acquire(timeout=30)

    def close(self) -> None:
        """Wait for all scripts to end; their clients must be gone by then."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, plain: socket.socket) -> None:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with (
            plain,
            suppress(ConnectionError, ssl.SSLError),  # a client may not like our CA
            self._secured(plain) as sock,
            sock.makefile("rb") as file,
        ):
            while (exchange := _read_request(sock, file)) is not None:
                self._play(exchange)
                if not exchange.goes_on:
                    return

    def _secured(self, plain: socket.socket) -> socket.socket:
        if self._tls is None:
            return plain
        return self._tls.wrap_socket(plain, server_side=True, suppress_ragged_eofs=False)

    def _play(self, exchange: Exchange) -> None:
        self.exchanges[exchange.request_id] = exchange
        self.arrivals.release()
        try:
            self._script(exchange)
        except (ConnectionError, ssl.SSLEOFError):
            exchange.closed_ns = exchange.closed_ns or time.perf_counter_ns()
        exchange.is_over.set()


def _read_request(sock: socket.socket, file: BinaryIO) -> Exchange | None:
    if not (line := file.readline().decode()):
        return None
    headers = parse_headers(file)
    return Exchange(
        sock=sock,
        request_id=headers.get("x-request-id", line),
        headers=headers,
        body=json.loads(file.read(int(headers["content-length"] or 0)) or b"{}"),
        target=line.split(" ")[1],
    )


class Secrets:
    """A CA of our own with a certificate for this host, and the file by which to trust it."""

    def __init__(self, ca_file: Path) -> None:
        ca = trustme.CA()
        ca.cert_pem.write_to_path(str(ca_file))
        self.ca_file = str(ca_file)
        self._certificate = ca.issue_cert("localhost", "127.0.0.1", "::1")
        self.server = self.server_of(ssl.TLSVersion.TLSv1_3)

    def server_of(self, version: ssl.TLSVersion) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.maximum_version = version
        self._certificate.configure_cert(context)
        return context


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets(tmp_path_factory.mktemp("tls") / "ca.pem")


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedServer]]:
    """Start scripted servers, plain or with TLS; all of them end with the test."""
    with ExitStack() as servers:
        yield lambda script, **how: servers.enter_context(closing(ScriptedServer(script, **how)))


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    """The server's end of every client's connection, without a thread: what it sends beforehand is
    there when the client looks, however slow the machine is."""
    near, far = socket.socketpair()

    def connect(_transport: SocketTransport, request: WireRequest) -> Http1Connection:
        request.is_opened = True
        return Http1Connection(near, request.next_byte_s)

    monkeypatch.setattr(SocketTransport, "connect", connect)
    with near, far:
        yield Exchange(sock=far, request_id="r1", headers=Message(), body={})


@pytest.fixture
def full() -> Iterator[str]:
    """The address of a server that has no room for another connection: it says nothing to it."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as crowd:
        for _ in range(4):
            one = crowd.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


Serve = Callable[..., ScriptedServer]
Connect = Callable[..., Client]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make clients; all of them close with the test."""
    with ExitStack() as clients:

        def make(url: str, **changes: object) -> Client:
            client = Client(url, **changes)
            clients.enter_context(closing(client.client))
            return client

        yield make


class Ask:
    """Asks a server that follows a script once; `seen` is the server's view of it."""

    def __init__(self, serve: Serve, connect: Connect) -> None:
        self._serve = serve
        self._connect = connect

    def __call__(
        self,
        script: Script,
        rule: LeaveRule = never,
        way: Way | None = None,
        *,
        spec: Mapping[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
        **changes: object,
    ) -> RequestRow:
        self.server = self._serve(script, tls=tls)
        return self._connect(self.server.url, **changes).ask(rule, way, **(spec or {}))

    @property
    def seen(self) -> Exchange:
        """Waits for the script's end; it may read the request only after the client has left."""
        if "r1" not in self.server.exchanges:
            self.server.wait_for_arrivals(1)
        exchange = self.server.exchanges["r1"]
        assert exchange.is_over.wait(30)
        return exchange


@pytest.fixture
def ask(serve: Serve, connect: Connect) -> Ask:
    return Ask(serve, connect)
