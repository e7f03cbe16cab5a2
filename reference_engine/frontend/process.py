"""The frontend process: start the worker, serve HTTP until told to stop, take the worker along.

When the worker dies, the frontend ends the open requests with an error, says so, and exits with
status 1; when the frontend dies, the worker leaves.
"""

import asyncio
import gc
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import uvicorn
import uvloop

from reference_engine.config import EngineConfig
from reference_engine.faults import Faults
from reference_engine.frontend.connection import EngineStoppedError
from reference_engine.frontend.http_protocol import protocol_for
from reference_engine.frontend.listening import listen
from reference_engine.frontend.rate_limit import RateLimiter
from reference_engine.frontend.server import Frontend
from reference_engine.frontend.settings import FrontendSettings
from reference_engine.frontend.statistics import Statistics
from reference_engine.frontend.stopping import (
    WORKER_DIED,
    Stop,
    end_serving,
    unless,
    watch_for_the_end,
)
from reference_engine.frontend.supervisor import WorkerSupervisor
from reference_engine.frontend.worker_link import WorkerLink
from reference_engine.protocol import Ready

_CLOSING_S: Final = 1  # for connections on which nothing is being answered
_KEEP_ALIVE_S: Final = 75  # longer than the clients', so that they, not we, close idle connections


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says. `port` 0 takes a free one."""

    host: str
    port: int
    config: EngineConfig
    faults: Faults
    frontend: FrontendSettings
    allow_faults: bool
    exit_with_stdin: bool


class Server(uvicorn.Server):
    """uvicorn without its own handling of signals, which are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: ServeSettings) -> int:
    """Serve until told to stop; the exit status.

    Raises ListenError, EngineConfigError, and EngineStoppedError where the worker has died.
    """
    with (
        listen(settings.host, settings.port, settings.frontend) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(settings, listener))


async def _serve(settings: ServeSettings, listener: socket.socket) -> int:
    stop = Stop()
    watch_for_the_end(stop, with_stdin=settings.exit_with_stdin)
    worker = WorkerSupervisor(
        on_report=lambda report: link.take_in(report), on_lost=lambda: link.lost()
    )
    link = WorkerLink(
        time.perf_counter_ns,
        send=worker.send,
        settings=settings.frontend,
        statistics=Statistics(settings.config.max_model_len),
        limiter=RateLimiter(settings.frontend.rate_limits),
    )
    link.faults, link.free_blocks = settings.faults, settings.config.num_blocks
    try:
        ready = await unless(stop.wait(), worker.start(settings.config, settings.faults))
        if ready is not None:
            frontend = Frontend(
                link, settings.config, ready, settings.frontend, allow_faults=settings.allow_faults
            )
            server = Server(_uvicorn_config(frontend, settings.frontend))
            ending = asyncio.create_task(end_serving(stop, link, server, settings.frontend))
            _announce(listener, ready)
            await _serve_while_it_lives(server, listener, worker, stop)
            ending.cancel()
    finally:
        await worker.end()
    return stop.exit_status


async def _serve_while_it_lives(
    server: uvicorn.Server, listener: socket.socket, worker: WorkerSupervisor, stop: Stop
) -> None:
    """Serve until the server is told to exit. Raises EngineStoppedError if a death told it."""
    keeping = asyncio.create_task(worker.keep())
    keeping.add_done_callback(lambda _: stop.wish(WORKER_DIED))
    # Long-lived objects need not be looked through at each collection, which would be a pause.
    gc.collect()
    gc.freeze()
    await server.serve(sockets=[listener])
    keeping.cancel()
    try:
        await keeping
    except asyncio.CancelledError:
        pass
    except EngineStoppedError:
        if stop.exit_status == WORKER_DIED:
            raise


def _uvicorn_config(frontend: Frontend, settings: FrontendSettings) -> uvicorn.Config:
    return uvicorn.Config(
        frontend.app(),
        loop="none",
        http=protocol_for(settings),
        ws="none",
        lifespan="off",
        log_level="error",  # what clients do wrong, they are told
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSING_S,
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
