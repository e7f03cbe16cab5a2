"""How serving ends: who may ask for it, and what becomes of the requests that are running.

Whatever asks us to stop (a signal, the end of stdin, the worker's death) does so through one event
with one exit status, and is only looked at where it is awaited: nothing is torn out of the middle
of anything. Asking again means: at once.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import uvicorn

from reference_engine.frontend.connection import SHUTTING_DOWN
from reference_engine.frontend.http_protocol import WatchedProtocol
from reference_engine.frontend.settings import FrontendSettings
from reference_engine.frontend.worker_link import WorkerLink

WORKER_DIED: Final = 1
_LAST_WORD_S: Final = 3.0
_LAST_READ_S: Final = 1.0
_Result = TypeVar("_Result")


class Stop:
    """The wish to stop: the first exit status wins, the second wish is an insistence."""

    def __init__(self) -> None:
        self._wished = asyncio.Event()
        self._insisted = asyncio.Event()
        self.exit_status = 0

    def wish(self, exit_status: int) -> None:
        if self._wished.is_set():
            self._insisted.set()
        else:
            self.exit_status = exit_status
            self._wished.set()

    async def wait(self) -> None:
        await self._wished.wait()

    async def insisted(self) -> None:
        await self._insisted.wait()


def watch_for_the_end(stop: Stop, *, with_stdin: bool) -> None:
    """Signals wish to stop, and so does the end of standard input where that is wanted."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.wish, 128 + number)
    if with_stdin:

        def read_to_the_end() -> None:
            # A thread, because stdin may be a file or a device, which no event loop can watch.
            while sys.stdin is not None and os.read(sys.stdin.fileno(), 4096):
                pass
            loop.call_soon_threadsafe(stop.wish, 0)

        threading.Thread(target=read_to_the_end, daemon=True).start()


async def end_serving(
    stop: Stop, link: WorkerLink, server: uvicorn.Server, settings: FrontendSettings
) -> None:
    """Once it is wished: take on nothing new, drain if so set, abort what is left.

    Each of those who are aborted is told what there is. That takes the worker's word, which may
    not come, and a client that reads, which it may not: neither is waited for for long.
    """
    await stop.wait()
    link.is_draining = True
    if settings.shutdown == "drain" and stop.exit_status != WORKER_DIED:
        await unless(stop.insisted(), _answered(server, settings.drain_timeout_s))
    link.shut_down()
    if not await _answered(server, _LAST_WORD_S):
        link.lost(SHUTTING_DOWN)
    await _answered(server, _LAST_READ_S)
    await _close_all(server, _LAST_READ_S)
    server.should_exit = True


async def unless(
    stopping: Coroutine[Any, Any, None], doing: Coroutine[Any, Any, _Result]
) -> _Result | None:
    """What the doing comes to; None if the stopping came first."""
    done, stop = asyncio.create_task(doing), asyncio.create_task(stopping)
    either: set[asyncio.Task[Any]] = {done, stop}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not done.done():
        done.cancel()
        return None
    return done.result()


async def _answered(server: uvicorn.Server, timeout_s: float) -> bool:
    """Whether all that are being answered now have their answers in time.

    Requests that have not come whole are not waited for.
    """
    for connection in _connections(server):
        connection.refuse_if_unread(503, SHUTTING_DOWN)
    answering = set(server.server_state.tasks)
    if not answering:
        return True
    _, unanswered = await asyncio.wait(answering, timeout=timeout_s)
    return not unanswered


async def _close_all(server: uvicorn.Server, timeout_s: float) -> None:
    """Close every connection; who does not read what is still held for it loses it in the end."""
    connections = _connections(server)
    for connection in connections:
        connection.shutdown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for connection in connections:
                await connection.gone.wait()
    for connection in connections:
        connection.transport.abort()


def _connections(server: uvicorn.Server) -> list[WatchedProtocol]:
    connections = list(server.server_state.connections)
    return [connection for connection in connections if isinstance(connection, WatchedProtocol)]
