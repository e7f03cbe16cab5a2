"""The in-process API: its iterators, for threads and for event loops, and how they end."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

import numpy as np
import pytest
from google.protobuf import text_format
from grpc import StatusCode
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from reference_engine.config import EngineConfigError
from reference_engine.context import Context
from reference_engine.triton import InferenceRequest, InferenceServer
from reference_engine.triton.model import InferenceError
from reference_engine.triton.tensors import read_inputs, write_output


class Counts:
    """Counts up to N; then, without an end, it waits for a cancel."""

    name = "counts"
    versions: tuple[str, ...] = ("1",)
    is_ready = True
    config = text_format.Parse(
        """
        name: "counts"
        input { name: "N" data_type: TYPE_INT32 dims: 1 }
        output { name: "number" data_type: TYPE_INT32 dims: 1 }
        model_transaction_policy { decoupled: true }
        """,
        ModelConfig(),
    )

    async def infer(
        self, request: ModelInferRequest, context: Context
    ) -> AsyncGenerator[ModelInferResponse, None]:
        for number in range(read_inputs(request)["N"].item()):
            response = ModelInferResponse()
            write_output(response, "number", np.array([number], np.int32))
            yield response
        if request.parameters["endless"].bool_param:
            await context.killed()
            raise InferenceError(StatusCode.CANCELLED, "it was cancelled")


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    with InferenceServer(models={"counts": Counts()}) as server:
        yield server


def test_a_thread_iterates_and_cancels(server: InferenceServer) -> None:
    request = InferenceRequest({"N": [2]}, request_id="r", parameters={"endless": True})
    responses = server.model("counts").infer(request)
    assert next(responses).request_id == "r"
    assert next(responses).outputs["number"] == 1
    assert not request.is_cancelled()
    responses.cancel()
    with pytest.raises(InferenceError, match="it was cancelled"):
        next(responses)
    assert request.is_cancelled()
    assert list(responses) == []


def test_an_event_loop_iterates_and_cancels(server: InferenceServer) -> None:
    async def main() -> None:
        model = server.model("counts")
        plain = InferenceRequest({"N": [3]})
        assert [one.outputs["number"] async for one in model.async_infer(plain)] == [0, 1, 2]
        request = InferenceRequest({"N": [0]}, parameters={"endless": True})
        responses = model.async_infer(request)
        request.cancel()
        with pytest.raises(InferenceError, match="it was cancelled"):
            await anext(responses)
        with pytest.raises(StopAsyncIteration):
            await anext(responses)

    asyncio.run(main())


def test_a_wrong_request_and_a_closed_server_end_the_iterator(server: InferenceServer) -> None:
    model = server.model("counts")
    with pytest.raises(InferenceError, match="unexpected shape"):
        next(model.infer(InferenceRequest({"N": 2})))
    with pytest.raises(InferenceError, match="unexpected inference input 'M'"):
        next(model.infer(InferenceRequest({"N": [1], "M": [2]})))
    endless = model.infer(InferenceRequest({"N": [0]}, parameters={"endless": True}))
    with pytest.raises(InferenceError, match="unknown model: 'other'"):
        server.model("other")
    server.close()
    with pytest.raises(InferenceError, match="the server has been closed"):
        next(endless)
    with pytest.raises(InferenceError, match="the server has been closed"):
        server.model("counts")
    with pytest.raises(EngineConfigError, match="--model-repository /nowhere"):
        InferenceServer("/nowhere")
