"""The frontend's end of the connection, with a made-up worker at the other one."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest

from reference_engine.config import EngineConfigError
from reference_engine.core.accounting import Counters
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
from reference_engine.serve.supervisor import EngineStoppedError, WorkerConnection
from tests.reference_engine.running_worker import abort, frame

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
