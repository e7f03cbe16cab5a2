"""1,000 clients leave at random moments, streamed and not, by FIN and by RST: none is lost.

Each waits until the engine's own log says that its request has come as far as its plan has it
(queued, admitted, some tokens), then leaves. Afterwards every count must be exactly 1,000, every id
accounted for, and the engine as empty as before.
"""

import asyncio
import json
import socket
import struct
from collections import Counter, defaultdict
from contextlib import closing, suppress
from random import Random
from typing import NamedTuple
from zlib import crc32

import pytest

from tests.reference_engine.running_engine import RunningEngine, raw_request, running

pytestmark = pytest.mark.e2e

ABANDONS = 1000
SURVIVORS = 40
CLIENTS = 48
SIMULATED = ("--runner", "simulated", "--sim-fixed-ms", "1", "--sim-prefill-token-ms", "0.01")
COMPILED = ("--device", "cpu", "--compile")  # the first start compiles, for a minute
SIZES = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--num-blocks", "1024")
RESET = struct.pack("ii", 1, 0)  # linger for no time: closing sends RST


class Plan(NamedTuple):
    """Leave once `event` is in the log and, of a stream, `tokens` have been read."""

    name: str
    event: str
    tokens: int
    is_streamed: bool
    is_reset: bool


def make_plan(number: int, random: Random, *further: str) -> Plan:
    is_streamed = random.random() < 0.6
    event = random.choice(["arrived", "arrived", "admitted", "admitted", "first_token", *further])
    tokens = random.randrange(1, 20) if is_streamed and event == "first_token" else 0
    return Plan(f"left-{number}", event, tokens, is_streamed, random.random() < 0.5)


class Log:
    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._events: dict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)

    async def wait_for(self, name: str, event: str) -> None:
        await self._events[name, event].wait()

    async def follow(self) -> None:
        after = 0
        while True:
            reader, writer = await asyncio.open_connection(*self._address)
            query = (
                f"GET /walkaway/lifecycle?after={after} HTTP/1.1\r\nhost: x\r\nconnection: close"
            )
            with closing(writer):
                writer.write(query.encode() + b"\r\n\r\n")
                head, _, lines = (await reader.read()).partition(b"\r\n\r\n")
            for line in lines.splitlines():
                entry = json.loads(line)
                self._events[entry["client_request_id"], entry["event"]].set()
            after = int(head.lower().split(b"x-walkaway-next-after: ")[1].split(b"\r\n")[0])


def request_bytes(name: str, **fields: int) -> bytes:
    word = 3 + crc32(name.encode()) % 2000  # no two prompts alike, or the cache would answer them
    return raw_request(name, prompt=[word] * 300, **fields)


async def abandon(plan: Plan, log: Log, address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request_bytes(plan.name, stream=plan.is_streamed))
    await log.wait_for(plan.name, plan.event)
    seen = 0
    while seen < plan.tokens:
        seen += (await reader.readuntil(b"\n\n")).count(b'"text"')
    if plan.is_reset:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()


async def stay(name: str, address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request_bytes(name, stream=True, max_tokens=8))
    answer = await reader.readuntil(b"data: [DONE]")
    assert answer.count(b'"text"') >= 8
    writer.close()


async def all_clients(address: tuple[str, int], plans: list[Plan]) -> None:
    log = Log(*address)
    places = asyncio.Semaphore(CLIENTS)

    async def take_turn(number: int) -> None:
        async with places:
            if number < len(plans):
                await abandon(plans[number], log, address)
            else:
                await stay(f"stayed-{number}", address)

    turns = list(range(len(plans) + SURVIVORS))
    Random(5).shuffle(turns)
    following = asyncio.create_task(log.follow())
    await asyncio.gather(*map(take_turn, turns))
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


def all_events(engine: RunningEngine) -> list[dict[str, object]]:
    events = engine.events()
    while page := engine.events(after=len(events)):
        events += page
    return events


@pytest.mark.parametrize(
    "runner",
    [
        SIMULATED,
        pytest.param(COMPILED, marks=[pytest.mark.table, pytest.mark.timeout(400)]),
    ],
)
def test_a_thousand_abandons_are_a_thousand_aborts(runner: tuple[str, ...]) -> None:
    random = Random(11)
    plans = [make_plan(number, random) for number in range(ABANDONS)]
    assert {plan.event for plan in plans} == {"arrived", "admitted", "first_token"}
    with running(*runner, *SIZES) as engine:
        host, port = engine.url.removeprefix("http://").split(":")
        asyncio.run(all_clients((host, int(port)), plans))
        while engine.metric("vllm:num_requests_running") + engine.metric(
            "vllm:num_requests_waiting"
        ):
            pass  # what was just left ends within a step or two; the test's own timeout bounds it
        finished = [event for event in all_events(engine) if event["event"] == "finished"]
        reasons = Counter(event["reason"] for event in finished)
        assert reasons == {"abort": ABANDONS, "length": SURVIVORS}
        aborted = [e["client_request_id"] for e in finished if e["reason"] == "abort"]
        assert sorted(map(str, aborted)) == sorted(plan.name for plan in plans), "each once"
        assert engine.metric("vllm:request_success_total", finished_reason="abort") == ABANDONS
        assert engine.metric("vllm:request_success_total", finished_reason="length") == SURVIVORS
        by_phase = [
            engine.metric("walkaway_engine_cancellations_total", phase=phase)
            for phase in ("waiting", "prefill", "decode")
        ]
        assert sum(by_phase) == ABANDONS
        assert min(by_phase) >= 50, f"every phase was met: {by_phase}"
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert engine.metric(f"vllm:{gauge}") == 0, gauge
