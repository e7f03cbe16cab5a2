"""The frontend process: start the worker, serve HTTP until a request to stop, end the worker.

A signal, the end of standard input and the worker's death all set one `Stop`, which keeps the first
exit status. A second request to stop ends the wait for running requests.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Set
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import uvicorn
import uvloop

from reference_engine.config import EngineConfig, EngineConfigError, FrontendSettings
from reference_engine.faults import Faults
from reference_engine.metrics.collector import Collector
from reference_engine.model.checkpoint import find_checkpoint, read_checkpoint
from reference_engine.model.tokenizer import Tokenizer, WordTokenizer
from reference_engine.protocol import (
    Ready,
)
from reference_engine.serve.faults import FaultyLink
from reference_engine.serve.http import WatchedProtocol, open_port, protocol_for, reserve_port
from reference_engine.serve.link import WorkerLink
from reference_engine.serve.server import Frontend
from reference_engine.serve.supervisor import SHUTTING_DOWN, NoWorker, WorkerSupervisor

if TYPE_CHECKING:
    from reference_engine.kserve.model import Model
    from reference_engine.serve.kserve import Door

_CLOSING_S: Final = 1  # for connections on which nothing is being answered
_KEEP_ALIVE_S: Final = 75  # longer than the clients', so that they close idle connections


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`port` 0 takes a free one; a `kserve_port` of None serves no gRPC."""

    host: str
    port: int
    kserve_port: int | None = None
    config: EngineConfig
    faults: Faults
    frontend: FrontendSettings
    allow_faults: bool
    exit_with_stdin: bool


WORKER_DIED: Final = 1
_LAST_WORD_S: Final = 3.0
_LAST_READ_S: Final = 1.0
_Result = TypeVar("_Result")


class Stop:
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


def watch_for_the_end(stop: Stop, *, with_stdin: bool) -> None:
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
    """Wait for a request to stop; then refuse new requests, drain if so set, abort the rest.

    Each aborted client gets its partial answer. That needs a report from the worker and a client
    that reads; either may never come, so both waits are short.
    """
    await stop.wished.wait()
    link.is_draining = True
    if settings.shutdown == "drain" and stop.exit_status != WORKER_DIED:
        await unless(stop.insisted, _answered(server, settings.drain_timeout_s))
    link.shut_down()
    if not await _answered(server, _LAST_WORD_S):
        link.lost(SHUTTING_DOWN)
    await _answered(server, _LAST_READ_S)
    await _close_all(server, _LAST_READ_S)
    server.should_exit = True


