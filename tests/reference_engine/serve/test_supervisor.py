"""The supervisor with a real worker, which is made to hang up, to stop, and to die."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import psutil
import pytest

from reference_engine.config import EngineConfigError
from reference_engine.core.accounting import Counters
from reference_engine.faults import Faults
from reference_engine.protocol import (
    MAX_FRAME_BYTES,
    AbortRequest,
    Failed,
    FrameReader,
    Hello,
    Ready,
    StepReport,
    ToWorker,
    encode_frame,
)
from reference_engine.serve.supervisor import (
    EngineStoppedError,
    Waits,
    WorkerConnection,
    WorkerSupervisor,
)
from tests.reference_engine.running_worker import NUM_BLOCKS, QUICK, abort, add, frame

pytestmark = pytest.mark.e2e


class Watched:
    """A supervisor whose reports and losses can be waited for. `ready_again_s`: how long a worker
    may take to answer once more."""

    def __init__(self, ready_again_s: float) -> None:
        self.reports: asyncio.Queue[StepReport] = asyncio.Queue()
        self.when_lost: Callable[[], None] = lambda: None
        self.supervisor = WorkerSupervisor(
            on_report=self.reports.put_nowait,
            on_lost=lambda: self.when_lost(),
            waits=Waits(before_tries=(0.05, 0.05), ready_again=ready_again_s, exit=0.5),
        )

    async def end_of(self, request_id: str) -> StepReport:
        while True:
            report = await self.reports.get()
            for output in report.outputs:
                if output.request_id == request_id and output.ending is not None:
                    return report


def with_worker(
    test: Callable[[Watched, Ready], Awaitable[None]], *, ready_again_s: float = 10
) -> None:
    async def run() -> None:
        watched = Watched(ready_again_s)
        try:
            await test(watched, await watched.supervisor.start(QUICK, Faults()))
        finally:
            await watched.supervisor.end()

    asyncio.run(run())


def test_a_broken_connection_is_renewed_and_the_worker_is_the_same() -> None:
    async def test(watched: Watched, ready: Ready) -> None:
        supervisor, lost = watched.supervisor, asyncio.Event()
        watched.when_lost = lost.set
        keeping = asyncio.create_task(supervisor.keep())
        supervisor.send(add("a", max_tokens=3000))
        await watched.reports.get()
        supervisor.send(add("bad", num_prompt=0))  # for which the worker hangs up
        await lost.wait()
        with pytest.raises(EngineStoppedError, match="lost its worker"):
            supervisor.send(add("b"))
        assert (await watched.end_of("a")).free_blocks == NUM_BLOCKS
        supervisor.send(add("c"))
        assert (await watched.end_of("c")).free_blocks == NUM_BLOCKS
        assert psutil.pid_exists(ready.pid)
        keeping.cancel()

    with_worker(test)


def test_a_worker_that_does_not_answer_is_given_up_and_killed() -> None:
    async def test(watched: Watched, ready: Ready) -> None:
        watched.when_lost = lambda: os.kill(ready.pid, signal.SIGSTOP)
        watched.supervisor.send(add("bad", num_prompt=0))
        with pytest.raises(EngineStoppedError, match="alive, but cannot be reached"):
            await watched.supervisor.keep()
        await watched.supervisor.end()
        assert not psutil.pid_exists(ready.pid)

    with_worker(test, ready_again_s=0.2)


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_worker_that_has_died_is_not_looked_for(number: int, how: str) -> None:
    async def test(watched: Watched, ready: Ready) -> None:
        os.kill(ready.pid, number)
        with pytest.raises(EngineStoppedError, match=f"process has ended .killed by {how}."):
            await watched.supervisor.keep()

    with_worker(test)


def test_ending_twice_is_ending_once() -> None:
    async def test(watched: Watched, ready: Ready) -> None:
        await watched.supervisor.end()
        assert not psutil.pid_exists(ready.pid)

    with_worker(test)


READY = Ready(pid=1, device="cpu", vocab_size=2048, gpu_name=None)
REPORT = StepReport(
    step=None,
    outputs=[],
    events=[],
    num_running=3,
    num_waiting=0,
    free_blocks=7,
    cached_blocks=0,
    counters=Counters(),
)


class Ends:
    """Both ends: what we hold, and the streams of the made-up worker."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.has_report = asyncio.Event()
        self.num_lost = 0
        self.lost = asyncio.Event()
        self.from_frontend: asyncio.StreamReader
        self.to_frontend: asyncio.StreamWriter
        self.connection: WorkerConnection

    def take_in(self, report: StepReport) -> None:
        self.reports.append(report)
        self.has_report.set()

    def note_lost(self) -> None:
        self.num_lost += 1
        self.lost.set()

    async def is_ended_by_us(self) -> bool:
        try:
            while await self.from_frontend.read(65536):
                pass
        except ConnectionResetError:
            pass
        return True


