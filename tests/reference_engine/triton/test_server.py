"""The gRPC service with models of the test's own, and Triton's clients as they are."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import InferInput, InferRequestedOutput, service_pb2_grpc
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse
from tritonclient.utils import InferenceServerException

from reference_engine.config import FrontendSettings
from reference_engine.context import CancelReason, Context, DetectionMethod
from reference_engine.triton.model import invalid
from reference_engine.triton.server import MAX_MESSAGE_BYTES, InferenceService, grpc_server
from reference_engine.triton.tensors import read_inputs, write_output
from tests.reference_engine.triton.served_repository import request_of, tensor

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Real time: gRPC has threads and timers of its own."""
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
async def _one_loop(anyio_backend: str) -> None:
    """Keep one loop for all tests: gRPC's thread may still wake that of an earlier one."""


CONFIG = """
    input { name: "count" data_type: TYPE_INT32 dims: 1 }
    input { name: "size" data_type: TYPE_INT32 dims: 1 optional: true }
    output { name: "number" data_type: TYPE_INT32 dims: 1 }
    output { name: "text" data_type: TYPE_STRING dims: 1 }
    model_transaction_policy { decoupled: %s }
"""
USER_LEFT = (CancelReason.USER_DISCONNECT, DetectionMethod.GRPC)


class Counting:
    """Answers with `count` numbers; -1 is refused, -2 is a bug, 99 never ends."""

    is_ready = True
    versions: tuple[str, ...] = ("1",)

    def __init__(self, name: str, decoupled: str) -> None:
        self.name = name
        self.config = text_format.Parse(CONFIG % decoupled, ModelConfig(name=name))
        self.contexts: list[Context] = []
        self.begun = asyncio.Semaphore(0)
        self.ended = asyncio.Semaphore(0)

    async def infer(
        self, request: ModelInferRequest, context: Context
    ) -> AsyncGenerator[ModelInferResponse, None]:
        self.contexts.append(context)
        self.begun.release()
        inputs = read_inputs(request)
        count, text = inputs["count"].item(), b""
        if "size" in inputs:
            text = b"x" * inputs["size"].item()
        try:
            if count == -1:
                raise invalid("count is below 0")
            if count == -2:
                raise ZeroDivisionError
            for number in range(count):
                response = ModelInferResponse()
                write_output(response, "number", np.array([number], np.int32))
                write_output(response, "text", np.array([text], np.object_))
                yield response
            if count == 99:
                await asyncio.Event().wait()
        finally:
            self.ended.release()

    def why(self) -> list[tuple[CancelReason, DetectionMethod] | None]:
        given = [context.cancellation for context in self.contexts]
        return [None if one is None else (one.reason, one.method) for one in given]


class Served:
    def __init__(self) -> None:
        self.stream = Counting("stream", "true")
        self.unary = Counting("unary", "false")
        self.answering: set[Any] = set()
        self.url = ""

    @asynccontextmanager
    async def open(self, **settings: Any) -> AsyncIterator[InferenceServerClient]:
        service = InferenceService(
            {model.name: model for model in (self.stream, self.unary)},
            self.answering,
            stall_timeout_s=settings.get("stall_timeout_s", 10.0),
            is_allowed=settings.get("is_allowed", lambda _: True),
        )
        server = grpc_server(service, FrontendSettings())
        self.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        client = InferenceServerClient(self.url)
        try:
            yield client
        finally:
            await client.close()
            await server.stop(None)
        if self.answering:  # a handler that was cut off ends a few turns of the loop later
            await asyncio.wait(self.answering, timeout=5.0)
        assert not self.answering


def count(number: int, **size: int) -> list[InferInput]:
    given = {"count": number, **size}
    return [tensor(name, np.array([value], np.int32)) for name, value in given.items()]


def too_large() -> list[InferInput]:
    return [tensor("count", np.zeros(MAX_MESSAGE_BYTES, np.uint8))]


