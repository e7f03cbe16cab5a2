"""The frontend's end of one connection to the worker: messages out, step reports in.

Its end fails whatever needs the worker; who holds it is told once. A worker that breaks the
protocol loses the connection, as we would.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Final, cast

import msgspec

from reference_engine.config import EngineConfigError
from reference_engine.protocol import (
    Failed,
    FrameReader,
    FromWorker,
    Hello,
    ProtocolError,
    Ready,
    StepReport,
    ToWorker,
    decode_payload,
    encode_frame,
)

# Also true where the connection alone has broken: which of the two it was is known only later.
WORKER_LOST: Final = "the engine has lost its worker; what it was working on is lost with it"
SHUTTING_DOWN: Final = "the server is shutting down"


class EngineStoppedError(RuntimeError):
    """Nothing can be generated now: the worker is lost, or the server is shutting down."""


class WorkerConnection(asyncio.Protocol):
    """One connection. All its state changes on the event loop.

    `ready` is the worker's first word: Ready, EngineConfigError where its settings cannot work, or
    EngineStoppedError where it ended before. `on_lost` is called when a connection ends that was
    ready.
    """

    def __init__(
        self, secret: str, *, on_report: Callable[[StepReport], None], on_lost: Callable[[], None]
    ) -> None:
        self._secret = secret
        self._on_report = on_report
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._is_ready = False
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    def send(self, message: ToWorker) -> None:
        """Raises EngineStoppedError when the connection has ended."""
        if self._transport is None:
            raise EngineStoppedError(WORKER_LOST)
        self._transport.write(encode_frame(message))

    def close(self) -> None:
        """Harmless for one that has ended."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        peer: socket.socket = transport.get_extra_info("socket")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send(Hello(secret=self._secret))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._is_ready:
            self._on_lost()
        elif not self.ready.done():
            self.ready.set_exception(EngineStoppedError("the worker has ended the connection"))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._take_in(decode_payload(self._decoder, payload))
        except ProtocolError as error:
            print(f"walkaway engine: connection to the worker: {error}", file=sys.stderr)  # noqa: T201
            if self._transport is not None:
                self._transport.abort()

    def _take_in(self, message: FromWorker) -> None:
        match message:
            case StepReport() if self._is_ready:
                self._on_report(message)
            case Ready() if not self.ready.done():
                self._is_ready = True
                self.ready.set_result(message)
            case Failed(message=why) if not self.ready.done():
                self.ready.set_exception(EngineConfigError(why))
            case _:
                raise ProtocolError(f"{type(message).__name__} out of turn")