def with_ends(test: Callable[[Ends], Awaitable[None]]) -> None:
    async def run() -> None:
        ends, accepted = Ends(), asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends.from_frontend, ends.to_frontend = reader, writer
            accepted.set()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        transport, ends.connection = await asyncio.get_running_loop().create_connection(
            lambda: WorkerConnection("sesame", on_report=ends.take_in, on_lost=ends.note_lost),
            *server.sockets[0].getsockname(),
        )
        await accepted.wait()
        peer = transport.get_extra_info("socket")
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await test(ends)
        ends.connection.close()
        assert await ends.is_ended_by_us()
        ends.to_frontend.close()
        with suppress(ConnectionError):
            await ends.to_frontend.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(run())


def test_hello_comes_first_and_messages_after_it() -> None:
    async def test(ends: Ends) -> None:
        ends.connection.send(abort("a"))
        reader, payloads = FrameReader(), list[bytes]()
        while len(payloads) < 2:
            payloads += reader.feed(await ends.from_frontend.read(65536))
        decoder = msgspec.msgpack.Decoder(ToWorker)
        hello, message = map(decoder.decode, payloads)
        assert hello == Hello(secret="sesame")
        assert isinstance(message, AbortRequest)

    with_ends(test)


@pytest.mark.parametrize(
    "sent",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        frame(b"\xc1"),
        frame(msgspec.msgpack.encode(["nonsense"])),
        encode_frame(READY),
        encode_frame(Failed(message="too late")),
    ],
    ids=["too_long", "malformed", "unknown_type", "second_ready", "failed_after_ready"],
)
def test_a_worker_that_breaks_the_protocol_loses_the_connection(
    sent: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(ends: Ends) -> None:
        ends.to_frontend.write(encode_frame(READY))
        assert await ends.connection.ready == READY
        ends.to_frontend.write(encode_frame(REPORT))
        await ends.has_report.wait()
        ends.to_frontend.write(sent)
        await ends.lost.wait()
        assert await ends.is_ended_by_us()
        assert ends.reports == [REPORT]
        assert ends.num_lost == 1
        with pytest.raises(EngineStoppedError, match="lost its worker"):
            ends.connection.send(abort("a"))

    with_ends(test)
    assert capsys.readouterr().err.count("connection to the worker") == 1


def test_a_report_before_the_first_word_is_out_of_turn(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(ends: Ends) -> None:
        ends.to_frontend.write(encode_frame(REPORT))
        with pytest.raises(EngineStoppedError):
            await ends.connection.ready
        assert (ends.reports, ends.num_lost) == ([], 0)

    with_ends(test)
    assert "StepReport out of turn" in capsys.readouterr().err


def test_settings_that_cannot_work_are_the_callers_to_know() -> None:
    async def test(ends: Ends) -> None:
        ends.to_frontend.write(encode_frame(Failed(message="no such device")))
        with pytest.raises(EngineConfigError, match="no such device"):
            await ends.connection.ready

    with_ends(test)


def test_an_end_before_the_first_word_is_no_loss_but_a_failure_to_connect() -> None:
    async def test(ends: Ends) -> None:
        ends.to_frontend.close()
        with pytest.raises(EngineStoppedError, match="ended the connection"):
            await ends.connection.ready
        assert ends.num_lost == 0

    with_ends(test)
