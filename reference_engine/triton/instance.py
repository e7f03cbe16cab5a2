"""One instance of a Python model, seen from the server: its process, and the way to it."""

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from reference_engine.config import EngineConfigError
from reference_engine.triton.python_backend.messages import (
    MAX_BYTES,
    BatchItem,
    CancelItem,
    Execute,
    Executed,
    Finalize,
    FromModel,
    Initialize,
    LogMessage,
    Response,
    Started,
    from_model,
)
from reference_engine.wire import FrameReader, ProtocolError, decode_payload, encode_frame

log: Final = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # what models log, as Triton shows it
GRACE_S: Final = 5.0


class ModelInstance(asyncio.Protocol):
    """`on_message` gets responses and the end of each `execute`; `on_lost` the end of the process,
    once, unless the server ended it. Output of the model goes to standard error.
    """

    def __init__(
        self,
        name: str,
        *,
        on_message: Callable[[Response | Executed], object],
        on_lost: Callable[[str], object],
    ) -> None:
        self.name = name
        self._on_message, self._on_lost = on_message, on_lost
        self._frames = FrameReader()
        self._frames.max_bytes = MAX_BYTES
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[str | None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, file: Path, version: str, config: Mapping[str, Any]) -> None:
        """Raises EngineConfigError if the model does not import or initialize."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, its = socket.socketpair()
        with its:
            self._process = _spawn(its.fileno())
        await loop.create_unix_connection(lambda: self, sock=ours)
        arguments = {
            "model_config": json.dumps(config),
            "model_instance_kind": "CPU",
            "model_instance_name": self.name,
            "model_instance_device_id": "0",
            "model_repository": str(file.parent.parent),
            "model_version": version,
            "model_name": str(config["name"]),
        }
        self._send(Initialize(str(file), arguments))
        if problem := await self._ready:
            await self.close()
            raise EngineConfigError(f"{file}: the model does not start: {problem}")

    def execute(self, items: list[BatchItem]) -> None:
        for item in items:
            self._send(item)
        self._send(Execute())

    def cancel(self, key: int) -> None:
        self._send(CancelItem(key))

    async def close(self) -> None:
        """Finalize the model; kill a process that takes too long."""
        self._is_closed = True
        if self._process is None:
            return
        self._send(Finalize())
        await self._wait()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._receive(decode_payload(from_model, payload))
        except ProtocolError as error:
            log.error("model instance %s: %s", self.name, error)  # noqa: TRY400 it says it all
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self._is_closed:
            self._reporting = asyncio.ensure_future(self._report_loss())

    async def _report_loss(self) -> None:
        status = await self._wait()
        is_starting = self._answer_start(f"its process ended with status {status}")
        if not is_starting and not self._is_closed:
            self._on_lost(f"the process of model instance {self.name} ended with status {status}")

    async def _wait(self) -> int:
        """The exit status; a process that takes too long is killed."""
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)

    def _answer_start(self, problem: str | None) -> bool:
        is_starting = self._ready is not None and not self._ready.done()
        if self._ready is not None and is_starting:
            self._ready.set_result(problem)
        return is_starting

    def _receive(self, message: FromModel) -> None:
        match message:
            case Started():
                self._answer_start(message.problem)
            case LogMessage():
                log.log(message.level, "%s: %s", self.name, message.message)
            case _:
                self._on_message(message)

    def _send(self, message: object) -> None:
        """Nothing to a process that is gone: its loss is reported."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    """Starts the process without asyncio, which may fork: gRPC's threads do not bear a fork. A
    terminal's interrupt is for the server alone.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "reference_engine.triton.python_backend", str(fd)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
    )
