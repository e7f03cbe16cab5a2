"""The frontend process: connect to the workers, serve HTTP until a request to stop, leave them.

A frontend alone starts its worker, and ends when that dies; a launcher's frontends find theirs
running, and wait for lost ones. A signal, the end of standard input and the worker's death all set
one `StopWish`, which keeps the first exit status. A second request to stop ends the wait for
running requests.
"""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import time
from collections.abc import Iterator, Set
from contextlib import aclosing, contextmanager, nullcontext
from datetime import datetime
from itertools import repeat
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import uvicorn

from reference_engine.config import EngineConfig, EngineConfigError, FrontendSettings
from reference_engine.metrics.collector import MetricsCollector
from reference_engine.model.checkpoint import find_checkpoint, read_checkpoint
from reference_engine.model.tokenizer import Tokenizer, WordTokenizer
from reference_engine.protocol import Listening, Ready, WorkerSettings
from reference_engine.serve.faults import FaultyLink
from reference_engine.serve.http import WatchedProtocol, open_port, protocol_for, reserve_port
from reference_engine.serve.link import Company, WorkerLink
from reference_engine.serve.server import NO_WORKER_READY, Frontend
from reference_engine.serve.settings import FrontendPlace, ServeSettings, WorkerAddress
from reference_engine.serve.supervisor import (
    NO_ENGINE,
    SHUTTING_DOWN,
    WORKER_LOST,
    WORKER_MODULE,
    StopWish,
    SupervisedChild,
    first_of,
    say_line,
    unless,
    watch_for_the_end,
)
from reference_engine.serve.workers import Connecting, WorkerConnection
from reference_engine.wire import Beats, Hello

if TYPE_CHECKING:
    from reference_engine.serve.handlers import HandlerWorker
    from reference_engine.serve.kserve import Door

_CLOSING_S: Final = 1  # for connections on which nothing is being answered
_KEEP_ALIVE_S: Final = 75  # longer than the clients', so that they close idle connections


AnyWorker: TypeAlias = "WorkerConnection | HandlerWorker"
_PAUSES_S: Final = (0.1, 0.5, 2.0)  # before a worker of our own is given up; a dying one may die
_PAUSE_S: Final = 0.1  # before each try to connect to another's, which is started again
_PATIENCE_S: Final = 5.0
WORKER_DIED: Final = 1
_LAST_WORD_S: Final = 3.0
_LAST_READ_S: Final = 1.0


