"""This frontend's connections to its workers, each made again whenever it is lost."""

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.connection import PeerConnection
from reference_engine.protocol import FromWorker, Ready, StepReport, ToWorker
from reference_engine.serve.settings import WorkerAddress, as_flags
from reference_engine.serve.supervisor import EngineStoppedError
from reference_engine.wire import Beats, Failed, Hello, LearnedBy, ProtocolError

_PAUSE_S: Final = 0.1
_ENDED_EARLY: Final = "the worker has ended the connection"
# What a frontend says of its workers, or refuses on their behalf: equal in all its workers.
_SHARED: Final = ("model", "max_model_len", "num_blocks", "block_size", "max_num_seqs")


class Connecting(NamedTuple):
    """Our side of a connection. `pauses`: the seconds before each try to connect again. `config`:
    what the frontend says of its workers; None if it says nothing yet.
    """

    hello: Hello
    beats: Beats
    pauses: Iterable[float]
    config: EngineConfig | None


def differences(ours: Mapping[str, Any], theirs: EngineConfig) -> tuple[str, str] | None:
    """Our settings that differ from theirs, and theirs, both as flags; None: none differs."""
    differing = [name for name, value in ours.items() if value != getattr(theirs, name)]
    if not differing:
        return None
    return (
        as_flags({name: ours[name] for name in differing}),
        as_flags({name: getattr(theirs, name) for name in differing}),
    )


class WorkerConnection:
    """All its state changes on the event loop. `ready` is the last that it said of itself.

    The callbacks come in this order, again and again: `on_up`, `on_report`s, `on_lost`.
    """

    def __init__(
        self,
        address: WorkerAddress,
        connecting: Connecting,
        *,
        on_up: Callable[["WorkerConnection", Ready], object],
        on_report: Callable[[str, StepReport], object],
        on_lost: Callable[[str], object],
    ) -> None:
        self._address = address
        self._connecting = connecting
        self._on_up = on_up
        self._on_report = on_report
        self._on_lost = on_lost
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._connection: PeerConnection[FromWorker] | None = None
        self._broken = asyncio.Event()
        self.ready: Ready | None = None

    def send(self, message: ToWorker) -> None:
        """Raises ConnectionError if the connection is lost."""
        if self._connection is None:
            raise ConnectionResetError(f"the worker at {self._address} is not connected")
        self._connection.send(message)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def start(self, *, is_patient: bool) -> Ready:
        """The first connection; with patience, there need not be a worker yet."""
        is_said = False
        while True:
            try:
                return await self.connect()
            except (OSError, EngineStoppedError) as error:
                if not is_patient:
                    raise
                if not is_said:
                    _say(f"waiting for a worker at {self._address}: {error}")
                    is_said = True
            await asyncio.sleep(_PAUSE_S)

    async def connect(self) -> Ready:
        """Connect to it, and wait until its model is built. Raises OSError or EngineStoppedError if
        there is none, and EngineConfigError if it refuses us, or its settings cannot work."""
        first_word: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

        def take_in(message: FromWorker) -> None:
            if not first_word.done():
                self._take_first(message, connection, first_word)
            elif first_word.exception() is None:  # else the connection is closed in a moment
                self._take_next(message, first_word.result())

        def lose(_: LearnedBy, error: Exception | None) -> None:
            if error is not None:
                _say(f"connection to the worker: {error}")
            if not first_word.done():
                first_word.set_exception(EngineStoppedError(_ENDED_EARLY))
            elif self._connection is connection:
                self._connection = None
                self._broken.set()
                self._on_lost(first_word.result().worker)

        connection = PeerConnection(
            self._decoder, on_message=take_in, on_lost=lose, beats=self._connecting.beats
        )
        await asyncio.get_running_loop().create_connection(
            lambda: connection, self._address.host, self._address.port
        )
        try:
            connection.send(self._connecting.hello)
            return await first_word
        except BaseException:
            connection.close()
            raise

    def _take_first(
        self,
        message: FromWorker,
        connection: PeerConnection[FromWorker],
        first_word: "asyncio.Future[Ready]",
    ) -> None:
        match message:
            case Ready() if (why := self._refusal(message)) is not None:
                first_word.set_exception(EngineConfigError(why))
            case Ready():
                self._connection, self.ready = connection, message
                first_word.set_result(message)
                self._on_up(self, message)
            case Failed(message=why):
                first_word.set_exception(EngineConfigError(why))
            case _:
                raise ProtocolError(f"{type(message).__name__}: out of turn")

    def _take_next(self, message: FromWorker, ready: Ready) -> None:
        if not isinstance(message, StepReport):
            said = message.message if isinstance(message, Failed) else "out of turn"
            raise ProtocolError(f"{type(message).__name__}: {said}")
        self._on_report(ready.worker, message)

    def _refusal(self, ready: Ready) -> str | None:
        """Why its settings do not fit what this frontend says of its workers; None if they do."""
        config = self._connecting.config
        if config is None or ready.config is None:
            return None
        differing = differences(_shared(config), ready.config)
        if differing is None:
            return None
        ours, theirs = differing
        return (
            f"{ready.worker} at {self._address} serves with {theirs}, and this frontend has "
            f"{ours}: give both the same"
        )

    async def keep(self) -> None:
        """Connect again after each loss. Raises EngineStoppedError when the pauses are over."""
        while True:
            await self._broken.wait()
            self._broken.clear()
            await self._connect_again()

    async def _connect_again(self) -> None:
        reason = ""
        for pause_s in self._connecting.pauses:
            await asyncio.sleep(pause_s)
            try:
                await self.connect()
            except (OSError, EngineStoppedError, EngineConfigError) as error:
                reason = str(error) or "it does not answer"
            else:
                return
        raise EngineStoppedError(f"the worker process is alive, but cannot be reached: {reason}")


async def ask_for_settings(
    addresses: Sequence[WorkerAddress], hello: Hello, beats: Beats
) -> list[Ready]:
    """What the worker at each address says of itself, once all are there. Raises EngineConfigError
    if one refuses us.
    """
    asking = Connecting(hello, beats, (), None)
    workers = [
        WorkerConnection(address, asking, on_up=_ignore, on_report=_ignore, on_lost=_ignore)
        for address in addresses
    ]
    try:
        return await asyncio.gather(*(worker.start(is_patient=True) for worker in workers))
    finally:
        for worker in workers:
            worker.close()


def config_of(readies: Sequence[Ready], given: Mapping[str, Any]) -> EngineConfig:
    """What frontends alone say of these workers. Raises EngineConfigError if something else was
    `given`, or if the workers differ.
    """
    configs = [(ready.worker, ready.config) for ready in readies if ready.config is not None]
    if not configs:  # they are not of this engine
        return EngineConfig(**{"device": "cpu", **given})
    first, config = configs[0]
    stated = {name: value for name, value in given.items() if (name, value) != ("device", "auto")}
    for ours, whose in (
        (stated, "this frontend was given"),
        (_shared(config), f"{first} with"),
    ):
        for worker, theirs in configs:
            if (differing := differences(ours, theirs)) is not None:
                raise EngineConfigError(
                    f"{worker} serves with {differing[1]}, and {whose} {differing[0]}: give both "
                    "the same"
                )
    return config


def _shared(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _SHARED}


def _ignore(*_: object) -> None:
    """What a worker reports to somebody who only asks."""


def _say(why: str) -> None:
    print(f"walkaway engine: {why}", file=sys.stderr, flush=True)  # noqa: T201
