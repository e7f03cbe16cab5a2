"""Starts the worker process, connects to it, reconnects when the connection breaks, and ends it.

When the connection breaks, its running requests are lost (the worker aborts them, too).
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import msgspec

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.faults import Faults
from reference_engine.model.runners import VOCAB_SIZE
from reference_engine.protocol import (
    FromWorker,
    Listening,
    Ready,
    StepReport,
    ToWorker,
    WorkerSettings,
)
from reference_engine.wire import (
    Beat,
    Beats,
    Failed,
    FrameReader,
    Hello,
    ProtocolError,
    decode_payload,
    encode_frame,
)

# Used also when only the connection has broken: which of the two it was is known later.
WORKER_LOST: Final = "the engine has lost its worker, and with it the running requests"
SHUTTING_DOWN: Final = "the server is shutting down"


class EngineStoppedError(RuntimeError):
    """Nothing can be generated: the worker is lost, or the server is shutting down."""


class WorkerConnection(asyncio.Protocol):
    """All its state changes on the event loop.

    `ready` becomes the worker's Ready, or raises EngineConfigError if its settings cannot work and
    EngineStoppedError if it ended before. `on_lost` is called when a connection ends after Ready.
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
        if self._transport is None:
            raise EngineStoppedError(WORKER_LOST)
        self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        peer: socket.socket = transport.get_extra_info("socket")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send(Hello(peer="frontend-0", secret=self._secret))
        self._beat()

    def _beat(self) -> None:
        if self._transport is not None:
            self.send(Beat())
            asyncio.get_running_loop().call_later(Beats().interval_s, self._beat)

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
            case Beat():
                pass
            case StepReport() if self._is_ready:
                self._on_report(message)
            case Ready() if not self.ready.done():
                self._is_ready = True
                self.ready.set_result(message)
            case Failed(message=why) if not self.ready.done():
                self.ready.set_exception(EngineConfigError(why))
            case _:
                raise ProtocolError(f"{type(message).__name__} out of turn")


class Waits(NamedTuple):
    """Seconds: before each new connection, for its Ready, and for the worker to leave.

    The pauses let a dying worker die.
    """

    before_tries: tuple[float, ...] = (0.1, 0.5, 2.0)
    ready_again: float = 10.0
    exit: float = 5.0


_WAITS: Final = Waits()


class WorkerSupervisor:
    """All its state changes on the event loop.

    `on_lost` is called when a connection breaks after Ready.
    """

    def __init__(
        self,
        *,
        on_report: Callable[[StepReport], None],
        on_lost: Callable[[], None],
        waits: Waits = _WAITS,
    ) -> None:
        self._on_report = on_report
        self._on_lost = on_lost
        self._waits = waits
        self._secret = secrets.token_hex(32)
        self._process: Process | None = None
        self._port = 0
        self._connection: WorkerConnection | None = None
        self._broken = asyncio.Event()

    def send(self, message: ToWorker) -> None:
        if self._connection is None:
            raise EngineStoppedError(WORKER_LOST)
        self._connection.send(message)

    async def start(self, config: EngineConfig, faults: Faults) -> Ready:
        command = [sys.executable, "-m", "reference_engine.worker.service"]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        settings = WorkerSettings(config=config, faults=faults, secret=self._secret)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise await self._died()
        self._port = msgspec.json.decode(line, type=Listening).port
        return await self._connect()

    async def keep(self) -> None:
        """Reconnect whenever the connection breaks. Raises EngineStoppedError if that fails."""
        while True:
            await self._broken.wait()
            self._broken.clear()
            await self._reconnect()

    async def end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not await self._exits_within(self._waits.exit):
            self._process.kill()
            await self._process.wait()

    async def _connect(self) -> Ready:
        def note_broken() -> None:
            self._broken.set()
            self._on_lost()

        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: WorkerConnection(self._secret, on_report=self._on_report, on_lost=note_broken),
            "127.0.0.1",
            self._port,
        )
        try:
            ready = await connection.ready
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return ready

    async def _reconnect(self) -> None:
        reason = ""
        for pause_s in self._waits.before_tries:
            if await self._exits_within(pause_s):
                raise await self._died()
            try:
                async with asyncio.timeout(self._waits.ready_again):
                    await self._connect()
            except (OSError, EngineStoppedError) as error:
                reason = str(error) or "it does not answer"
            else:
                return
        raise EngineStoppedError(f"the worker process is alive, but cannot be reached: {reason}")

    async def _exits_within(self, timeout_s: float) -> bool:
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _died(self) -> EngineStoppedError:
        assert self._process is not None
        status = await self._process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return EngineStoppedError(
            f"the worker process has ended ({how}); its last output, if any, is above"
        )


class NoWorker:
    """In the place of a supervisor with `--runner none`: nothing is generated."""

    def send(self, message: ToWorker) -> None:
        raise EngineStoppedError(
            "this server has no engine (--runner none): it serves only a repository, over gRPC"
        )

    async def start(self, config: EngineConfig, faults: Faults) -> Ready:
        return Ready(pid=os.getpid(), device="none", vocab_size=VOCAB_SIZE, gpu_name=None)

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def end(self) -> None:
        pass
