"""The HTTP protocol over real sockets: leaving is seen at once, and bad requests are refused."""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.server import ServerState

from reference_engine.config import FrontendSettings
from reference_engine.serve.http import (
    ListenError,
    WatchedProtocol,
    bound_silence,
    is_full,
    num_acknowledged,
    open_port,
    protocol_for,
    reserve_port,
)
from tests.reference_engine.fake_worker import FakeWorker, output, respond
from tests.reference_engine.serve.test_detection import behind_a_swallower, behind_nothing

pytestmark = pytest.mark.anyio
LINGER_NOT = b"\x01\0\0\0\0\0\0\0"  # l_onoff 1, l_linger 0: closing sends RST


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


A_DAY_S = 86_400.0  # no test takes as long


class StoppedClock:
    """The running loop, for a server whose timers fire when a test lets time pass, and only then.

    All else is the loop's own, and so are the time limits of the test itself.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = 0.0
        self._timers: list[tuple[float, asyncio.TimerHandle, Callable[[], object]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(
        self, delay_s: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        timer = self._loop.call_later(A_DAY_S, callback, *args)
        self._timers.append((self._now_s + delay_s, timer, partial(callback, *args)))
        return timer

    def let_pass(self, seconds: float) -> None:
        self._now_s += seconds
        for due_s, timer, fire in self._timers.copy():
            if due_s <= self._now_s and not timer.cancelled():
                timer.cancel()
                fire()


class Served:
    """A server whose every request is submitted to a made-up worker."""

    def __init__(
        self,
        wrap: Callable[[Any], Any] = behind_nothing,
        *,
        stream: bool = True,
        clock: StoppedClock | None = None,
        **limits: Any,
    ) -> None:
        self.settings = FrontendSettings(send_buffer_bytes=4096, **limits)
        self.worker = FakeWorker(send_buffer_bytes=4096)
        self.connections: set[Any] = set()
        self._stream = stream
        self._wrap = wrap
        self._clock: Any = clock
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
            lambda: protocol(config=config, server_state=state, app_state={}, _loop=self._clock),
            sock=self.listener,
        )
        try:
            async with asyncio.timeout(20):
                yield
                await asyncio.gather(*state.tasks)
        finally:
            server.close()
            for connection in tuple(self.connections):  # or a failed test's loop would never close
                connection.transport.abort()

    async def client(self, body: bytes = b"x", receive_bytes: int | None = None) -> socket.socket:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client = await self.sender(head + body, receive_bytes)
        await self.worker.arrived.wait()
        return client

    async def sender(self, data: bytes, receive_bytes: int | None = None) -> socket.socket:
        """A client that has sent `data`, which may be less or more than a request."""
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


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("is_reset", [True, False], ids=["RST", "FIN"])
async def test_leaving_is_seen(
    is_reset: bool, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(stream=stream)
    async with served.running():
        client = await served.client()
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.methods() == {"connection": 1}
    assert served.worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_reset_that_a_write_meets_first_is_the_connections_end_too() -> None:
    """Reset and written to within one turn of the event loop, so before any read."""
    served = Served()
    async with served.running():
        client = await served.client()
        served.worker.say(output(" word", 1))
        await asyncio.get_running_loop().sock_recv(client, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        client.close()
        (connection,) = served.connections
        connection.transport.write(b"x" * 10_000)  # over the buffer's limit: written at once
        assert connection.transport.is_closing(), "the write has failed"
        await served.worker.aborted.wait()
    assert served.worker.methods() == {"connection": 1}
    assert served.worker.events() == ["arrived", "disconnected", "abort_sent"]


async def test_leaving_after_a_body_so_long_that_reading_was_paused() -> None:
    served = Served(behind_a_swallower, stream=False)
    async with served.running():
        client = await served.client(b"x" * 1_000_000)
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.methods() == {"connection": 1}


async def test_closing_its_side_while_much_is_still_to_be_sent() -> None:
    """The connection is ended, not drained: its client reads nothing, so that would never end."""
    served = Served()
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
    served = Served()
    async with served.running():
        client = await served.client()
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await served.worker.aborted.wait()
        client.close()
    assert len(served.worker.received) == 2, "one request and its abort"


async def answered(served: Served, client: socket.socket) -> bytes:
    """The stream of one word that the server sends now."""
    served.worker.say(output(" word", 1, "stop"))
    seen = b""
    while not seen.endswith(b"0\r\n\r\n"):
        seen += await asyncio.get_running_loop().sock_recv(client, 65536)
    return seen


async def test_a_connection_serves_one_request_after_the_other() -> None:
    served = Served()
    loop = asyncio.get_running_loop()
    async with served.running():
        client = await served.client()
        (connection,) = served.connections
        assert connection.transport.get_write_buffer_limits() == (1024, 4096)
        await answered(served, client)
        served.worker.arrived.clear()
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await served.worker.arrived.wait()
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.aborts() == [("req-2", "user_disconnect")]


BODY_IN_CHUNKS = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
BODY_TO_COME = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"


def error_of(answer: bytes, status: int) -> str:
    """The message of a whole answer in the shape of all errors."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return str(error["message"])


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


