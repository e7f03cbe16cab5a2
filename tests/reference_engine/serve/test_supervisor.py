"""The supervisor with a real worker, which is made to hang up, to stop, and to die."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import psutil
import pytest

from reference_engine.config import EngineConfig, EngineConfigError, StepCost
from reference_engine.faults import Faults
from reference_engine.protocol import (
    FromWorker,
    Ready,
    StepReport,
)
from reference_engine.serve.supervisor import (
    EngineStoppedError,
    Waits,
    WorkerConnection,
    WorkerSupervisor,
)
from reference_engine.wire import (
    MAX_FRAME_BYTES,
    Failed,
    encode_frame,
)
from tests.reference_engine.fake_worker import EMPTY_REPORT, READY, frame
from tests.reference_engine.stepped_engine import abort, add

pytestmark = pytest.mark.anyio

NUM_BLOCKS = 256
QUICK = EngineConfig(
    runner="simulated", num_blocks=NUM_BLOCKS, step_cost=StepCost(fixed_s=0.001), max_num_seqs=4
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def watched(
    *, when_lost: Callable[[int], None] = lambda pid: None, ready_again_s: float = 10.0
) -> AsyncIterator[tuple[WorkerSupervisor, Ready, asyncio.Queue[StepReport]]]:
    """A supervisor of a real worker, its Ready and its reports. `when_lost` gets the worker's pid;
    `ready_again_s`: how long the worker may take to answer once more.
    """
    reports: asyncio.Queue[StepReport] = asyncio.Queue()
    supervisor = WorkerSupervisor(
        on_report=reports.put_nowait,
        on_lost=lambda: when_lost(ready.pid),
        waits=Waits(before_tries=(0.05, 0.05), ready_again=ready_again_s, exit=0.5),
    )
    try:
        ready = await supervisor.start(QUICK, Faults())
        yield supervisor, ready, reports
    finally:
        await supervisor.end()
        assert not psutil.pid_exists(ready.pid)


async def free_blocks_after(request_id: str, reports: asyncio.Queue[StepReport]) -> int:
    while True:
        report = await reports.get()
        for output in report.outputs:
            if output.request_id == request_id and output.ending is not None:
                return report.free_blocks


@pytest.mark.e2e
async def test_a_broken_connection_is_renewed_and_the_worker_is_the_same() -> None:
    lost = asyncio.Event()
    async with watched(when_lost=lambda _: lost.set()) as (supervisor, ready, reports):
        keeping = asyncio.create_task(supervisor.keep())
        supervisor.send(add("a", max_tokens=3000))
        await reports.get()
        supervisor.send(add("bad", num_prompt=0))  # for which the worker hangs up
        await lost.wait()
        with pytest.raises(EngineStoppedError, match="lost its worker"):
            supervisor.send(add("b"))
        is_sent = False
        while not is_sent:
            await asyncio.sleep(0)
            with suppress(EngineStoppedError):
                supervisor.send(add("c"))
                is_sent = True
        assert await free_blocks_after("c", reports) == NUM_BLOCKS
        assert psutil.pid_exists(ready.pid)
        keeping.cancel()


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the whole process's")
async def test_the_worker_listens_on_loopback_only_and_computes_nicer_than_it_listens() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    async with watched() as (_, ready, _):
        process = psutil.Process(ready.pid)
        assert {connection.laddr.ip for connection in process.net_connections()} == {"127.0.0.1"}
        threads = [thread.id for thread in process.threads()]
        niceness = {tid: os.getpriority(os.PRIO_PROCESS, tid) - ours for tid in threads}
        assert niceness.pop(ready.pid) == 10
        assert list(niceness.values()) == [0, 0, 0]


@pytest.mark.e2e
async def test_a_worker_that_does_not_answer_is_given_up_and_killed() -> None:
    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    async with watched(when_lost=stop, ready_again_s=0.2) as (supervisor, _, _):
        supervisor.send(add("bad", num_prompt=0))
        with pytest.raises(EngineStoppedError, match="alive, but cannot be reached"):
            await supervisor.keep()
        await supervisor.end()  # ending twice is ending once


@pytest.mark.e2e
async def test_a_worker_that_has_died_is_not_looked_for() -> None:
    async with watched() as (supervisor, ready, _):
        os.kill(ready.pid, signal.SIGKILL)
        with pytest.raises(EngineStoppedError, match=r"process has ended .killed by SIGKILL."):
            await supervisor.keep()


REPORT = msgspec.structs.replace(EMPTY_REPORT, num_running=3, free_blocks=7)


class Ends:
    """Both ends of a connection: ours, and the streams of a made-up worker."""

    connection: WorkerConnection
    from_frontend: asyncio.StreamReader
    to_frontend: asyncio.StreamWriter

    def __init__(self) -> None:
        self.reports: asyncio.Queue[StepReport] = asyncio.Queue()
        self.lost: asyncio.Queue[None] = asyncio.Queue()
        self.accepted = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.from_frontend, self.to_frontend = reader, writer
        self.accepted.set()

    def connect(self) -> WorkerConnection:
        return WorkerConnection(
            "sesame",
            on_report=self.reports.put_nowait,
            on_lost=lambda: self.lost.put_nowait(None),
        )

    def send(self, *messages: FromWorker) -> None:
        self.to_frontend.write(b"".join(map(encode_frame, messages)))

    async def are_ended_by_us(self) -> bool:
        with suppress(ConnectionResetError):
            while await self.from_frontend.read(65536):
                pass
        return True


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    async with await asyncio.start_server(ends.accept, "127.0.0.1", 0) as server:
        transport, ends.connection = await asyncio.get_running_loop().create_connection(
            ends.connect, *server.sockets[0].getsockname()
        )
        await ends.accepted.wait()
        peer = transport.get_extra_info("socket")
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        yield ends
        ends.connection.close()
        assert await ends.are_ended_by_us()
        ends.to_frontend.close()
        with suppress(ConnectionError):
            await ends.to_frontend.wait_closed()


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
async def test_a_worker_that_breaks_the_protocol_loses_the_connection(
    ends: Ends, sent: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    ends.send(READY, REPORT)
    assert await ends.connection.ready == READY
    assert await ends.reports.get() == REPORT
    ends.to_frontend.write(sent)
    await ends.lost.get()
    assert await ends.are_ended_by_us()
    assert ends.reports.empty()
    assert ends.lost.empty(), "once"
    with pytest.raises(EngineStoppedError, match="lost its worker"):
        ends.connection.send(abort("a"))
    assert capsys.readouterr().err.count("connection to the worker") == 1


@pytest.mark.parametrize(
    ("sent", "error", "said"),
    [
        (REPORT, EngineStoppedError, "ended the connection"),
        (Failed(message="no such device"), EngineConfigError, "no such device"),
        (None, EngineStoppedError, "ended the connection"),
    ],
    ids=["report_first", "settings_that_cannot_work", "closed"],
)
async def test_an_end_before_ready_is_no_loss_but_a_failure_to_connect(
    ends: Ends,
    sent: FromWorker | None,
    error: type[Exception],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if sent is None:
        ends.to_frontend.close()
    else:
        ends.send(sent)
    with pytest.raises(error, match=said):
        await ends.connection.ready
    assert ends.lost.empty()
    assert ends.reports.empty()
    assert ("StepReport out of turn" in capsys.readouterr().err) == (sent is REPORT)
