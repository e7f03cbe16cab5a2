"""The HTTP protocol over real sockets: leaving is seen at once, whatever is in between."""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.server import ServerState

from reference_engine.frontend.http_protocol import (
    WatchedProtocol,
    bound_silence,
    is_full,
    num_acknowledged,
    protocol_for,
)
from reference_engine.frontend.settings import FrontendSettings
from tests.reference_engine.fake_worker import FakeWorker, output, respond
from tests.reference_engine.test_detection import (
    behind_a_swallower,
    behind_base_http_middleware,
    behind_nothing,
)

pytestmark = pytest.mark.anyio
LINGER_NOT = b"\x01\0\0\0\0\0\0\0"  # l_onoff 1, l_linger 0: closing sends RST


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


class Served:
    """A server whose every request is submitted to a made-up worker."""

    def __init__(
        self, wrap: Callable[[Any], Any] = behind_nothing, *, stream: bool = True, **limits: Any
    ) -> None:
        self.settings = FrontendSettings(send_buffer_bytes=4096, **limits)
        self.worker = FakeWorker(send_buffer_bytes=4096)
        self.connections: set[Any] = set()
        self._stream = stream
        self._wrap = wrap
        self.listener = socket.create_server(("127.0.0.1", 0))
        bound_silence(self.listener, self.settings)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await Request(scope, receive).body()
        except ClientDisconnect:
            return
        await respond(self.worker, stream=self._stream)(scope, receive, send)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = self._wrap(self._app)
        config = uvicorn.Config(app, interface="asgi3", ws="none", log_config=None)
        config.load()
        state = ServerState()
        self.connections = state.connections
        protocol = protocol_for(self.settings)
        server = await asyncio.get_running_loop().create_server(
            lambda: protocol(config=config, server_state=state, app_state={}),
            sock=self.listener,
        )
        async with asyncio.timeout(20):
            yield
            server.close()
            await asyncio.gather(*state.tasks)

    async def client(self, body: bytes = b"x", receive_bytes: int | None = None) -> socket.socket:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client = await self.sender(head + body, receive_bytes)
        await self.worker.arrived.wait()
        return client

    async def sender(self, data: bytes, receive_bytes: int | None = None) -> socket.socket:
        """A client that has sent so much, which may be less or more than a request."""
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, self.listener.getsockname())
        await loop.sock_sendall(client, data)
        return client


async def read_to_the_end(client: socket.socket) -> bytes:
    seen = b""
    while data := await asyncio.get_running_loop().sock_recv(client, 65536):
        seen += data
    client.close()
    return seen


def error_of(answer: bytes, status: int) -> str:
    """The message of a whole answer in the shape of all errors."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return str(error["message"])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("is_reset", [True, False], ids=["RST", "FIN"])
@pytest.mark.parametrize("wrap", [behind_nothing, behind_base_http_middleware, behind_a_swallower])
async def test_leaving_is_seen_behind_every_middleware(
    wrap: Callable[[Any], Any], is_reset: bool, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(wrap, stream=stream)
    async with served.running():
        client = await served.client()
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.methods() == {"connection": 1}
    assert served.worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_leaving_after_a_body_so_long_that_reading_was_paused() -> None:
    served = Served(behind_a_swallower, stream=False)
    async with served.running():
        client = await served.client(b"x" * 1_000_000)
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.methods() == {"connection": 1}


async def test_closing_its_side_while_much_is_still_to_be_sent() -> None:
    """The connection is ended, not drained: its client reads nothing, so that would never end."""
    served = Served(behind_nothing, stream=True)
    async with served.running():
        client = await served.client(receive_bytes=2048)
        for number in range(1, 200):
            served.worker.say(output(" word" * 1000, number))
            await asyncio.sleep(0)
        client.shutdown(socket.SHUT_WR)
        await served.worker.aborted.wait()
        client.close()
    assert served.worker.methods() == {"connection": 1}


async def test_a_pipelining_client_is_cut_off() -> None:
    served = Served(behind_nothing, stream=True)
    async with served.running():
        client = await served.client()
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await served.worker.aborted.wait()
        client.close()
    assert len(served.worker.received) == 2, "one request and its abort"


async def test_a_connection_serves_one_request_after_the_other() -> None:
    served = Served(behind_nothing, stream=True)
    loop = asyncio.get_running_loop()
    async with served.running():
        client = await served.client()
        served.worker.say(output(" word", 1, "stop"))
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen += await loop.sock_recv(client, 65536)
        served.worker.arrived.clear()
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await served.worker.arrived.wait()
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.aborts() == [("req-2", "user_disconnect")]


BODY_TO_COME = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nx-endless: ",
        b"GET /",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-trailer: ",
    ],
    ids=["header", "path", "trailer"],
)
async def test_a_head_without_end_is_refused(start: bytes) -> None:
    served = Served()
    async with served.running():
        client = await served.sender(start + b"x" * 300_000)
        assert "65536 bytes" in error_of(await read_to_the_end(client), 431)
    assert served.worker.received == []


async def test_who_is_refused_may_go_on_sending_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reset connection would take the refusal along, on some systems before it is read."""
    monkeypatch.setattr("reference_engine.frontend.http_protocol._LINGER_S", 3600)
    served = Served()
    loop = asyncio.get_running_loop()
    async with served.running():
        client = await served.sender(b"GET /" + b"x" * 100_000)
        assert b" 431 " in await loop.sock_recv(client, 65536)
        for _ in range(20):
            await loop.sock_sendall(client, b"x" * 100_000)
            await asyncio.sleep(0)
        client.close()