def on_stream(*requests: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """They are sent, and the client half-closes after the last."""

    async def each() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield {"model_name": "stream", **request}

    return each()


async def test_a_unary_answer_has_its_id_and_only_the_wanted_outputs() -> None:
    served = Served()
    async with served.open() as client:
        wanted = [InferRequestedOutput("text")]
        result = await client.infer("unary", count(1, size=3), request_id="r", outputs=wanted)
    assert served.unary.contexts[0].id() == "r"
    assert result.get_response().id == "r"
    assert result.get_response().model_version == "1"
    assert result.as_numpy("text").item() == b"xxx"
    assert result.as_numpy("number") is None


async def test_requests_of_one_stream_are_answered_side_by_side_and_an_error_is_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = Served()
    async with served.open() as client:
        requests: list[dict[str, Any]] = [
            {"inputs": count(2), "request_id": "a"},
            {"inputs": count(-1), "request_id": "b"},
            {"inputs": count(-2), "request_id": "c"},
            {"inputs": count(1), "request_id": "d"},
        ]
        answers: dict[str, list[Any]] = {}
        async for result, error in client.stream_infer(on_stream(*requests)):
            name = str(error) if error else result.get_response().id
            answers.setdefault(name, []).append(result)
    assert [answer.as_numpy("number") for answer in answers.pop("a")] == [0, 1]
    assert len(answers.pop("d")) == 1
    assert set(answers) == {
        "count is below 0",
        "model 'stream' has a bug: see its server's log",
    }
    assert [record.getMessage() for record in caplog.records] == ["model 'stream' has a bug"]
    assert served.stream.why() == [None] * 4, "the client's half-close cancels nothing"


@pytest.mark.parametrize(("model", "flags"), [("stream", [False, True]), ("unary", [True])])
async def test_the_final_response_is_marked_where_asked_for(model: str, flags: list[bool]) -> None:
    served = Served()
    async with served.open(), grpc.aio.insecure_channel(served.url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = request_of(*count(1), model=model)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        answers = [answer.infer_response async for answer in stub.ModelStreamInfer(iter([request]))]
    assert [one.parameters["triton_final_response"].bool_param for one in answers] == flags
    assert [len(one.outputs) for one in answers] == [2, 0][: len(flags)]


async def test_a_client_that_asks_for_grpc_errors_gets_the_status() -> None:
    served = Served()
    async with served.open() as client:
        stream = client.stream_infer(
            on_stream({"inputs": count(99)}, {"inputs": count(-1)}),
            headers={"triton_grpc_error": "true"},
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        await served.stream.ended.acquire()
        await served.stream.ended.acquire()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert served.stream.why() == [(CancelReason.API, DetectionMethod.NONE)] * 2, "nobody has left"


async def test_a_unary_call_ends_by_cancel_or_deadline() -> None:
    served = Served()
    async with served.open() as client:
        task = asyncio.create_task(client.infer("unary", count(99)))
        await served.unary.begun.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.unary.ended.acquire()
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("unary", count(99), client_timeout=0.1)
        await served.unary.begun.acquire()
        await served.unary.ended.acquire()
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    timed_out = (CancelReason.CLIENT_TIMEOUT, DetectionMethod.GRPC)
    assert served.unary.why() == [USER_LEFT, timed_out]


async def test_a_client_that_reads_nothing_is_dropped() -> None:
    served = Served()
    async with served.open(stall_timeout_s=0.1), grpc.aio.insecure_channel(served.url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        await call.write(request_of(*count(98, size=1_000_000), model="stream"))
        await served.stream.begun.acquire()
        await served.stream.contexts[0].killed()
        call.cancel()
        await served.stream.ended.acquire()
    assert served.stream.why() == [(CancelReason.USER_DISCONNECT, DetectionMethod.STALL)]


async def refused(asking: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        await asking
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


@pytest.mark.parametrize(("ask", "status", "message"), [
    (lambda c: c.infer("none", count(1)), "NOT_FOUND", "unknown model: 'none' is not found"),
    (lambda c: c.infer("unary", count(1), model_version="7"), "NOT_FOUND", "version 7 is not"),
    (lambda c: c.infer("unary", []), "INVALID_ARGUMENT", "required input(s) ['count']"),
    (lambda c: c.infer("unary", count(-1)), "INVALID_ARGUMENT", "count is below 0"),
    (lambda c: c.infer("stream", count(1)), "UNIMPLEMENTED", "decoupled transaction policy"),
    (lambda c: c.infer("unary", too_large()), "RESOURCE_EXHAUSTED", "larger than max"),
    (lambda c: c.infer("unary", count(0)), "INTERNAL", "0 responses instead of one"),
    (lambda c: c.infer("unary", count(2)), "INTERNAL", "2 responses instead of one"),
    (lambda c: c.get_model_config("none"), "NOT_FOUND", "unknown model: 'none' is not found"),
    (lambda c: c.get_inference_statistics(), "UNIMPLEMENTED", "Method not found"),
])  # fmt: skip
async def test_a_wrong_request_gets_one_sentence_and_the_server_goes_on(
    ask: Callable[[InferenceServerClient], Any], status: str, message: str
) -> None:
    served = Served()
    async with served.open() as client:
        code, sentence = await refused(ask(client))
        assert (await client.infer("unary", count(1))).as_numpy("number") == 0
    assert code == status
    assert message in sentence


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
async def test_bytes_that_are_no_message_are_refused(call: str) -> None:
    served = Served()
    async with served.open(), grpc.aio.insecure_channel(served.url) as channel:
        kind: Any = channel.stream_stream if "Stream" in call else channel.unary_unary
        ask = kind(f"/inference.GRPCInferenceService/{call}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (ask(iter([b"\xff"])).read() if "Stream" in call else ask(b"\xff"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the message is no ModelInferRequest"


async def test_with_keys_only_the_servers_health_is_open() -> None:
    served = Served()
    async with served.open(is_allowed=lambda key: key == "Bearer k") as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert (await refused(client.infer("unary", count(1))))[0] == "UNAUTHENTICATED"
        assert (await refused(client.get_server_metadata()))[0] == "UNAUTHENTICATED"
        headers = {"authorization": "Bearer k"}
        assert await client.infer("unary", count(1), headers=headers)


async def test_what_is_served_is_described_as_triton_does() -> None:
    served = Served()
    async with served.open() as client:
        assert not await client.is_model_ready("none")
        assert await client.is_model_ready("unary", "1")
        assert not await client.is_model_ready("unary", "2")
        config = await client.get_model_config("stream", as_json=True)
        assert config["config"]["model_transaction_policy"] == {"decoupled": True}
        served.unary.config.max_batch_size = 4
        metadata = await client.get_model_metadata("unary", as_json=True)
    count_, _ = metadata["inputs"]
    assert count_ == {"name": "count", "datatype": "INT32", "shape": ["-1", "1"]}
