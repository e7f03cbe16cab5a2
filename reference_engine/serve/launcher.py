"""Several frontends and workers: start them, start again what dies, and end them all.

    decode workers ─▶ prefill workers ─▶ first frontend ─▶ other frontends ─▶ ready

Each process reads its settings, addresses and secret from its standard input, and ends when this
input ends. So no process outlives the launcher, which serves nothing itself.
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from reference_engine.config import Component
from reference_engine.protocol import Listening, Ready, WorkerSettings
from reference_engine.serve.settings import FrontendPlace, ServeSettings, WorkerAddress
from reference_engine.serve.supervisor import (
    WORKER_MODULE,
    EngineStoppedError,
    StopWish,
    SupervisedChild,
    first_of,
    say_line,
    unless,
    watch_for_the_end,
)
from reference_engine.serve.workers import ask_for_settings, config_of
from reference_engine.wire import Beats, Hello

LAUNCHED: Final = "--launched"  # a frontend then reads its settings from standard input
_SAID: Final = (1, 2)  # exit statuses of a process that has said why
_MAX_FAILURES: Final = 5  # starts in a row that come to nothing
_PAUSE_S: Final = 0.2  # after each of them
_EXIT_S: Final = 10.0  # beyond the time to drain
_HERE: Final = "127.0.0.1"


class Member:
    """A process that is started again when it dies; its lives are counted from 1.

    `settings_of` gives the settings of a life, and `take` gets the first line that it writes.
    """

    def __init__(
        self,
        child: SupervisedChild,
        index: int,
        settings_of: Callable[[int], msgspec.Struct],
        take: Callable[[bytes], object],
    ) -> None:
        self.child = child
        self._index = index
        self._settings_of = settings_of
        self._take = take
        self._num_lives = 0

    async def start(self) -> None:
        self._num_lives += 1
        self._take(await self.child.start(self._settings_of(self._num_lives)))

    async def lose(self) -> None:
        """Waits for its end, and raises EngineStoppedError."""
        raise await self.child.died()

    async def keep(self) -> None:
        """Raises EngineStoppedError if it cannot be started again."""
        why, num_failures = await self.child.died(), 0
        while num_failures < _MAX_FAILURES:
            print(f"walkaway engine: {why}", file=sys.stderr)  # noqa: T201
            await asyncio.sleep(_PAUSE_S * num_failures)
            try:
                await self.start()
            except EngineStoppedError as error:
                why, num_failures = error, num_failures + 1
                continue
            restarted = {"event": "restarted", "kind": self.child.name, "index": self._index}
            say_line({**restarted, "pid": self.child.pid})
            why, num_failures = await self.child.died(), 0
        raise why


class WorkerPlan(NamedTuple):
    """`decode` is the index of the worker that this one hands over to."""

    name: str
    component: Component = "backend"
    decode: int | None = None


def plan_workers(num: int, *, disaggregated: bool) -> list[WorkerPlan]:
    """Decode workers first: prefill workers need their addresses."""
    if not disaggregated:
        return [WorkerPlan(f"worker-{i}") for i in range(num)]
    decode = [WorkerPlan(f"decode-{i}", "decode") for i in range(num)]
    return [*decode, *(WorkerPlan(f"prefill-{i}", "prefill", i) for i in range(num))]


class FrontendReady(msgspec.Struct):
    """The line with which a frontend announces itself."""

    url: str
    device: str
    kserve_url: str | None = None


class Fleet:
    """`_listening`: where each worker does, once it does; `_announced`: each frontend's line."""

    def __init__(self, settings: ServeSettings) -> None:
        tiers = settings.tiers
        self._settings = settings
        self._secret = tiers.secret if tiers.connect else secrets.token_hex(32)
        num_workers = 0 if tiers.connect or not settings.config.has_worker else tiers.workers
        self._plans = plan_workers(num_workers, disaggregated=tiers.disaggregated)
        self._names = tuple(f"{tiers.name or 'frontend'}-{i}" for i in range(tiers.frontends))
        self._listening: dict[int, Listening] = {}
        self._announced: dict[int, FrontendReady] = {}
        self._workers = [self._worker(i) for i in range(len(self._plans))]
        self._frontends = [self._frontend(i) for i in range(tiers.frontends)]

    def _worker(self, index: int) -> Member:
        settings, plan = self._settings, self._plans[index]

        def settings_of(life: int) -> WorkerSettings:
            ports = self._listening.get(index)
            if ports is None:
                metrics_port = _nth(settings.tiers.worker_metrics_port, index)
                ports = Listening(port=0, metrics_port=metrics_port)
            decode = None if plan.decode is None else (_HERE, self._listening[plan.decode].port)
            return WorkerSettings(
                config=replace(settings.config, component=plan.component),
                faults=settings.faults,
                secret=self._secret,
                name=plan.name,
                port=ports.port,
                metrics_port=ports.metrics_port,
                peer_timeout_s=settings.frontend.peer_timeout_s,
                decode_worker=decode,
                is_restarted=life > 1,
            )

        def take(line: bytes) -> None:
            self._listening[index] = msgspec.json.decode(line, type=Listening)

        return Member(SupervisedChild("worker", WORKER_MODULE), index, settings_of, take)

    def _frontend(self, index: int) -> Member:
        settings = self._settings

        def settings_of(life: int) -> ServeSettings:
            name = self._names[index] + (f".{life}" if life > 1 else "")
            is_only_one = self._names == FrontendPlace().frontends and life == 1
            place = FrontendPlace(
                name=name,
                frontends=self._names,
                id_prefix="" if is_only_one else f"{name}-",
                secret=self._secret,
                addresses=settings.tiers.connect or self._addresses(),
                workers=tuple(plan.name for plan in self._plans),
            )
            port, kserve_port = _nth(settings.port, index), _nth(settings.kserve_port, index)
            if index in self._announced:
                before = self._announced[index]
                port, kserve_port = _port_of(before.url), _port_of(before.kserve_url)
            assert port is not None
            return replace(
                settings, port=port, kserve_port=kserve_port, exit_with_stdin=True, place=place
            )

        def take(line: bytes) -> None:
            self._announced[index] = msgspec.json.decode(line, type=FrontendReady)

        exit_s = settings.frontend.drain_timeout_s + _EXIT_S
        child = SupervisedChild("frontend", "reference_engine", LAUNCHED, exit_s=exit_s)
        return Member(child, index, settings_of, take)

    def _addresses(self) -> tuple[WorkerAddress, ...]:
        """The workers to which frontends talk listen there."""
        return tuple(
            WorkerAddress(host=_HERE, port=self._listening[i].port)
            for i, plan in enumerate(self._plans)
            if plan.component != "decode"
        )

    async def start(self) -> dict[str, Any]:
        """The ready line. Raises EngineStoppedError if a process ends meanwhile."""
        first, *others = self._frontends  # what is wrong with the settings, the first says alone
        running: list[Member] = []
        for tier in (*self._tiers(), [first], others):
            await first_of(_start(tier), *(member.lose() for member in running))
            running += tier
        return self._ready()

    def _ready(self) -> dict[str, Any]:
        announced = [self._announced[i] for i in range(len(self._frontends))]
        listening = [self._listening[i] for i in range(len(self._workers))]
        line: dict[str, Any] = {
            "event": "ready",
            "url": announced[0].url,
            "urls": [one.url for one in announced],
            "pid": os.getpid(),
            "frontend_pids": [frontend.child.pid for frontend in self._frontends],
            "worker_pids": [worker.child.pid for worker in self._workers],
            "worker_metrics_urls": [url for one in listening for url in one.metrics_urls(_HERE)],
            "device": announced[0].device,
        }
        if self._workers:
            line["worker_pid"] = self._workers[0].child.pid
        if announced[0].kserve_url is not None:
            line["kserve_url"] = announced[0].kserve_url
            line["kserve_urls"] = [one.kserve_url for one in announced]
        return line

    async def keep(self) -> None:
        await first_of(*(member.keep() for member in (*self._workers, *self._frontends)))

    @property
    def said_statuses(self) -> list[int]:
        statuses = [one.child.status for one in (*self._workers, *self._frontends)]
        return [status for status in statuses if status in _SAID]

    async def end(self, insisted: asyncio.Event) -> None:
        """The reverse of the start: while frontends drain, they need the workers."""

        async def pass_on() -> None:
            await insisted.wait()
            for frontend in self._frontends:
                frontend.child.signal(signal.SIGTERM)

        passing = asyncio.create_task(pass_on())
        await asyncio.gather(*(frontend.child.end() for frontend in self._frontends))
        passing.cancel()
        for tier in reversed(self._tiers()):
            await asyncio.gather(*(worker.child.end() for worker in tier))

    def _tiers(self) -> list[list[Member]]:
        """Workers that take requests over come before workers that hand them over."""
        tiers: tuple[list[Member], list[Member]] = [], []
        for worker, plan in zip(self._workers, self._plans, strict=True):
            tiers[plan.decode is not None].append(worker)
        return list(tiers)


