"""Handlers in the worker's place: what they are asked, and what is reported of their answers."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_engine.config import EngineConfig
from reference_engine.context import CancelReason, Context, Signal
from reference_engine.core.request import FinishReason, Sampling
from reference_engine.dynamo.serving import Handler
from reference_engine.model.tokenizer import WordTokenizer
from reference_engine.protocol import AbortRequest, AddRequest, Output, Ready, StepReport
from reference_engine.serve.handlers import HandlerWorker
from reference_engine.serve.supervisor import EngineStoppedError
from reference_engine.wire import LearnedBy
from tests.reference_engine.dynamo.lab import PATH, Lab, lab, until
from tests.reference_engine.running_engine import RunningEngine

TOKENIZER = WordTokenizer(300)
WORDS = [TOKENIZER.text_of(token_id) for token_id in range(260, 270)]


class Frontend:
    """All that a link hears of the worker."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.events: list[str] = []
        self.failures: list[tuple[str, int, str]] = []
        self.num_running = 0

    def up(self, worker: HandlerWorker, ready: Ready) -> None:
        self.ready = ready

    def take_in(self, worker: str, report: StepReport) -> None:
        assert worker == report.worker == "handlers"
        self.outputs += report.outputs
        self.events += [event.event for event in report.events]
        self.num_running = report.num_running

    def fail(self, request_id: str, why: EngineStoppedError) -> None:
        self.failures.append((request_id, why.status, str(why)))

    @property
    def answer(self) -> tuple[str, int, FinishReason | None]:
        text = "".join(output.text for output in self.outputs)
        last = self.outputs[-1]
        return text, last.num_generated, last.finish_reason


@asynccontextmanager
async def served(
    folder: Path, *handlers: Handler
) -> AsyncIterator[tuple[Lab, HandlerWorker, Frontend]]:
    async with lab(folder) as here:
        await here.client(*handlers)
        frontend = Frontend()
        worker = HandlerWorker(
            here.caller,
            PATH,
            EngineConfig(),
            TOKENIZER,
            on_up=frontend.up,
            on_report=frontend.take_in,
            on_failed=frontend.fail,
        )
        assert await worker.start(is_patient=False) is frontend.ready
        yield here, worker, frontend


def add(number: int = 0, max_tokens: int = 5, **sampling: Any) -> AddRequest:
    return AddRequest(
        request_id=f"req-1-{number}",
        parent_id="req-1",
        prompt_token_ids=[7, 8],
        sampling=Sampling(max_tokens=max_tokens, **sampling),
    )


async def counting(request: Any, context: Context) -> AsyncGenerator[Any, None]:
    """As many tokens as were asked for, as Dynamo's workers do it."""
    for number in range(request["stop_conditions"]["max_tokens"]):
        yield {"token_ids": [260 + number], "index": 0}
    yield {"token_ids": [], "finish_reason": "length"}


async def endless(request: Any, context: Context) -> AsyncGenerator[Any, None]:
    while True:
        yield {"token_ids": [260, 261]}


async def brief(request: Any) -> AsyncGenerator[Any, None]:
    yield {"token_ids": [260], "text": "ab", "finish_reason": "stop"}


async def silent(request: Any) -> AsyncGenerator[Any, None]:
    return
    yield