async def unless(stopping: asyncio.Event, doing: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of `doing`; None if `stopping` came first."""
    done, stop = asyncio.create_task(doing), asyncio.create_task(stopping.wait())
    await asyncio.wait({done, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if done.done():
        return done.result()
    done.cancel()
    return None


async def _answered(server: uvicorn.Server, timeout_s: float) -> bool:
    for connection in _connections(server):
        connection.refuse_if_unread(503, SHUTTING_DOWN)
    answering = set(server.server_state.tasks)
    if not answering:
        return True
    _, unanswered = await asyncio.wait(answering, timeout=timeout_s)
    return not unanswered


async def _close_all(server: uvicorn.Server, timeout_s: float) -> None:
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


class Server(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: ServeSettings) -> int:
    """Serve until a request to stop; returns the exit status.

    Raises ListenError, EngineConfigError, and EngineStoppedError if the worker has died.
    """
    with (
        reserve_port(settings.host, settings.port, settings.frontend) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(settings, listener))


def core_for(pid: int, usable: Set[int]) -> int | None:
    """The core on which this frontend stays; None if there is no other for its worker.

    A worker that sends wakes the frontend, which goes first; on the worker's core, the worker waits
    until all clients have been written to. The worker goes where there is room: kept off that core,
    it waited long where others compute, and aborts with it. Several engines on a machine take
    different cores.
    """
    return sorted(usable)[pid % len(usable)] if len(usable) > 1 else None


def _own_core(config: EngineConfig) -> int | None:
    """None on macOS, which has no affinity, and beside the simulated runner, which computes
    nothing.
    """
    if config.runner != "torch" or not hasattr(os, "sched_getaffinity"):
        return None
    return core_for(os.getpid(), os.sched_getaffinity(0))


async def _serve(settings: ServeSettings, listener: socket.socket) -> int:
    stop = Stop()
    watch_for_the_end(stop, with_stdin=settings.exit_with_stdin)
    worker = (
        NoWorker()
        if settings.config.runner == "none"
        else WorkerSupervisor(
            on_report=lambda report: link.take_in(report), on_lost=lambda: link.lost()
        )
    )
    link = FaultyLink(
        time.perf_counter_ns,
        send=worker.send,
        settings=settings.frontend,
        collector=Collector(settings.config),
    )
    link.faults = settings.faults
    try:
        ready = await unless(stop.wished, worker.start(settings.config, settings.faults))
        if ready is not None:
            core = _own_core(settings.config)
            if core is not None:
                os.sched_setaffinity(0, {core})
            tokenizer = _tokenizer(settings.config, ready.vocab_size)
            frontend = Frontend(
                link,
                settings.config,
                ready,
                settings.frontend,
                tokenizer,
                allow_faults=settings.allow_faults,
            )
            server = Server(_uvicorn_config(frontend, settings.frontend))
            door, kserve_url = None, None
            if settings.kserve_port is not None:
                door = _door(settings, link, tokenizer, server)
                kserve_url = await door.open(settings.host, settings.kserve_port)
            ending = asyncio.create_task(end_serving(stop, link, server, settings.frontend))
            keeping = asyncio.create_task(worker.keep())
            keeping.add_done_callback(lambda _: stop.wish(WORKER_DIED))
            open_port(listener)
            _announce(listener, ready, kserve_url)
            # Collections that walk through long-lived objects would pause the event loop.
            gc.collect()
            gc.freeze()
            await server.serve(sockets=[listener])
            if door is not None:
                await door.close(_CLOSING_S)
            ending.cancel()
            keeping.cancel()
            (why,) = await asyncio.gather(keeping, return_exceptions=True)
            if stop.exit_status == WORKER_DIED and isinstance(why, Exception):
                raise why
    finally:
        await worker.end()
    return stop.exit_status


def _door(
    settings: ServeSettings, link: WorkerLink, tokenizer: Tokenizer, server: uvicorn.Server
) -> "Door":
    try:
        from reference_engine.serve.kserve import Door, GenerateModel
    except ImportError as error:
        raise EngineConfigError(
            "--kserve-port needs gRPC and Triton's client: pip install 'walkaway[grpc]'"
        ) from error
    models: dict[str, Model] = {}
    if settings.config.runner != "none":
        models[GenerateModel.name] = GenerateModel(link, settings.config, tokenizer)
    return Door(models, settings.frontend, server.server_state.tasks)


def _tokenizer(config: EngineConfig, vocab_size: int) -> Tokenizer:
    folder = find_checkpoint(config.model)
    if folder is None:
        return WordTokenizer(vocab_size)
    from reference_engine.model.pretrained import PretrainedTokenizer

    return PretrainedTokenizer(read_checkpoint(folder, config.dtype), datetime.now)


def _uvicorn_config(frontend: Frontend, settings: FrontendSettings) -> uvicorn.Config:
    return uvicorn.Config(
        frontend.app(),
        loop="none",
        http=protocol_for(settings),
        ws="none",
        lifespan="off",
        log_level="error",  # a client's mistake is answered, not logged
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSING_S,
    )


def _announce(listener: socket.socket, worker: Ready, kserve_url: str | None) -> None:
    host, port = listener.getsockname()[:2]
    line = {
        "event": "ready",
        "url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        "pid": os.getpid(),
        "worker_pid": worker.pid,
        "device": worker.device,
    }
    if kserve_url is not None:
        line["kserve_url"] = kserve_url
    print(msgspec.json.encode(line).decode(), flush=True)  # noqa: T201
