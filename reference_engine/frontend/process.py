"""The frontend process: start the worker, serve HTTP until told to stop, take the worker along.

One socket pair joins the two. Its end is how each learns of the other's death: the worker leaves
its step loop, the frontend ends the open requests with an error and exits with status 1.

Whatever asks us to stop (a signal, the end of stdin, the worker's death) does so through one event
with one exit status, and is only looked at where it is awaited: nothing is torn out of the middle
of anything.
"""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import uvicorn
import uvloop

from reference_engine.config import EngineConfig
from reference_engine.faults import Faults
from reference_engine.frontend.http_protocol import NoPipelining
from reference_engine.frontend.server import Frontend
from reference_engine.frontend.worker_link import EngineStoppedError, WorkerLink
from reference_engine.protocol import Ready, WorkerSettings

_WORKER_EXIT_S: Final = 5.0
_OPEN_REQUESTS_S: Final = 1  # how long answers may take to end once we are told to stop
_KEEP_ALIVE_S: Final = 75  # longer than the clients', so that they, not we, close idle connections
_WORKER_DIED: Final = 1


class ListenError(RuntimeError):
    """The address cannot be listened on."""


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says. `port` 0 takes a free one."""

    host: str
    port: int
    config: EngineConfig
    faults: Faults
    allow_faults: bool
    exit_with_stdin: bool


class Stop:
    """The wish to stop, once: the first exit status wins."""

    def __init__(self) -> None:
        self._wished = asyncio.Event()
        self.exit_status = 0

    def wish(self, exit_status: int) -> None:
        if not self._wished.is_set():
            self.exit_status = exit_status
            self._wished.set()

    async def wait(self) -> None:
        await self._wished.wait()


class Server(uvicorn.Server):
    """uvicorn without its own handling of signals, which are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: ServeSettings) -> int:
    """Serve until told to stop; the exit status. Raises ListenError and EngineConfigError."""
    listener = listen(settings.host, settings.port)
    process, connection = start_worker(settings)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, listener, connection))
    finally:
        listener.close()
        connection.close()
        _end(process)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, IPv4 or IPv6 as the host wants. Raises ListenError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {host}, port {port}: {error}; choose another --host or --port"
        ) from error


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


async def _serve(
    settings: ServeSettings, listener: socket.socket, connection: socket.socket
) -> int:
    stop = Stop()
    _watch_for_the_end(stop, with_stdin=settings.exit_with_stdin)
    transport, link = await asyncio.get_running_loop().create_connection(
        lambda: WorkerLink(time.perf_counter_ns, on_gone=lambda: stop.wish(_WORKER_DIED)),
        sock=connection,
    )
    worker = await _ready_or_stop(link, stop)
    if worker is None:
        return stop.exit_status
    frontend = Frontend(link, settings.config, worker, allow_faults=settings.allow_faults)
    link.faults, link.free_blocks = settings.faults, settings.config.num_blocks
    server = Server(_uvicorn_config(frontend))
    ending = asyncio.create_task(_end_serving(stop, link, server))
    # Long-lived objects need not be looked through at each collection, which would be a pause.
    gc.collect()
    gc.freeze()
    _announce(listener, worker)
    await server.serve(sockets=[listener])
    ending.cancel()
    transport.close()
    if stop.exit_status == _WORKER_DIED:
        raise EngineStoppedError("the worker process has ended; its last words are above")
    return stop.exit_status


def _watch_for_the_end(stop: Stop, *, with_stdin: bool) -> None:
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


async def _ready_or_stop(link: WorkerLink, stop: Stop) -> Ready | None:
    """The worker's word that it is ready; None if we are to stop first."""
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.ensure_future(link.ready)
    either: set[asyncio.Future[Any]] = {ready, stopping}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not ready.done():
        ready.cancel()
        return None
    return ready.result()


async def _end_serving(stop: Stop, link: WorkerLink, server: Server) -> None:
    await stop.wait()
    link.shut_down()
    server.should_exit = True


def _uvicorn_config(frontend: Frontend) -> uvicorn.Config:
    return uvicorn.Config(
        frontend.app(),
        loop="none",
        http=NoPipelining,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_OPEN_REQUESTS_S,
    )


def _announce(listener: socket.socket, worker: Ready) -> None:
    """One line on stdout for whoever started us: connections are accepted from now on."""
    host, port = listener.getsockname()[:2]
    line = {
        "event": "ready",
        "url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        "pid": os.getpid(),
        "worker_pid": worker.pid,
        "device": worker.device,
    }
    print(msgspec.json.encode(line).decode(), flush=True)  # noqa: T201


def _end(process: subprocess.Popen[bytes]) -> None:
    """The worker has lost its socket and leaves; one that does not is killed."""
    try:
        process.wait(_WORKER_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
