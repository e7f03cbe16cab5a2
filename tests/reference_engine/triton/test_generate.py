"""The engine behind gRPC, as a process: Triton's clients as they are, and 1,000 cancels."""

import asyncio
import json
import math
import queue
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc.aio
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.reference_engine.running_engine import RunningEngine, raw_request, running
from tests.reference_engine.triton.served_repository import tensor

pytestmark = pytest.mark.e2e

STEP_MS = 10
FLAGS = ("--runner", "simulated", "--sim-fixed-ms", str(STEP_MS), "--kserve-port", "0")
SOON = ("--heartbeat-s", "0.5", "--ack-timeout-s", "2")
LONG: dict[str, Any] = {"ignore_eos": True}
FREED = ["disconnected", "abort_sent", "abort_received", "removed", "blocks_freed", "finished"]


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running(*FLAGS, *SOON) as engine:
        yield engine


def inputs(text: bytes = b"hello", max_tokens: int = 3000) -> list[InferInput]:
    wanted = tensor("max_tokens", np.array([max_tokens], np.int32))
    return [tensor("text_input", np.array([text], np.object_)), wanted]


class Stream:
    """The callback client with one stream; its answers in the order in which they come."""

    def __init__(self, engine: RunningEngine, **options: Any) -> None:
        channel = [("grpc.use_local_subchannel_pool", 1)]
        self.client = InferenceServerClient(engine.kserve_url, channel_args=channel)
        self.answers: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put(error or result), **options)

    def ask(self, request_id: str, given: list[InferInput] | None = None, **options: Any) -> None:
        self.client.async_stream_infer(
            "generate", inputs() if given is None else given, request_id=request_id, **options
        )

    def texts(self, number: int) -> list[bytes]:
        return [self.answers.get().as_numpy("text_output").item() for _ in range(number)]


def test_the_callback_client_gets_a_response_a_token_and_the_engine_logs_it(
    engine: RunningEngine,
) -> None:
    stream = Stream(engine)
    stream.ask("grpc-1", inputs(max_tokens=5), enable_empty_final_response=True, parameters=LONG)
    stream.client.stop_stream()  # it half-closes, which cancels nothing
    texts = stream.texts(5)
    last = stream.answers.get().get_response()
    stream.client.close()
    assert all(texts)
    assert last.id == "grpc-1"
    assert last.parameters["triton_final_response"].bool_param
    assert engine.order("grpc-1")[:3] == ["arrived", "admitted", "first_token"]
    assert engine.wait_for("finished", "grpc-1")["reason"] == "length"
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body).json()
    assert b"".join(texts).decode() == answer["choices"][0]["text"]


def test_one_cancel_ends_both_requests_of_a_stream_with_one_error(engine: RunningEngine) -> None:
    stream = Stream(engine)
    for name in ("both-1", "both-2"):
        stream.ask(name, parameters=LONG)
        engine.wait_for("first_token", name)
    stream.client.stop_stream(cancel_requests=True)
    for name in ("both-1", "both-2"):
        assert engine.wait_for("finished", name)["reason"] == "abort"
        assert engine.order(name)[3:] == FREED
    errors = [one for one in stream.answers.queue if isinstance(one, InferenceServerException)]
    assert [error.status() for error in errors] == ["StatusCode.CANCELLED"]
    assert engine.metric("walkaway_engine_cancellations_total", method="grpc") >= 2


def test_an_error_that_ends_its_stream_ends_the_other_requests_as_cancelled(
    engine: RunningEngine,
) -> None:
    stream = Stream(engine, headers={"triton_grpc_error": "true"})
    stream.ask("beside", parameters=LONG)
    stream.texts(1)
    for _ in range(2):
        stream.ask("wrong", inputs()[:1])
    while not isinstance(error := stream.answers.get(), InferenceServerException):
        pass
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert engine.wait_for("abort_received", "beside")["reason"] == "api"
    assert "disconnected" not in engine.order("beside")