async def test_a_long_body_is_no_long_head() -> None:
    served = Served()
    async with served.running():
        client = await served.client(b"x" * 1_000_000)
        client.close()
        await served.worker.aborted.wait()


class StoppedLoop(asyncio.SelectorEventLoop):
    """Its clock stands still until a test moves it on, however long anything takes."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


by_a_clock_that_stands = pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"loop_factory": StoppedLoop})], ids=["stopped"]
)


def let_pass(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StoppedLoop)
    loop.now_s += seconds


@pytest.fixture
def taken_in(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the server has read something."""
    event = asyncio.Event()
    data_received = WatchedProtocol.data_received

    def read(protocol: WatchedProtocol, data: bytes) -> None:
        data_received(protocol, data)
        event.set()

    monkeypatch.setattr(WatchedProtocol, "data_received", read)
    return event


@by_a_clock_that_stands
@pytest.mark.parametrize("start", [b"GET / HTT", BODY_TO_COME], ids=["head", "body"])
async def test_a_request_that_does_not_come_whole_is_refused_in_time(
    start: bytes, taken_in: asyncio.Event
) -> None:
    served = Served(request_timeout_s=0.1)
    async with served.running():
        client = await served.sender(start)
        await taken_in.wait()
        let_pass(0.1)
        assert "0.1 s" in error_of(await read_to_the_end(client), 408)
    assert served.worker.received == []


async def test_a_connection_on_which_nothing_comes_is_closed_in_time() -> None:
    served = Served(request_timeout_s=0.1)
    async with served.running():
        assert await read_to_the_end(await served.sender(b"")) == b""


@by_a_clock_that_stands
async def test_an_answer_may_take_longer_than_its_request(taken_in: asyncio.Event) -> None:
    served = Served(request_timeout_s=0.1)
    async with served.running():
        client = await served.client()
        let_pass(0.2)
        served.worker.say(output(" word", 1, "stop"))
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen += await asyncio.get_running_loop().sock_recv(client, 65536)
        taken_in.clear()
        await asyncio.get_running_loop().sock_sendall(client, b"GET / ")
        await taken_in.wait()
        let_pass(0.1)
        assert "0.1 s" in error_of(await read_to_the_end(client), 408), "so is the next request"
    assert b"[DONE]" in seen


async def test_what_is_no_http_is_told_so() -> None:
    served = Served()
    async with served.running():
        client = await served.sender(b"\x16\x03\x01 is TLS\r\n\r\n")
        assert "Invalid HTTP request" in error_of(await read_to_the_end(client), 400)


async def test_the_transport_holds_no_more_than_it_may() -> None:
    served = Served()
    async with served.running():
        client = await served.client()
        (connection,) = served.connections
        limits = connection.transport.get_write_buffer_limits()
        client.close()
        await served.worker.aborted.wait()
    assert limits == (1024, 4096)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count is Linux's")
def test_what_the_other_end_has_taken_is_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as theirs,
        listener.accept()[0] as ours,
    ):
        before = num_acknowledged(ours)
        ours.sendall(b"x" * 300)
        theirs.recv(300)
        while num_acknowledged(ours) - before < 300:
            """The acknowledgement is on its way."""
        assert num_acknowledged(ours) - before == 300


def test_accepted_sockets_inherit_the_bounds() -> None:
    settings = FrontendSettings(
        heartbeat_s=2.0, ack_timeout_s=3.0, stall_timeout_s=3.0, send_buffer_bytes=8192
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bound_silence(listener, settings)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                options = [
                    accepted.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
                ]
                assert options == [2, 3000]
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 8192
                assert not is_full(accepted)


def test_what_is_no_tcp_connection_is_not_full() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not is_full(ours)