@pytest.mark.parametrize(
    ("handler", "sampling", "answer", "is_told"),
    [
        (counting, {}, ("".join(WORDS[:5]), 5, FinishReason.LENGTH), False),
        (endless, {"stop": (WORDS[1],)}, (WORDS[0], 2, FinishReason.STOP), True),
        (endless, {}, ("".join([*WORDS[:2] * 2, WORDS[0]]), 5, FinishReason.LENGTH), True),
        (brief, {}, ("ab", 1, FinishReason.STOP), False),
        (silent, {}, ("", 0, FinishReason.STOP), False),
    ],
)
def test_an_answer_ends_by_its_handler_or_by_what_was_asked_for(
    handler: Handler, sampling: Any, answer: Any, is_told: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        async with served(tmp_path, handler) as (here, worker, frontend):
            worker.send(add(**sampling))
            await until(lambda: "finished" in frontend.events)
            assert frontend.answer == answer
            first = ["first_token"] if answer[1] else []
            ends = ["removed", "finished", "blocks_freed"]
            assert frontend.events == ["admitted", *first, *ends]
            assert frontend.num_running == 0
            assert here.served[0].cancellations.total() == is_told

    asyncio.run(main())


@pytest.mark.parametrize("signal", Signal)
def test_an_abort_ends_the_answer_at_once_and_the_slot_when_the_handler_ends(
    signal: Signal, tmp_path: Path
) -> None:
    seen: list[Any] = []

    async def main() -> None:
        may_end = asyncio.Event()

        async def slow(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            seen.append(request)
            yield {"token_ids": [260]}
            await context.stopped()
            seen.append((context.id(), context.signal, context.cancellation))
            await may_end.wait()

        async with served(tmp_path, slow) as (here, worker, frontend):
            for number in range(2):
                worker.send(add(number))
            await until(lambda: len(frontend.outputs) == 2)
            reason = CancelReason.USER_DISCONNECT
            worker.send(AbortRequest(request_id="req-1", reason=reason, signal=signal))
            await until(lambda: len(frontend.outputs) == 4)
            reasons = [output.finish_reason for output in frontend.outputs]
            assert reasons == [None, None, FinishReason.ABORT, FinishReason.ABORT]
            assert frontend.num_running == 2
            assert "blocks_freed" not in frontend.events
            may_end.set()
            await until(lambda: frontend.events.count("finished") == 2)
            assert here.served[0].cancellations.total() == 2
        asked, _, first, second = seen
        assert (asked["token_ids"], asked["stop_conditions"]["max_tokens"]) == ([7, 8], 5)
        assert {first[0], second[0]} == {"req-1-0", "req-1-1"}
        assert (first[1], first[2].reason) == (signal, reason)

    asyncio.run(main())


def test_a_handlers_mistake_is_its_requests_and_a_dead_one_is_replaced_before_the_first_token(
    tmp_path: Path,
) -> None:
    async def mistaken(request: Any) -> AsyncGenerator[Any, None]:
        if request["stop_conditions"]["max_tokens"] == 1:
            raise RuntimeError("a mistake")
        yield ["no dict"]

    async def main() -> None:
        async with served(tmp_path, mistaken) as (_, worker, frontend):
            worker.send(add(0, max_tokens=1))
            await until(lambda: len(frontend.failures) == 1)
            worker.send(add(1))
            await until(lambda: len(frontend.failures) == 2)
            assert frontend.failures[0] == (
                "req-1-0",
                500,
                "the handler failed: RuntimeError: a mistake",
            )
            assert "not a dict with token_ids" in frontend.failures[1][2]

    async def with_two() -> None:
        started = asyncio.Event()

        async def dies(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            started.set()
            await context.killed()
            yield

        async with served(tmp_path, dies) as (here, worker, frontend):
            worker.send(add())
            await started.wait()
            await here.client(counting)
            await until(lambda: len(worker.client.instance_ids()) == 2)
            here.caller.links.close()
            await until(lambda: "finished" in frontend.events)
            assert frontend.answer == ("".join(WORDS[:5]), 5, FinishReason.LENGTH)
            assert not frontend.failures

    asyncio.run(main())
    asyncio.run(with_two())


@pytest.mark.e2e
def test_a_client_that_leaves_over_http_reaches_the_handler_and_a_mistake_reaches_its_client(
    tmp_path: Path,
) -> None:
    async def handler(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        if request["stop_conditions"]["max_tokens"] == 1:
            raise RuntimeError("a mistake")
        yield {"token_ids": [260]}
        await context.killed()

    async def main() -> None:
        folder = tmp_path / "walkaway"
        folder.mkdir()
        async with lab(folder) as here:
            await here.client(handler)
            flags = ("--handler-endpoint", PATH)
            env = {**os.environ, "DYN_FILE_KV": str(tmp_path)}
            engine = await asyncio.to_thread(RunningEngine, *flags, env=env)
            body, name = {"model": "tiny", "prompt": "hi"}, {"x-request-id": "mine"}
            async with httpx.AsyncClient(base_url=engine.url) as http:
                asked = {**body, "stream": True}
                async with http.stream("POST", "/v1/completions", json=asked, headers=name) as it:
                    await anext(it.aiter_lines())
                await asyncio.to_thread(engine.wait_for, "finished", "mine")
                assert here.served[0].cancellations == {LearnedBy.CONTROL_MESSAGE: 1}
                order = await asyncio.to_thread(engine.order, "mine")
                assert order[3:6] == ["disconnected", "abort_sent", "abort_received"]
                mistake = await http.post("/v1/completions", json={**body, "max_tokens": 1})
                assert mistake.status_code == 500
                assert "RuntimeError: a mistake" in mistake.text
                metrics = (await http.get("/metrics")).text
            labels = 'model="tiny",endpoint="completions",request_type="stream"'
            assert f"dynamo_frontend_model_cancellation_total{{{labels}}} 1" in metrics
            assert await asyncio.to_thread(engine.stop) == 0

    asyncio.run(main())