async def test_a_refused_client_may_go_on_sending_for_a_moment() -> None:
    """A reset connection would take the refusal along, on some systems before it is read."""
    served = Served(clock=StoppedClock())  # the moment never ends
    loop = asyncio.get_running_loop()
    async with served.running():
        client = await served.sender(b"GET /" + b"x" * 100_000)
        assert b" 431 " in await loop.sock_recv(client, 65536)
        for _ in range(20):
            await loop.sock_sendall(client, b"x" * 100_000)
            await asyncio.sleep(0)
        client.close()


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


async def test_a_trailer_may_be_as_long_as_is_said(taken_in: asyncio.Event) -> None:
    served = Served()
    async with served.running():
        client = await served.sender(BODY_IN_CHUNKS)
        await taken_in.wait()
        trailer = b"0\r\nx-trailer: ".ljust(65_536, b"x")
        await asyncio.get_running_loop().sock_sendall(client, trailer)
        (connection,) = served.connections
        while connection._num_unparsed < 65_536:
            taken_in.clear()
            await taken_in.wait()
        await asyncio.get_running_loop().sock_sendall(client, b"\r\n\r\n")
        await served.worker.arrived.wait()
        client.close()
        await served.worker.aborted.wait()


@pytest.mark.parametrize("start", [b"GET / HTT", BODY_TO_COME], ids=["head", "body"])
async def test_a_request_that_does_not_come_whole_is_refused_in_time(
    start: bytes, taken_in: asyncio.Event
) -> None:
    clock = StoppedClock()
    served = Served(clock=clock, request_timeout_s=0.1)
    async with served.running():
        client = await served.sender(start)
        await taken_in.wait()
        clock.let_pass(0.1)
        assert "0.1 s" in error_of(await read_to_the_end(client), 408)
    assert served.worker.received == []


async def test_a_connection_on_which_nothing_comes_is_closed_in_time() -> None:
    served = Served(request_timeout_s=0.1)
    async with served.running():
        assert await read_to_the_end(await served.sender(b"")) == b""


async def test_an_answer_may_take_longer_than_its_request(taken_in: asyncio.Event) -> None:
    clock = StoppedClock()
    served = Served(clock=clock, request_timeout_s=0.1)
    async with served.running():
        client = await served.client()
        clock.let_pass(0.2)
        assert b"[DONE]" in await answered(served, client)
        taken_in.clear()
        await asyncio.get_running_loop().sock_sendall(client, b"GET / ")
        await taken_in.wait()
        clock.let_pass(0.1)
        assert "0.1 s" in error_of(await read_to_the_end(client), 408), "so is the next request"


# The options of clients' sockets, read from the kernel on accepted ones...

SETTINGS = FrontendSettings(heartbeat_s=7, ack_timeout_s=12.5, send_buffer_bytes=32_768)
NEVER = FrontendSettings(heartbeat_s=0, ack_timeout_s=86_400)
UNHURRIED = FrontendSettings(ack_timeout_s=2, stall_timeout_s=60)
TCP = socket.IPPROTO_TCP


async def accepted_option(settings: FrontendSettings, level: int, name: int) -> int:
    """As the server has it: accepted by its event loop from its listening socket."""
    options: asyncio.Queue[int] = asyncio.Queue()

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connection = transport.get_extra_info("socket")
            options.put_nowait(connection.getsockopt(level, name))
            transport.close()

    with reserve_port("127.0.0.1", 0, settings) as listener:
        open_port(listener)
        address = listener.getsockname()
        async with await asyncio.get_running_loop().create_server(Accepted, sock=listener):
            with socket.create_connection(address):
                return await options.get()


@pytest.mark.skipif(sys.platform != "linux", reason="the names and units are Linux's")
@pytest.mark.parametrize(
    ("settings", "level", "name", "value"),
    [
        (SETTINGS, socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (SETTINGS, TCP, "TCP_KEEPIDLE", 7),
        (SETTINGS, TCP, "TCP_KEEPINTVL", 3),
        (SETTINGS, TCP, "TCP_USER_TIMEOUT", 12_500),
        (SETTINGS, TCP, "TCP_NODELAY", 1),
        (SETTINGS, socket.SOL_SOCKET, "SO_SNDBUF", 2 * 32_768),  # the kernel's own share with it
        (UNHURRIED, TCP, "TCP_USER_TIMEOUT", 60_000),  # or --stall-timeout-s would mean nothing
        (NEVER, TCP, "TCP_KEEPIDLE", 32_767),
        (NEVER, TCP, "TCP_USER_TIMEOUT", 86_400_000),
    ],
)
async def test_an_accepted_socket_is_watched_by_the_kernel(
    settings: FrontendSettings, level: int, name: str, value: int
) -> None:
    assert await accepted_option(settings, level, getattr(socket, name)) == value


async def test_a_port_that_is_taken_is_an_error_of_ours() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ListenError, match="choose another"),
    ):
        reserve_port("127.0.0.1", taken.getsockname()[1], SETTINGS)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count is Linux's")
async def test_acknowledged_bytes_are_counted() -> None:
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
        assert not is_full(ours)
