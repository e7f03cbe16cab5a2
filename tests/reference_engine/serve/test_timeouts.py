"""Waits with a bound: they end as asyncio.timeout's do, and short waits cost no timer."""

import asyncio
from typing import Any

import pytest

from reference_engine.serve.detection import Patience, RanOutError
from tests.reference_engine.fake_worker import AsgiClient, FakeWorker, output, respond
from tests.reference_engine.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.anyio


class CountingLoop(VirtualTimeLoop):
    num_timers = 0

    def call_at(self, *args: Any, **more: Any) -> Any:  # type: ignore[override]
        self.num_timers += 1
        return super().call_at(*args, **more)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": CountingLoop}


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_wait_ends_after_the_time_whenever_it_began() -> None:
    patience = Patience(4.0)
    with patience:
        await asyncio.sleep(1)
    await asyncio.sleep(2)
    with pytest.raises(RanOutError), patience:
        await asyncio.sleep(1000)
    assert now() == pytest.approx(7.0)
    with pytest.raises(RanOutError), patience:
        await asyncio.sleep(1000)
    assert now() == pytest.approx(11.0)


async def test_short_waits_never_add_up() -> None:
    patience = Patience(4.0)
    for _ in range(10):
        with patience:
            await asyncio.sleep(3)
    patience.stop()


async def test_no_patience_is_no_bound() -> None:
    with Patience(0.0):
        await asyncio.sleep(1000)


async def test_a_wait_with_progress_goes_on() -> None:
    taken, seen = 0, 0

    def goes_on() -> bool:
        nonlocal seen
        has_more, seen = taken > seen, taken
        return has_more

    async def wait() -> None:
        with Patience(4.0, goes_on):
            await asyncio.sleep(1000)

    waiting = asyncio.create_task(wait())
    for _ in range(10):
        await asyncio.sleep(3)
        taken += 1
    with pytest.raises(RanOutError):
        await waiting
    assert 34.0 <= now() <= 35.0


async def test_being_cancelled_by_others_is_not_running_out() -> None:
    async def wait() -> None:
        with Patience(4.0):
            await asyncio.sleep(1000)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_being_cancelled_by_others_at_the_same_time_goes_first() -> None:
    async def wait() -> None:
        with Patience(4.0):
            await asyncio.sleep(1000)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(4.0, waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_token_costs_no_timer() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CountingLoop)
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await worker.arrived.wait()
    before = loop.num_timers
    for number in range(1, 201):
        worker.say(output(" word", number))
        client.got_text.clear()
        await client.got_text.wait()
    assert loop.num_timers - before <= 2
    worker.say(output("", 200, "stop"))
    await client.finished()
