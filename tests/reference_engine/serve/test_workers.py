"""Connections to a real worker, which hangs up, stops and dies, and to a made-up one."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import psutil
import pytest

from reference_engine.config import EngineConfig, EngineConfigError, StepCost
from reference_engine.faults import Faults
from reference_engine.protocol import FromWorker, Listening, Ready, StepReport, WorkerSettings
from reference_engine.serve.settings import WorkerAddress
from reference_engine.serve.supervisor import WORKER_MODULE, EngineStoppedError, SupervisedChild
from reference_engine.serve.workers import Connecting, WorkerConnection, config_of
from reference_engine.wire import MAX_FRAME_BYTES, Beats, Failed, Hello, encode_frame
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


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Watched:
    """A connection to the worker at this address, and what it reported."""

    def __init__(self, address: WorkerAddress, beats: Beats | None = None, tries: int = 2) -> None:
        self.ups: asyncio.Queue[Ready] = asyncio.Queue()
        self.reports: asyncio.Queue[StepReport] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.worker = WorkerConnection(
            address,
            Connecting(
                Hello(peer="frontend-0", secret="sesame"), beats or Beats(), [0.05] * tries, QUICK
            ),
            on_up=lambda _, ready: self.ups.put_nowait(ready),
            on_report=lambda _, report: self.reports.put_nowait(report),
            on_lost=self.lost.put_nowait,
        )


@asynccontextmanager
async def watched(beats: Beats | None = None) -> AsyncIterator[tuple[SupervisedChild, Watched]]:
    """A real worker, and a connection to it. `beats`: how long it may be silent."""
    child = SupervisedChild("worker", WORKER_MODULE, exit_s=0.5)
    settings = WorkerSettings(config=QUICK, faults=Faults(), secret="sesame")
    try:
        listening = msgspec.json.decode(await child.start(settings), type=Listening)
        watched = Watched(WorkerAddress(host="127.0.0.1", port=listening.port), beats)
        await watched.worker.connect()
        yield child, watched
    finally:
        watched.worker.close()
        await child.end()
        assert not psutil.pid_exists(child.pid)


async def free_blocks_after(request_id: str, reports: asyncio.Queue[StepReport]) -> int:
    while True:
        report = await reports.get()
        for output in report.outputs:
            if output.request_id == request_id and output.ending is not None:
                return report.free_blocks


@pytest.mark.e2e
async def test_a_broken_connection_is_renewed_and_the_worker_is_the_same() -> None:
    async with watched() as (child, seen):
        keeping = asyncio.create_task(seen.worker.keep())
        seen.worker.send(add("a", max_tokens=3000))
        await seen.reports.get()
        seen.worker.send(add("bad", num_prompt=0))  # for which the worker hangs up
        assert await seen.lost.get() == "worker-0"
        with pytest.raises(ConnectionError):
            seen.worker.send(add("b"))
        first, again = await seen.ups.get(), await seen.ups.get()
        assert first == again
        while not seen.reports.empty():
            seen.reports.get_nowait()
        seen.worker.send(add("c"))
        assert await free_blocks_after("c", seen.reports) == NUM_BLOCKS
        assert child.status is None
        keeping.cancel()


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the whole process's")
async def test_the_worker_listens_on_loopback_only_and_computes_nicer_than_it_listens() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    async with watched() as (child, _):
        process = psutil.Process(child.pid)
        assert {connection.laddr.ip for connection in process.net_connections()} == {"127.0.0.1"}
        threads = [thread.id for thread in process.threads()]
        niceness = {tid: os.getpriority(os.PRIO_PROCESS, tid) - ours for tid in threads}
        assert niceness.pop(child.pid) == min(10, 19 - ours)
        assert set(niceness.values()) == {0}


@pytest.mark.e2e
async def test_a_worker_that_does_not_answer_is_given_up_and_killed() -> None:
    async with watched(Beats(0.05, 0.3)) as (child, seen):
        child.signal(signal.SIGSTOP)
        with pytest.raises(EngineStoppedError, match="alive, but cannot be reached"):
            await seen.worker.keep()
        await child.end()  # ending twice is ending once


@pytest.mark.e2e
async def test_a_child_says_how_it_died() -> None:
    async with watched() as (child, _):
        child.signal(signal.SIGKILL)
        assert "worker process has ended (killed by SIGKILL)" in str(await child.died())


REPORT = msgspec.structs.replace(EMPTY_REPORT, num_running=3, free_blocks=7)


class Ends(Watched):
    """Both ends of a connection: ours, and the streams of a made-up worker."""

    from_frontend: asyncio.StreamReader
    to_frontend: asyncio.StreamWriter

    def __init__(self, address: WorkerAddress, accepted: "asyncio.Queue[Streams]") -> None:
        super().__init__(address)
        self._accepted = accepted
        self.connecting = asyncio.create_task(self.worker.connect())

    async def accept(self) -> None:
        self.from_frontend, self.to_frontend = await self._accepted.get()

    def send(self, *messages: FromWorker) -> None:
        self.to_frontend.write(b"".join(map(encode_frame, messages)))

    async def are_ended_by_us(self) -> bool:
        with suppress(ConnectionResetError):
            while await self.from_frontend.read(65536):
                pass
        return True


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    accepted: asyncio.Queue[Streams] = asyncio.Queue()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait((reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        ends = Ends(WorkerAddress(host=host, port=port), accepted)
        await ends.accept()
        yield ends
        ends.worker.close()
        ends.connecting.cancel()
        await asyncio.gather(ends.connecting, return_exceptions=True)
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
    assert await ends.connecting == READY
    assert await ends.reports.get() == REPORT
    ends.to_frontend.write(sent)
    await ends.lost.get()
    assert await ends.are_ended_by_us()
    assert ends.reports.empty()
    assert ends.lost.empty(), "once"
    with pytest.raises(ConnectionError):
        ends.worker.send(abort("a"))
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
        await ends.connecting
    assert ends.lost.empty()
    assert ends.reports.empty()
    assert ("StepReport: out of turn" in capsys.readouterr().err) == (sent is REPORT)


async def test_a_worker_that_serves_another_model_is_refused(
    ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = msgspec.structs.replace(QUICK, model="8b", num_blocks=9000, seed=7)
    ends.send(msgspec.structs.replace(READY, config=theirs), REPORT)
    ours = f"--model tiny --num-blocks {NUM_BLOCKS}"
    why = f"worker-0 at .* serves with --model 8b --num-blocks 9000, and this frontend has {ours}: "
    with pytest.raises(EngineConfigError, match=why):
        await ends.connecting
    assert ends.ups.empty()
    assert ends.reports.empty()
    assert capsys.readouterr().err == ""


def ready_as(worker: str, **changes: Any) -> Ready:
    config = msgspec.structs.replace(QUICK, **changes)
    return msgspec.structs.replace(READY, worker=worker, config=config)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_blocks": NUM_BLOCKS},
        {"device": "auto", "runner": "simulated", "step_cost": StepCost(fixed_s=0.001)},
    ],
)
def test_frontends_alone_have_their_workers_settings(given: dict[str, Any]) -> None:
    readies = [ready_as("x", watermark=0.2, seed=7), ready_as("y")]
    assert config_of(readies, given) == readies[0].config
    assert config_of([READY], given) == EngineConfig(**{"device": "cpu", **given})


@pytest.mark.parametrize(
    ("given", "changes", "why"),
    [
        (
            {"num_blocks": 9000, "model": "tiny"},
            {},
            f"x serves with --num-blocks {NUM_BLOCKS}, and this frontend was given --num-blocks "
            "9000: give both the same",
        ),
        (
            {"compile": True, "step_cost": StepCost(fixed_s=0.002)},
            {},
            "x serves with --no-compile --sim-fixed-ms 1 .*was given --compile --sim-fixed-ms 2 ",
        ),
        (
            {},
            {"num_blocks": 9000},
            f"y serves with --num-blocks 9000, and x with --num-blocks {NUM_BLOCKS}: give both",
        ),
    ],
)
def test_what_was_given_and_differs_is_refused(
    given: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineConfigError, match=why):
        config_of([ready_as("x"), ready_as("y", **changes)], given)


async def test_a_worker_that_is_not_there_yet_is_waited_for_which_is_said_once(
    ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    ends.to_frontend.close()
    starting = asyncio.create_task(ends.worker.start(is_patient=True))
    for _ in range(2):
        await ends.accept()
        ends.to_frontend.close()
    await ends.accept()
    ends.send(READY)
    assert await starting == READY
    assert capsys.readouterr().err.count("waiting for a worker at") == 1
