"""Several frontends and workers: start them, start again what dies, and end them all.

    decode workers ─▶ prefill workers ─▶ first frontend ─▶ other frontends ─▶ ready

Each process has its settings, addresses and secret from its standard input, and ends with it, so
none outlives this one, which serves nothing itself.
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import uvloop
from msgspec.structs import replace

from reference_engine.config import Component
from reference_engine.protocol import Listening, Ready, WorkerSettings
from reference_engine.serve.process import (
    WORKER_MODULE,
    Place,
    ServeSettings,
    Stop,
    first_of,
    say_line,
    unless,
    watch_for_the_end,
)
from reference_engine.serve.supervisor import Child, EngineStoppedError
from reference_engine.serve.workers import Caller, Worker, WorkerAddress
from reference_engine.wire import Beats, Hello

LAUNCHED: Final = "--launched"  # a frontend then reads its settings from standard input
_SAID: Final = (1, 2)  # exit statuses of a process that has said why
_MAX_FAILURES: Final = 5  # starts in a row that come to nothing
_PAUSE_S: Final = 0.2  # after each of them
_EXIT_S: Final = 10.0  # beyond the time to drain


class FrontendReady(msgspec.Struct):
    """The line with which a frontend announces itself."""

    url: str
    device: str
    kserve_url: str | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def kserve_port(self) -> int | None:
        return None if self.kserve_url is None else int(self.kserve_url.rpartition(":")[2])


class Member:
    """A process that is started again when it dies; its lives are counted from 1.

    `settings_of` gives the settings of a life, and `take` gets the first line that it writes.
    """

    def __init__(
        self,
        child: Child,
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

    async def keep(self) -> None:
        """Raises EngineStoppedError if it cannot be started again."""
        while True:
            why = await self.child.died()
            for num_failures in range(_MAX_FAILURES):
                print(f"walkaway engine: {self._index}: {why}", file=sys.stderr)  # noqa: T201
                await asyncio.sleep(_PAUSE_S * num_failures)
                try:
                    await self.start()
                except EngineStoppedError as error:
                    why = error
                else:
                    break
            else:
                raise why
            restarted = {"event": "restarted", "kind": self.child.name, "index": self._index}
            say_line({**restarted, "pid": self.child.pid})


class WorkerPlan(NamedTuple):
    name: str
    component: Component = "backend"
    decode: int | None = None  # the index of the worker that this one hands over to


def plan_workers(num: int, *, disaggregated: bool, name: str | None) -> list[WorkerPlan]:
    """Decode workers first; frontends know those that no other worker hands over to."""
    if disaggregated:
        decode = [WorkerPlan(f"decode-{i}", "decode") for i in range(num)]
        return [*decode, *(WorkerPlan(f"prefill-{i}", "prefill", i) for i in range(num))]
    return [WorkerPlan(name or f"worker-{i}") for i in range(num)]


class Fleet:
    """`_at`: where each worker listens; `_fronts`: what each frontend announced."""

    def __init__(self, settings: ServeSettings) -> None:
        tiers = settings.tiers
        self._settings = settings
        self._secret = tiers.secret or ("" if _is_shared(settings) else secrets.token_hex(32))
        self._plans = plan_workers(
            0 if tiers.connect or not settings.config.has_worker else tiers.workers,
            disaggregated=tiers.disaggregated,
            name=tiers.name if tiers.worker_listen else None,
        )
        self._at: dict[int, Listening] = {}
        self._fronts: dict[int, FrontendReady] = {}
        self._workers = [self._worker(i) for i in range(len(self._plans))]
        num_frontends = 0 if tiers.worker_listen else tiers.frontends
        base = (tiers.name if tiers.connect else None) or "frontend"
        self._names = tuple(f"{base}-{i}" for i in range(num_frontends))
        self._frontends = [self._frontend(i) for i in range(num_frontends)]

    @property
    def members(self) -> list[Member]:
        return [*self._workers, *self._frontends]

    def _worker(self, index: int) -> Member:
        tiers, plan = self._settings.tiers, self._plans[index]
        asked, metrics = tiers.worker_listen, tiers.worker_metrics_port
        host, port = ("127.0.0.1", 0) if asked is None else (asked.host, asked.port)

        def settings_of(_: int) -> WorkerSettings:
            before = self._at.get(index)
            behind = None if plan.decode is None else self._at[plan.decode]
            return WorkerSettings(
                config=replace(self._settings.config, component=plan.component),
                faults=self._settings.faults,
                secret=self._secret,
                name=plan.name,
                host=host,
                port=port if before is None else before.port,
                metrics_port=(metrics and metrics + index)
                if before is None
                else before.metrics_port,
                peer_timeout_s=self._settings.frontend.peer_timeout_s,
                decode_worker=None if behind is None else (host, behind.port),
            )

        def take(line: bytes) -> None:
            self._at[index] = msgspec.json.decode(line, type=Listening)

        return Member(Child("worker", WORKER_MODULE), index, settings_of, take)

    def _frontend(self, index: int) -> Member:
        settings = self._settings

        def settings_of(life: int) -> ServeSettings:
            name = self._names[index] + (f".{life}" if life > 1 else "")
            is_alone = len(self._names) == 1 and life == 1 and not settings.tiers.connect
            place = Place(
                name=name,
                id_prefix="" if is_alone else f"{name}-",
                secret=self._secret,
                addresses=self._addresses(),
                frontends=self._names,
                workers=tuple(plan.name for plan in self._plans),
            )
            before = self._fronts.get(index)
            kserve = settings.kserve_port
            if before is None:
                port, kserve = _nth(settings.port, index), kserve and _nth(kserve, index)
            else:
                port, kserve = before.port, before.kserve_port
            return replace(
                settings, port=port, kserve_port=kserve, exit_with_stdin=True, place=place
            )

        def take(line: bytes) -> None:
            self._fronts[index] = msgspec.json.decode(line, type=FrontendReady)

        exit_s = settings.frontend.drain_timeout_s + _EXIT_S
        child = Child("frontend", "reference_engine", LAUNCHED, exit_s=exit_s)
        return Member(child, index, settings_of, take)

    def _addresses(self) -> tuple[WorkerAddress, ...]:
        behind = {plan.decode for plan in self._plans}
        ours = [i for i in range(len(self._plans)) if i not in behind]
        at = tuple(WorkerAddress(host="127.0.0.1", port=self._at[i].port) for i in ours)
        return self._settings.tiers.connect or at

    async def start(self) -> dict[str, Any]:
        """The ready line. Raises EngineStoppedError if a process ends meanwhile."""
        for tier in self._tiers():
            await asyncio.gather(*(worker.start() for worker in tier))
        if not self._frontends:
            return await self._lone_worker()
        await self._frontends[0].start()  # what is wrong with the settings, it says alone
        await asyncio.gather(*(frontend.start() for frontend in self._frontends[1:]))
        fronts = [self._fronts[i] for i in range(len(self._frontends))]
        line: dict[str, Any] = {
            "event": "ready",
            "url": fronts[0].url,
            "urls": [front.url for front in fronts],
            "device": fronts[0].device,
            "frontend_pids": [frontend.child.pid for frontend in self._frontends],
            **self._facts_of_workers(),
        }
        if fronts[0].kserve_url is not None:
            line["kserve_url"] = fronts[0].kserve_url
            line["kserve_urls"] = [front.kserve_url for front in fronts]
        return line

    async def _lone_worker(self) -> dict[str, Any]:
        ready = await self._ask(self._at[0])
        asked = self._settings.tiers.worker_listen
        assert asked is not None
        at = WorkerAddress(host=asked.host, port=self._at[0].port)
        return {
            "event": "ready",
            "worker": str(at),
            "name": ready.worker,
            "device": ready.device,
            **self._facts_of_workers(),
        }

    async def _ask(self, listening: Listening) -> Ready:
        """A worker's first word, once its model is built."""
        asked = self._settings.tiers.worker_listen
        assert asked is not None
        caller = Caller(Hello(peer="launcher", secret=self._secret), Beats(), ())
        worker = Worker(
            WorkerAddress(host=asked.host, port=listening.port),
            caller,
            on_up=lambda *_: None,
            on_report=lambda *_: None,
            on_lost=lambda _: None,
        )
        try:
            return await worker.connect()
        finally:
            worker.close()

    def _facts_of_workers(self) -> dict[str, Any]:
        pids = [worker.child.pid for worker in self._workers]
        asked = self._settings.tiers.worker_listen
        host = "127.0.0.1" if asked is None else asked.host
        ports = [self._at[i].metrics_port for i in range(len(pids))]
        urls = [f"http://{host}:{port}/metrics" for port in ports if port is not None]
        first = {"worker_pid": pids[0]} if pids else {}
        return {"pid": os.getpid(), "worker_pids": pids, **first, "worker_metrics_urls": urls}

    async def keep(self) -> None:
        await first_of(*(member.keep() for member in self.members))

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
        """Workers that take requests over come before those that hand them over."""
        tiers: tuple[list[Member], list[Member]] = [], []
        for worker, plan in zip(self._workers, self._plans, strict=True):
            tiers[plan.decode is not None].append(worker)
        return list(tiers)


def _is_shared(settings: ServeSettings) -> bool:
    """Whether processes that another launcher starts must know the secret."""
    return bool(settings.tiers.connect) or settings.tiers.worker_listen is not None


def _nth(port: int, index: int) -> int:
    return port and port + index


def launch(settings: ServeSettings) -> int:
    """Run until a request to stop; returns the exit status.

    Raises EngineStoppedError if a process cannot be started, and EngineConfigError.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_launch(settings))


async def _launch(settings: ServeSettings) -> int:
    stop, fleet = Stop(), Fleet(settings)
    watch_for_the_end(stop, with_stdin=settings.exit_with_stdin)
    try:
        ready = await unless(stop.wished, fleet.start())
        if ready is not None:
            say_line(ready)
            await unless(stop.wished, fleet.keep())
    except EngineStoppedError:
        statuses = [member.child.status for member in fleet.members]
        said = [status for status in statuses if status in _SAID]
        if not said:
            raise
        return said[0]
    finally:
        await fleet.end(stop.insisted)
    return stop.exit_status