async def end_serving(
    stop: StopWish, link: WorkerLink, server: uvicorn.Server, settings: FrontendSettings
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
        link.give_up()
    await _answered(server, _LAST_READ_S)
    await _close_all(server, _LAST_READ_S)
    server.should_exit = True


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


class FrontendServer(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: ServeSettings, worker_module: str = WORKER_MODULE) -> int:
    """Serve until a request to stop; returns the exit status. Without `settings.place` it starts a
    worker of its own.

    Raises ListenError, EngineConfigError, and EngineStoppedError if that worker has died.
    """
    with (
        reserve_port(settings.host, settings.port, settings.frontend) as listener,
        asyncio.Runner(loop_factory=_new_event_loop) as runner,
    ):
        return runner.run(_serve(settings, listener, SupervisedChild("worker", worker_module)))


def core_for(pid: int, usable: Set[int]) -> int | None:
    """The core on which this frontend stays; None if there is no other for its worker.

    A worker that sends wakes the frontend, which runs first: on the same core, the worker would
    wait until all clients have been written to. The worker is not bound to cores: kept off the
    frontend's, it waited long where other processes compute, and aborts waited with it. Several
    engines on a machine take different cores.
    """
    return sorted(usable)[pid % len(usable)] if len(usable) > 1 else None


def _own_core(config: EngineConfig) -> int | None:
    """None on macOS (no affinity), and with the simulated runner, which computes nothing."""
    if config.runner != "torch" or not hasattr(os, "sched_getaffinity"):
        return None
    return core_for(os.getpid(), os.sched_getaffinity(0))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which is faster, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(settings: ServeSettings, listener: socket.socket, own: SupervisedChild) -> int:
    stop, workers = StopWish(), list[AnyWorker]()
    watch_for_the_end(
        stop, with_stdin=settings.exit_with_stdin, is_launched=settings.place is not None
    )
    try:
        place = settings.place or await unless(stop.wished, _alone(own, settings))
        if place is not None:
            link = _link(settings, place, workers)
            await _serve_until(stop, settings, place, listener, link, own, workers)
    finally:
        for worker in workers:
            worker.close()
        await own.end()
    return stop.exit_status


async def _alone(own: SupervisedChild, settings: ServeSettings) -> FrontendPlace:
    """The place of a frontend alone: it starts a worker of its own, if there is an engine."""
    if not settings.config.has_worker:
        return FrontendPlace()
    secret = secrets.token_hex(32)
    line = await own.start(
        WorkerSettings(
            config=settings.config,
            faults=settings.faults,
            secret=secret,
            metrics_port=settings.tiers.worker_metrics_port,
            peer_timeout_s=settings.frontend.peer_timeout_s,
        )
    )
    listening = msgspec.json.decode(line, type=Listening)
    return FrontendPlace(
        secret=secret,
        addresses=(WorkerAddress(host="127.0.0.1", port=listening.port),),
        worker_metrics_urls=listening.metrics_urls("127.0.0.1"),
    )


def _link(settings: ServeSettings, place: FrontendPlace, workers: list[AnyWorker]) -> FaultyLink:
    """A link to the workers at the place's addresses, which it puts into `workers`."""
    is_launched = settings.place is not None
    names: dict[str, AnyWorker] = {}

    def up(worker: AnyWorker, ready: Ready) -> None:
        if names.setdefault(ready.worker, worker) is worker:
            link.worker_up(ready)

    link = FaultyLink(
        time.perf_counter_ns,
        send=lambda name, message: names[name].send(message),
        settings=settings.frontend,
        collector=MetricsCollector(settings.config, place.workers),
        random=Random(settings.config.seed),
        company=Company(
            place.id_prefix,
            patience_s=_PATIENCE_S if is_launched and place.addresses else 0.0,
            why_none=WORKER_LOST if place.addresses else NO_ENGINE,
        ),
    )
    link.faults = settings.faults
    connecting = Connecting(
        Hello(peer=place.name, secret=place.secret),
        Beats.within(settings.frontend.peer_timeout_s),
        repeat(_PAUSE_S) if is_launched else _PAUSES_S,
        settings.config,
    )
    for address in place.addresses:
        worker = WorkerConnection(
            address, connecting, on_up=up, on_report=link.take_in, on_lost=link.worker_lost
        )
        workers.append(worker)
    if settings.handler_endpoint is not None:
        from reference_engine.dynamo import DistributedRuntime
        from reference_engine.serve.handlers import HandlerWorker

        try:
            runtime = DistributedRuntime(asyncio.get_running_loop(), beats=connecting.beats)
        except PermissionError as error:
            raise EngineConfigError(str(error)) from error
        handlers = HandlerWorker(
            runtime,
            settings.handler_endpoint,
            settings.config,
            _tokenizer(settings.config, NO_WORKER_READY.vocab_size),
            on_up=up,
            on_report=link.take_in,
            on_failed=link.failed,
        )
        workers.append(handlers)
    return link


async def _serve_until(
    stop: StopWish,
    settings: ServeSettings,
    place: FrontendPlace,
    listener: socket.socket,
    link: FaultyLink,
    own: SupervisedChild,
    workers: list[AnyWorker],
) -> None:
    started = await unless(stop.wished, _start(settings, workers))
    if started is None:
        return
    readies, door = started
    core = _own_core(settings.config)
    if core is not None:
        os.sched_setaffinity(0, {core})
    ready = readies[0] if readies else NO_WORKER_READY
    tokenizer = _tokenizer(settings.config, ready.vocab_size)
    frontend = Frontend(
        link,
        settings.config,
        settings.frontend,
        tokenizer,
        allow_faults=settings.allow_faults,
        name=place.name,
        frontends=place.frontends,
    )
    if door is not None:
        frontend.check_integrity = door.check_integrity
    server = FrontendServer(_uvicorn_config(frontend, settings.frontend))
    async with aclosing(door) if door is not None else nullcontext():
        kserve_url = None
        if door is not None and settings.kserve_port is not None:
            at, answering = (settings.host, settings.kserve_port), server.server_state.tasks
            kserve_url = await door.open(at, link, settings.config, tokenizer, answering)
        open_port(listener)
        ending = asyncio.create_task(end_serving(stop, link, server, settings.frontend))
        keeping = asyncio.create_task(_keep(own, workers))
        keeping.add_done_callback(lambda _: stop.wish(WORKER_DIED))
        _announce(listener, ready, place, kserve_url)
        # Collections that walk through long-lived objects would pause the event loop.
        gc.collect()
        gc.freeze()
        await server.serve(sockets=[listener])
    ending.cancel()
    keeping.cancel()
    (why,) = await asyncio.gather(keeping, return_exceptions=True)
    if stop.exit_status == WORKER_DIED and isinstance(why, Exception):
        raise why


async def _start(
    settings: ServeSettings, workers: list[AnyWorker]
) -> "tuple[list[Ready], Door | None]":
    """Raises EngineConfigError if workers share a name, or a repository cannot be served."""
    is_patient = settings.place is not None
    readies = await asyncio.gather(*(worker.start(is_patient=is_patient) for worker in workers))
    names = [ready.worker for ready in readies]
    for name in names:
        if names.count(name) > 1:
            raise EngineConfigError(f"{names.count(name)} workers are named {name}: use --name")
    if settings.kserve_port is None:
        return readies, None
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters to us, gRPC also raises
    try:
        from reference_engine.serve.kserve import Door
    except ImportError as error:
        raise EngineConfigError(
            "--kserve-port needs gRPC and Triton's client: pip install 'walkaway[grpc]'"
        ) from error
    door = await Door.load(
        settings.config, settings.model_repository, is_faithful=settings.triton_faithful
    )
    return readies, door


async def _keep(own: SupervisedChild, workers: list[AnyWorker]) -> None:
    """Raises EngineStoppedError if our own worker dies, or cannot be reached any more."""

    async def live() -> None:
        if not own.is_started:
            await asyncio.Event().wait()
        raise await own.died()

    await first_of(live(), *(worker.keep() for worker in workers))


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


def _announce(
    listener: socket.socket, worker: Ready, place: FrontendPlace, kserve_url: str | None
) -> None:
    host, port = listener.getsockname()[:2]
    line: dict[str, Any] = {
        "event": "ready",
        "url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        "pid": os.getpid(),
        "worker_pid": worker.pid,
        "device": worker.device,
    }
    if place.worker_metrics_urls:
        line["worker_metrics_urls"] = place.worker_metrics_urls
    if kserve_url is not None:
        line["kserve_url"] = kserve_url
    say_line(line)
