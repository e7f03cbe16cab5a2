"""This frontend's connections to its workers, each made again whenever it is lost."""

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.connection import PeerConnection
from reference_engine.protocol import FromWorker, Ready, StepReport, ToWorker
from reference_engine.serve.settings import WorkerAddress
from reference_engine.serve.supervisor import EngineStoppedError
from reference_engine.wire import Beats, Failed, Hello, LearnedBy, ProtocolError

_PAUSE_S: Final = 0.1
_ENDED_EARLY: Final = "the worker has ended the connection"
# What a frontend says of its workers, or refuses on their behalf.
_SHARED: Final = ("model", "max_model_len", "num_blocks", "block_size", "max_num_seqs")


class Connecting(NamedTuple):
    """Our side of a connection. `pauses`: the seconds before each try to connect again."""

    hello: Hello
    beats: Beats
    pauses: Iterable[float]
    config: EngineConfig


def differences(ours: EngineConfig, theirs: EngineConfig) -> tuple[str, str] | None:
    """As flags: what a frontend and its worker must have in common, and do not."""
    names = [name for name in _SHARED if getattr(ours, name) != getattr(theirs, name)]
    our_flags, their_flags = (
        " ".join(f"--{name.replace('_', '-')} {getattr(one, name)}" for name in names)
        for one in (ours, theirs)
    )
    return (our_flags, their_flags) if names else None


class Worker:
    """All its state changes on the event loop. `ready` is the last that it said of itself.

    The callbacks come in this order, again and again: `on_up`, `on_report`s, `on_lost`.
    """

    def __init__(
        self,
        address: WorkerAddress,
        connecting: Connecting,
        *,
        on_up: Callable[["Worker", Ready], object],
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
        """Until its model is built. Raises OSError or EngineStoppedError if there is none, and
        EngineConfigError if it refuses us, or its settings cannot work.
        """
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
        """Why it is not the worker of a frontend that says of itself what ours does."""
        if ready.config is None:
            return None
        differing = differences(self._connecting.config, ready.config)
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


def _say(why: str) -> None:
    print(f"walkaway engine: {why}", file=sys.stderr, flush=True)  # noqa: T201
