"""The supervisor and a real worker, which is made to hang up, to stop, and to die."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import psutil
import pytest

from reference_engine.faults import Faults
from reference_engine.protocol import Ready, StepReport
from reference_engine.serve.supervisor import EngineStoppedError, Patience, WorkerSupervisor
from tests.reference_engine.running_worker import NUM_BLOCKS, QUICK, add

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
            patience=Patience(before_tries=(0.05, 0.05), ready_again=ready_again_s, exit=0.5),
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
        with pytest.raises(EngineStoppedError, match="lives, but no connection"):
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
