"""A process that this one starts, with its settings on standard input, and that ends with it."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Final

import msgspec

# Used also when only the connection has broken: which of the two it was is known later.
NO_ENGINE: Final = (
    "this server has no engine (--runner none): it serves only a repository, over gRPC"
)
WORKER_LOST: Final = "the engine has lost its worker, and with it the running requests"
SHUTTING_DOWN: Final = "the server is shutting down"


class EngineStoppedError(RuntimeError):
    """Nothing can be generated: the worker is lost, or the server is shutting down."""

    status = 503


class HandlerFailedError(EngineStoppedError):
    """A handler in Python raised: it is this request's end alone."""

    status = 500


class Child:
    """Runs a module, one process at a time.

    The end of its standard input, also by our own death, tells the process to leave.
    """

    def __init__(self, name: str, *module: str, exit_s: float = 5.0) -> None:
        self.name = name
        self._command = [sys.executable, "-m", *module]
        self._exit_s = exit_s
        self._process: Process | None = None

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self, settings: msgspec.Struct) -> bytes:
        """The first line that it writes. Raises EngineStoppedError if it ends before."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise await self.died()
        return line

    async def died(self) -> EngineStoppedError:
        """Waits for its end, and says how it ended."""
        assert self._process is not None
        status = await self._process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return EngineStoppedError(
            f"the {self.name} process has ended ({how}); its last output, if any, is above"
        )

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(self._exit_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
