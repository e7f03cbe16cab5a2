"""Inference without a port: requests that can be cancelled, and iterators that can, too.

    from reference_engine.kserve import InferenceRequest, InferenceServer

    with InferenceServer("models") as server:
        request = InferenceRequest({"N": [50]})
        for response in server.model("stream").infer(request):
            if response.outputs["number"].item() == 3:
                request.cancel()

A cancel returns at once. How the iterator then ends is the model's affair: by an InferenceError,
CANCELLED, or, if the model never looks, after all responses. The models live on an event loop in a
thread of the server, so any thread and any other loop may use it.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from grpc import StatusCode
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse
from tritonclient.utils import triton_to_np_dtype

from reference_engine.context import Cancellation, CancelReason, Context, DetectionMethod
from reference_engine.kserve.model import InferenceError, Model, Parameter, datatype_of
from reference_engine.kserve.repository import Repository, load_repository
from reference_engine.kserve.server import find_model, infer
from reference_engine.kserve.tensors import read_outputs, write_input


class InferenceRequest:
    """`inputs` are arrays, or what numpy makes arrays of; `parameters` as over gRPC."""

    def __init__(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        request_id: str = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self.inputs = inputs
        self.request_id = request_id
        self.parameters = dict(parameters or {})
        self.context = Context(request_id or None)

    def cancel(self) -> None:
        """From any thread; without effect after the end, or after another cancel."""
        now_ns = time.perf_counter_ns()
        self.context.kill(Cancellation(CancelReason.API, DetectionMethod.NONE, now_ns))

    def is_cancelled(self) -> bool:
        return self.context.is_stopped()

    def message(self, model: Model) -> ModelInferRequest:
        """The arrays take the types of the model's inputs."""
        message = ModelInferRequest(model_name=model.name, id=self.request_id)
        types = {one.name: datatype_of(one.data_type) for one in model.config.input}
        for name, value in self.inputs.items():
            dtype = triton_to_np_dtype(types[name]) if name in types else None
            write_input(message, name, np.asarray(value, dtype))
        for name, parameter in self.parameters.items():
            kinds = {bool: "bool_param", int: "int64_param", float: "double_param"}
            setattr(message.parameters[name], kinds.get(type(parameter), "string_param"), parameter)
        return message


class InferenceResponse(NamedTuple):
    request_id: str
    outputs: dict[str, npt.NDArray[Any]]


_Item: TypeAlias = ModelInferResponse | InferenceError | None


class ResponseIterator(Iterator[InferenceResponse]):
    """Raises InferenceError where the request has failed; then it is at its end."""

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self.items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._has_ended = False

    def cancel(self) -> None:
        self._request.cancel()

    def __next__(self) -> InferenceResponse:
        if self._has_ended:
            raise StopIteration
        item = self.items.get()
        self._has_ended = not isinstance(item, ModelInferResponse)
        if item is None:
            raise StopIteration
        return _response(item)


class AsyncResponseIterator(AsyncIterator[InferenceResponse]):
    """The twin for the event loop that makes it."""

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._has_ended = False

    def put(self, item: _Item) -> None:
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def cancel(self) -> None:
        self._request.cancel()

    async def __anext__(self) -> InferenceResponse:
        if self._has_ended:
            raise StopAsyncIteration
        item = await self._items.get()
        self._has_ended = not isinstance(item, ModelInferResponse)
        if item is None:
            raise StopAsyncIteration
        return _response(item)


def _response(item: ModelInferResponse | InferenceError) -> InferenceResponse:
    if isinstance(item, InferenceError):
        raise item
    return InferenceResponse(item.id, read_outputs(item))


class ServedModel:
    def __init__(self, model: Model, start: Callable[..., object]) -> None:
        self.model = model
        self._start = start

    def infer(self, request: InferenceRequest) -> ResponseIterator:
        responses = ResponseIterator(request)
        self._start(self.model, request, responses.items.put)
        return responses

    def async_infer(self, request: InferenceRequest) -> AsyncResponseIterator:
        responses = AsyncResponseIterator(request)
        self._start(self.model, request, responses.put)
        return responses


class InferenceServer:
    """Ready when it has been made; `close` ends the models of the repository.

    Raises EngineConfigError for a repository that cannot be served. `models` are served beside it;
    if they belong to an event loop, `loop` is that one, running in another thread.
    """

    def __init__(
        self,
        model_repository: str | Path | None = None,
        *,
        is_faithful: bool = False,
        models: Mapping[str, Model] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._models = dict(models or {})
        self._repository = Repository()
        self._loop = loop or asyncio.new_event_loop()
        self._running = set[asyncio.Task[None]]()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()
        try:
            if model_repository is not None:
                loading = load_repository(Path(model_repository), is_faithful=is_faithful)
                self._repository = self._do(loading)
                self._models |= self._repository.models
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> "InferenceServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def model(self, name: str) -> ServedModel:
        """Raises InferenceError if there is none."""
        return ServedModel(find_model(self._models, name, ""), self._start)

    def close(self) -> None:
        """Requests that still run end with an InferenceError, UNAVAILABLE."""
        if not self._loop.is_closed():
            self._do(self._end())
            self._stop()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._repository.close()

    def _start(
        self, model: Model, request: InferenceRequest, put: Callable[[_Item], object]
    ) -> None:
        message = request.message(model)

        def start() -> None:
            task = self._loop.create_task(self._run(message, request.context, put))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

        self._loop.call_soon_threadsafe(start)

    async def _run(
        self, message: ModelInferRequest, context: Context, put: Callable[[_Item], object]
    ) -> None:
        async def send(response: ModelInferResponse) -> None:
            put(response)

        end: _Item = InferenceError(StatusCode.INTERNAL, f"model '{message.model_name}' has a bug")
        try:
            await infer(self._models, message, context, send)
            end = None
        except InferenceError as error:
            end = error
        except asyncio.CancelledError:
            end = InferenceError(StatusCode.UNAVAILABLE, "the server has been closed")
            raise
        finally:
            put(end)
