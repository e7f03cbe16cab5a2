"""A live server's inputs, given again to a replica: its log says at which boundary it heard what.

A step's log says how many requests were running and waiting, and the lifecycle which had ended by
then. So the number of requests that came with each boundary is known, and their order is that in
which they arrived. An abort's event has the step before which it was applied.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from random import Random
from threading import Event
from typing import Any, NamedTuple

import httpx

from harness.simulate.replica import FRONTEND, Replica, StepLags, Stepped
from reference_engine.config import EngineConfig
from reference_engine.context import Cancellation, CancelReason, Context, DetectionMethod
from reference_engine.core.request import Sampling
from reference_engine.faults import Faults
from reference_engine.model.tokenizer import encode_bytes
from reference_engine.protocol import AddRequest
from reference_engine.worker.inbox import Added, CancelCommand
from tests.reference_engine.running_engine import RunningEngine, raw_request

NATURAL_ENDS = ("stop", "length")


class Asked(NamedTuple):
    prompt: str
    max_tokens: int


class Crowd:
    """Users who ask again and again, and leave after some tokens, or before the first."""

    def __init__(self, engine: RunningEngine, seed: int, users: int) -> None:
        self.asked: dict[str, Asked] = {}
        self._engine = engine
        self._random = Random(seed)
        self._users = users
        self._is_over = False

    async def run(self, steps: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for user in range(self._users):
                tasks.create_task(self._use(user))
            tasks.create_task(asyncio.to_thread(self._end_after, steps))

    def _end_after(self, steps: int) -> None:
        while self._engine.metric("walkaway_engine_steps_total") < steps:
            Event().wait(0.1)
        self._is_over = True

    async def _use(self, user: int) -> None:
        count = 0
        while not self._is_over:
            count += 1
            await self._ask(f"{user}-{count}")

    async def _ask(self, name: str) -> None:
        random = self._random
        shared = "the house rules say: " * 3
        prompt = random.choice(("", shared)) + f"{name} " + "x" * random.randint(1, 80)
        asked = self.asked[name] = Asked(prompt, random.randint(1, 120))
        leaves = random.choice((None, None, 0, random.randint(1, asked.max_tokens)))
        reader, writer = await asyncio.open_connection(*self._engine.address)
        request = raw_request(name, prompt=prompt, max_tokens=asked.max_tokens, stream=True)
        writer.write(request)
        if leaves is None:
            await reader.readuntil(b"[DONE]")
        else:
            await asyncio.sleep(random.random() * 0.01)
            num_read = 0
            while num_read < leaves and (line := await reader.readline()):
                num_read += line.startswith(b"data: ")
        writer.close()


class Log(NamedTuple):
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]


def log_of(engine: RunningEngine) -> Log:
    steps, after, last = list[dict[str, Any]](), 0, 1
    while after < last:
        answer = httpx.get(f"{engine.url}/walkaway/steps", params={"after": after})
        steps += map(json.loads, answer.text.splitlines())
        after = int(answer.headers["x-walkaway-next-after"])
        last = int(answer.headers["x-walkaway-last"])
    return Log(steps, engine.events())


class Replay:
    """`run` yields each step of the log with what the replica did in it."""

    def __init__(self, log: Log, asked: Mapping[str, Asked], config: EngineConfig) -> None:
        self._log = log
        self._asked = asked
        self._arrived = [one for one in log.events if one["event"] == "arrived"]
        self._arrived.sort(key=lambda one: int(one["request_id"].rpartition("-")[2]))
        self._num_added = 0
        self.replica = Replica(
            "worker-0", config, Faults(), lags=StepLags(), random=Random(0), start_ns=0
        )

    def run(self) -> Any:
        aborts, ends = self._aborts_by_step(), self._natural_ends_by_step()
        num_gone = 0
        for step in self._log.steps:
            aborted = aborts[step["step"]]
            num_gone += len(aborted)
            num_added = step["num_running"] + step["num_waiting"] + num_gone
            boundary_ns = step["started_ns"]
            for event in self._arrived[self._num_added : num_added]:
                self.replica.hear(boundary_ns, self._added(event))
            self._num_added = num_added
            for event in aborted:
                why = Cancellation(
                    CancelReason(event["reason"]), DetectionMethod.CONNECTION, boundary_ns
                )
                self.replica.hear(boundary_ns, CancelCommand(event["request_id"], why))
            yield step, self.replica.step(boundary_ns)
            num_gone += ends[step["step"]]

    def _added(self, event: dict[str, Any]) -> Added:
        name, asked = event["request_id"], self._asked[event["client_request_id"]]
        sampling = Sampling(max_tokens=asked.max_tokens, ignore_eos=True)
        request = AddRequest(
            request_id=name, prompt_token_ids=encode_bytes(asked.prompt), sampling=sampling
        )
        return Added(request, FRONTEND, Context(name))

    def _aborts_by_step(self) -> defaultdict[int, list[dict[str, Any]]]:
        found = defaultdict[int, list[dict[str, Any]]](list)
        for event in self._log.events:
            if event["event"] == "abort_received":
                found[event["step"]].append(event)
        return found

    def _natural_ends_by_step(self) -> defaultdict[int, int]:
        found = defaultdict[int, int](int)
        for event in self._log.events:
            if event["event"] == "removed" and event["reason"] in NATURAL_ENDS:
                found[event["step"]] += 1
        return found


def decisions_of(step: dict[str, Any]) -> dict[str, Any]:
    names = ("num_running", "num_waiting", "free_blocks", "scheduled", "sampled")
    return {name: step[name] for name in names}


def decided(stepped: Stepped) -> dict[str, Any]:
    record = stepped.record
    assert record is not None
    names = ("num_running", "num_waiting", "free_blocks", "scheduled", "sampled")
    return {name: getattr(record, name) for name in names}
