"""The frontend process: start the worker, serve HTTP until told to stop, take the worker along.

One socket pair joins the two. Its end is how each learns of the other's death: the worker leaves
its step loop, the frontend fails the open requests and exits with status 1.
"""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Final

import msgspec
import uvicorn
import uvloop

from reference_engine.config import EngineConfig
from reference_engine.faults import Faults
from reference_engine.frontend.server import Frontend
from reference_engine.frontend.worker_link import WorkerGoneError, WorkerLink
from reference_engine.protocol import Ready
from reference_engine.worker.service import WorkerSettings

_WORKER_EXIT_S: Final = 5.0
_OPEN_REQUESTS_S: Final = 1.0  # how long requests may go on once we are told to stop
_KEEP_ALIVE_S: Final = 75  # longer than the clients', so that they, not we, close idle connections


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says. `port` 0 takes a free one."""

    host: str
    port: int
    config: EngineConfig
    faults: Faults
    allow_faults: bool
    exit_with_stdin: bool


def start_worker(settings: ServeSettings) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The worker process and our end of the socket to it."""
    ours, theirs = socket.socketpair()
    worker_settings = WorkerSettings(config=settings.config, faults=settings.faults)
    with theirs:
        argument = msgspec.json.encode(worker_settings).decode()
        command = [sys.executable, "-m", "reference_engine.worker.service"]
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), argument],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return process, ours


def run(settings: ServeSettings) -> int:
    """Serve until a signal, the end of stdin (if asked for) or the worker's death; exit status."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    listener = socket.create_server((settings.host, settings.port), backlog=1024)
    process, connection = start_worker(settings)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, listener, connection))
    except WorkerGoneError as error:
        print(f"walkaway engine: {error}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        listener.close()
        connection.close()
        _end(process)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """Leave through every `finally`, with the status that a shell gives to a signalled process."""
    sys.exit(128 + number)


async def _serve(
    settings: ServeSettings, listener: socket.socket, connection: socket.socket
) -> int:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    transport, link = await loop.create_connection(
        lambda: WorkerLink(time.perf_counter_ns, gone.set), sock=connection
    )
    worker = await link.ready
    frontend = Frontend(link, settings.config, worker, allow_faults=settings.allow_faults)
    link.faults = settings.faults
    link.free_blocks = settings.config.num_blocks
    server = uvicorn.Server(_uvicorn_config(frontend))
    watches = [asyncio.create_task(_exit_when(gone, server))]
    if settings.exit_with_stdin:
        watches.append(asyncio.create_task(_exit_when(await _stdin_end(), server)))
    _announce(listener, worker)
    # Long-lived objects need not be looked through at each collection, which would be a pause.
    gc.collect()
    gc.freeze()
    await server.serve(sockets=[listener])
    for watch in watches:
        watch.cancel()
    transport.close()
    if gone.is_set():
        raise WorkerGoneError("the worker process has ended; its last words are above")
    return 0


def _uvicorn_config(frontend: Frontend) -> uvicorn.Config:
    return uvicorn.Config(
        frontend.app(),
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_OPEN_REQUESTS_S),
    )


def _announce(listener: socket.socket, worker: Ready) -> None:
    """One line on stdout for whoever started us: connections are accepted from now on."""
    host, port = listener.getsockname()[:2]
    line = {
        "event": "ready",
        "url": f"http://{host}:{port}",
        "pid": os.getpid(),
        "worker_pid": worker.pid,
        "device": worker.device,
    }
    print(msgspec.json.encode(line).decode(), flush=True)  # noqa: T201


async def _exit_when(event: asyncio.Event, server: uvicorn.Server) -> None:
    await event.wait()
    server.should_exit = True


async def _stdin_end() -> asyncio.Event:
    """An event for the end of stdin: whoever holds its other end has gone."""
    ended = asyncio.Event()

    class StdinWatch(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            ended.set()

    await asyncio.get_running_loop().connect_read_pipe(StdinWatch, sys.stdin)
    return ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """The worker has lost its socket and leaves; one that does not is killed."""
    try:
        process.wait(_WORKER_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
