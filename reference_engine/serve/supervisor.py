"""Processes that this one starts, and that end with it; and the wish to end them."""

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

import msgspec

_Result = TypeVar("_Result")
WORKER_MODULE: Final = "reference_engine.worker.service"
# Used also when only the connection has broken: which of the two it was is known later.
NO_ENGINE: Final = (
    "this server has no engine (--runner none): it serves only a repository, over gRPC"
)
WORKER_LOST: Final = "the engine has lost its worker, and with it the running requests"
SHUTTING_DOWN: Final = "the server is shutting down"


class EngineStoppedError(RuntimeError):
    """Nothing can be generated: the worker is lost or out of memory, or the server shuts down."""

    status = 503


class HandlerFailedError(EngineStoppedError):
    """A handler in Python raised: it is this request's end alone."""

    status = 500


class SupervisedChild:
    """Runs a module, one process at a time.

    The process leaves when its standard input ends, which our own death causes, too.
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


class StopWish:
    """The first wish decides the exit status; a second one insists."""

    def __init__(self) -> None:
        self.wished = asyncio.Event()
        self.insisted = asyncio.Event()
        self.exit_status = 0

    def wish(self, exit_status: int) -> None:
        if self.wished.is_set():
            self.insisted.set()
        else:
            self.exit_status = exit_status
            self.wished.set()


def watch_for_the_end(stop: StopWish, *, with_stdin: bool, is_launched: bool = False) -> None:
    """Only the launcher acts on an interrupt from a terminal; it then stops the other processes."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        wish = (lambda _: None) if is_launched and number == signal.SIGINT else stop.wish
        loop.add_signal_handler(number, wish, 128 + number)
    if with_stdin:

        def read_to_the_end() -> None:
            # A thread, because stdin may be a file or a device, which no event loop can watch.
            while sys.stdin is not None and os.read(sys.stdin.fileno(), 4096):
                pass
            loop.call_soon_threadsafe(stop.wish, 0)

        threading.Thread(target=read_to_the_end, daemon=True).start()


async def unless(stopping: asyncio.Event, doing: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of `doing`; None if `stopping` came first."""
    done, stop = asyncio.create_task(doing), asyncio.create_task(stopping.wait())
    await asyncio.wait({done, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if done.done():
        return done.result()
    done.cancel()
    return None


async def first_of(*doing: Coroutine[Any, Any, object]) -> None:
    """Wait until the first of them ends; then the others are cancelled."""
    tasks = [asyncio.create_task(one) for one in doing]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()


def say_line(line: Mapping[str, object]) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)  # noqa: T201