async def _start(members: list[Member]) -> None:
    await asyncio.gather(*(member.start() for member in members))


def _nth(port: int | None, index: int) -> int | None:
    return port + index if port else port


def _port_of(url: str | None) -> int | None:
    return None if url is None else int(url.rpartition(":")[2])


def launch(settings: ServeSettings) -> int:
    """Run until a request to stop; returns the exit status.

    Raises EngineStoppedError if a process cannot be started.
    """
    with asyncio.Runner() as runner:
        return runner.run(_launch(settings))


async def _launch(settings: ServeSettings) -> int:
    stop = StopWish()
    watch_for_the_end(stop, with_stdin=settings.exit_with_stdin)
    whole = await unless(stop.wished, _with_config_of_workers(settings))
    if whole is None:
        return stop.exit_status
    fleet = Fleet(whole)
    try:
        ready = await unless(stop.wished, fleet.start())
        if ready is not None:
            say_line(ready)
            await unless(stop.wished, fleet.keep())
    except EngineStoppedError:
        if not fleet.said_statuses:
            raise
        return fleet.said_statuses[0]
    finally:
        await fleet.end(stop.insisted)
    return stop.exit_status


async def _with_config_of_workers(settings: ServeSettings) -> ServeSettings:
    """Raises EngineConfigError if frontends alone were given something else."""
    tiers = settings.tiers
    if not tiers.connect:
        return settings
    hello = Hello(peer=f"{tiers.name or 'frontend'}-launcher", secret=tiers.secret)
    beats = Beats.within(settings.frontend.peer_timeout_s)
    readies = await ask_for_settings(tiers.connect, hello, beats)
    return replace(settings, config=config_of(readies, settings.given))


def serve_worker_alone(settings: ServeSettings) -> int:
    """Serve frontends elsewhere. Raises EngineConfigError."""
    from reference_engine.worker.service import Worker, put_readers_first

    at, tiers = settings.tiers.worker_listen, settings.tiers
    assert at is not None
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    worker = Worker(
        WorkerSettings(
            config=settings.config,
            faults=settings.faults,
            secret=tiers.secret,
            name=tiers.name or "worker-0",
            host=at.host,
            port=at.port,
            metrics_port=tiers.worker_metrics_port,
            peer_timeout_s=settings.frontend.peer_timeout_s,
        )
    )

    def announce(_: object) -> None:
        word, ports = worker.first_word.result(), worker.listening
        if isinstance(word, Ready):
            say_line(
                {
                    "event": "ready",
                    "worker": str(replace(at, port=ports.port)),
                    "name": word.worker,
                    "worker_pid": word.pid,
                    "worker_metrics_urls": ports.metrics_urls(at.host),
                    "device": word.device,
                }
            )

    worker.first_word.add_done_callback(announce)
    if settings.exit_with_stdin:
        worker.leave_with_stdin()
    put_readers_first()
    worker.compute()
    return 0