def test_a_deadline_and_a_closed_channel_end_the_request(engine: RunningEngine) -> None:
    late = Stream(engine, stream_timeout=1.0)
    late.ask("late", parameters=LONG)
    closed = Stream(engine)
    closed.ask("closed", parameters=LONG)
    closed.texts(1)
    closed.client._client_stub = None
    closed.client._channel.close()
    assert engine.wait_for("finished", "late")["reason"] == "abort"
    assert engine.wait_for("finished", "closed")["reason"] == "abort"
    assert engine.wait_for("disconnected", "late")["reason"] == "client_timeout"
    assert engine.wait_for("disconnected", "closed")["reason"] == "user_disconnect"


CLIENT = """
import sys
from tests.reference_engine.triton.test_generate import LONG, Stream
engine = type("Engine", (), {"kserve_url": sys.argv[1]})
stream = Stream(engine)
stream.ask(sys.argv[2], parameters=LONG)
stream.texts(2)
print("reading", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_is_killed_or_answers_no_ping_ends_its_request(
    engine: RunningEngine, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", CLIENT, engine.kserve_url, number.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"reading\n"
        client.send_signal(number)
        assert engine.wait_for("finished", number.name)["reason"] == "abort"
        client.kill()
    assert engine.order(number.name)[3:] == FREED


def test_a_cancel_over_http_reaches_a_grpc_client_as_its_status(engine: RunningEngine) -> None:
    stream = Stream(engine, headers={"triton_grpc_error": "true"})
    stream.ask("by-api", parameters=LONG)
    stream.texts(1)
    httpx.post(f"{engine.url}/v1/requests/by-api/cancel")
    while not isinstance(error := stream.answers.get(), InferenceServerException):
        pass
    assert error.status() == "StatusCode.CANCELLED"
    assert "was ended early: it was cancelled" in error.message()


@pytest.mark.parametrize(("given", "options", "message"), [
    (inputs(max_tokens=0), {}, "Expected `int` >= 1"),
    (inputs(max_tokens=5000), {}, "context holds 4096 tokens"),
    (inputs(b""), {}, "must not be empty"),
    (inputs(b"\xff"), {}, "input 'text_input': not UTF-8"),
    (inputs()[:1], {}, "misses the required input(s) ['max_tokens']"),
    (inputs(), {"parameters": {"tempo": 1}}, "parameter 'tempo': model 'generate' knows only"),
    (inputs(), {"parameters": {"temperature": 9.0}}, "Expected `float` <= 2.0"),
    (inputs(), {"parameters": {"temperature": math.nan}}, "'temperature': nan is no number"),
    (inputs(), {"sequence_id": 7}, "has no sequences"),
    (inputs(), {"request_id": "a b"}, "id: at most 256 visible ASCII characters"),
    (inputs(), {"request_id": "req-7"}, "names requests req- and a number"),
])  # fmt: skip
def test_a_wrong_request_is_refused_and_its_stream_goes_on(
    engine: RunningEngine, given: list[InferInput], options: dict[str, Any], message: str
) -> None:
    stream = Stream(engine)
    stream.client.async_stream_infer("generate", given, **{"request_id": "wrong", **options})
    assert message in stream.answers.get().message()
    stream.ask("", inputs(max_tokens=1), parameters=LONG)
    assert stream.texts(1)
    stream.client.close()


def test_without_an_engine_generation_is_refused_over_http_and_grpc() -> None:
    with running("--runner", "none", "--kserve-port", "0") as engine:
        answer = httpx.post(f"{engine.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
        with InferenceServerClient(engine.kserve_url) as client:
            assert client.is_server_ready()
            assert not client.is_model_ready("generate")
        children = psutil.Process(engine.process.pid).children()
    assert answer.status_code == 503
    assert "has no engine (--runner none)" in answer.json()["error"]["message"]
    assert not children


class Crowd:
    """Clients of both protocols that leave at a random moment; `left` has their stamps."""

    def __init__(self, engine: RunningEngine, seed: int) -> None:
        self._engine = engine
        self._random = Random(seed)
        self._client: Any = None
        self.left: dict[str, int] = {}

    async def run(self, number: int, at_once: int) -> None:
        self._client = tritonclient.grpc.aio.InferenceServerClient(self._engine.kserve_url)
        room = asyncio.Semaphore(at_once)

        async def one(name: str, stay_s: float, leave: Any) -> None:
            async with room:
                await leave(name, stay_s)

        async with asyncio.TaskGroup() as group:
            for index in range(number):
                leave = self._random.choice([self._cancel, self._pass_deadline, self._close_http])
                stay_s = self._random.uniform(0.0, 0.3)
                group.create_task(one(f"{leave.__name__}-{number}-{index}", stay_s, leave))
        await self._client.close()

    async def _requests(self, name: str, gone: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "generate", "inputs": inputs(), "request_id": name, "parameters": LONG}
        await gone.wait()  # or it would half-close

    async def _cancel(self, name: str, stay_s: float) -> None:
        gone = asyncio.Event()
        stream = self._client.stream_infer(self._requests(name, gone))
        reading = asyncio.create_task(self._read(stream))
        await asyncio.wait([reading], timeout=stay_s)
        self.left[name] = time.perf_counter_ns()
        stream.cancel()
        gone.set()
        await asyncio.gather(reading, return_exceptions=True)

    async def _pass_deadline(self, name: str, stay_s: float) -> None:
        gone = asyncio.Event()
        requests = self._requests(name, gone)
        stream = self._client.stream_infer(requests, stream_timeout=stay_s + 0.01)
        await asyncio.gather(self._read(stream), return_exceptions=True)
        gone.set()

    async def _close_http(self, name: str, stay_s: float) -> None:
        reader, writer = await asyncio.open_connection(*self._engine.address)
        writer.write(raw_request(name, stream=True))
        await asyncio.wait([reading := asyncio.create_task(reader.read())], timeout=stay_s)
        self.left[name] = time.perf_counter_ns()
        writer.transport.abort()
        await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, stream: Any) -> None:
        async for _ in stream:
            pass


@pytest.mark.slow
def test_1000_random_cancels_leave_nothing_and_free_their_slots_within_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running(*FLAGS, "--max-num-seqs", "16") as engine:
        frontend = psutil.Process(engine.process.pid)
        asyncio.run(Crowd(engine, seed=0).run(50, at_once=24))
        free, open_fds = idle(engine), frontend.num_fds()
        crowd = Crowd(engine, seed=1)
        asyncio.run(crowd.run(1000, at_once=24))
        assert idle(engine) == free
        assert frontend.num_fds() <= open_fds + 4
        log = engine.events()
        lines = httpx.get(f"{engine.url}/walkaway/steps", params={"limit": 10_000}).text
    names = {
        kind: [one["client_request_id"] for one in log if one["event"] == kind]
        for kind in ("arrived", "finished")
    }
    assert sorted(names["finished"]) == sorted(names["arrived"])
    assert {one["reason"] for one in log if one["event"] == "finished"} == {"abort"}
    steps = {one["step"]: one for one in map(json.loads, lines.splitlines())}
    freed = {one["client_request_id"]: one for one in log if one["event"] == "blocks_freed"}
    for kind in ("_cancel", "_close_http"):
        latency, beyond = [], []
        for name in crowd.left.keys() & freed.keys():
            if name.startswith(kind):
                step = steps[freed[name]["step"] - 1]
                latency.append((freed[name]["t_ns"] - crowd.left[name]) / 1e6)
                beyond.append(latency[-1] - (step["ended_ns"] - step["started_ns"]) / 1e6)
        with capsys.disabled():
            sys.stdout.write(
                f"{kind}: {len(latency)} cancels, p50 {np.percentile(latency, 50):.2f} ms, "
                f"p99 {np.percentile(latency, 99):.2f} ms; beyond the step that had to end: "
                f"p50 {np.percentile(beyond, 50):.2f} ms, p99 {np.percentile(beyond, 99):.2f} ms\n"
            )
        assert np.percentile(beyond, 50) < 0, "most wait for less than one step"


def idle(engine: RunningEngine) -> float:
    """The free blocks, once nothing runs or waits."""
    while engine.metric("vllm:num_requests_running") + engine.metric("vllm:num_requests_waiting"):
        pass
    return engine.metric("vllm:kv_cache_usage_perc")
