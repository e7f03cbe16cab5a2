"""The HTTP protocol over real sockets, in front of a made-up worker; and a clock for its limits."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.server import ServerState

from reference_engine.config import FrontendSettings
from reference_engine.serve.http import bound_silence, protocol_for
from tests.reference_engine.fake_worker import FakeWorker, respond
from tests.reference_engine.serve.test_detection import behind_nothing

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
