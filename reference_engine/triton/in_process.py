"""Inference without a port: requests that can be cancelled, and iterators that can, too.

    from reference_engine.triton import InferenceRequest, InferenceServer

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
import contextlib
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
from reference_engine.triton.model import InferenceError, Model, Parameter, datatype_of
from reference_engine.triton.repository import Repository, load_repository
from reference_engine.triton.server import find_model, infer
from reference_engine.triton.tensors import read_outputs, write_input


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
        """May be called from any thread; has no effect after the end, or after another cancel."""
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


class _TritonResponses:
    """They raise InferenceError where the request has failed; then they are at their end."""

    def __init__(self, request: InferenceRequest) -> None:
        self.cancel = request.cancel
        self._has_ended = False

    def _take(self, item: _Item, end: type[Exception]) -> InferenceResponse:
        self._has_ended = not isinstance(item, ModelInferResponse)
        if item is None:
            raise end
        if isinstance(item, InferenceError):
            raise item
        return InferenceResponse(item.id, read_outputs(item))


class ResponseIterator(_TritonResponses, Iterator[InferenceResponse]):
    def __init__(self, request: InferenceRequest) -> None:
        super().__init__(request)
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self.put = self._items.put

    def __next__(self) -> InferenceResponse:
        return self._take(None if self._has_ended else self._items.get(), StopIteration)


class AsyncResponseIterator(_TritonResponses, AsyncIterator[InferenceResponse]):
    """The twin for the event loop that makes it."""

    def __init__(self, request: InferenceRequest) -> None:
        super().__init__(request)
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item] = asyncio.Queue()

    def put(self, item: _Item) -> None:
        with contextlib.suppress(RuntimeError):  # that loop has ended
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def __anext__(self) -> InferenceResponse:
        item = None if self._has_ended else await self._items.get()
        return self._take(item, StopAsyncIteration)


def _closed() -> InferenceError:
    return InferenceError(StatusCode.UNAVAILABLE, "the server has been closed")


class ServedModel:
    def __init__(self, model: Model, start: Callable[..., object]) -> None:
        self.model = model
        self._start = start

    def infer(self, request: InferenceRequest) -> ResponseIterator:
        responses = ResponseIterator(request)
        self._start(self.model, request, responses.put)
        return responses

    def async_infer(self, request: InferenceRequest) -> AsyncResponseIterator:
        responses = AsyncResponseIterator(request)
        self._start(self.model, request, responses.put)
        return responses


class InferenceServer:
    """Ready when it has been made; `close` ends the models of the repository.

    Raises EngineConfigError for a repository that cannot be served. `models` are served, too.
    """

    def __init__(
        self,
        model_repository: str | Path | None = None,
        *,
        is_faithful: bool = False,
        models: Mapping[str, Model] | None = None,
    ) -> None:
        self._models = dict(models or {})
        self._repository = Repository()
        self._loop = asyncio.new_event_loop()
        self._running = set[asyncio.Task[None]]()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        if model_repository is None:
            return
        try:
            loading = load_repository(Path(model_repository), is_faithful=is_faithful)
            self._repository = self._do(loading)
        except BaseException:
            self._stop()
            raise
        self._models |= self._repository.models

    def __enter__(self) -> "InferenceServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def model(self, name: str) -> ServedModel:
        """Raises InferenceError if there is none, or the server is closed."""
        if self._loop.is_closed():
            raise _closed()
        return ServedModel(find_model(self._models, name, ""), self._start)

    def close(self) -> None:
        """Requests that still run end with an InferenceError, UNAVAILABLE."""
        if not self._loop.is_closed():
            self._do(self._end())
            self._stop()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
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
        end: _Item = None
        try:
            async for response in infer(self._models, message, context):
                put(response)
        except InferenceError as error:
            end = error
        except asyncio.CancelledError:
            end = _closed()
            raise
        finally:
            put(end)
