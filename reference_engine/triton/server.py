"""The gRPC service of KServe v2: Triton's calls and their answers.

Every request has a context. A client that cancels its call, lets its deadline pass or loses its
connection is one thing to gRPC: the call's task is cancelled, and this kills the context before
anything else. A stream's context is the parent of its requests' contexts; these requests are
answered side by side. The client's half-close ends only the reading of further requests.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, MutableSet
from contextlib import aclosing, suppress
from functools import partial
from importlib.metadata import version
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2 import (
    ModelConfigResponse,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    ModelReadyResponse,
    ModelStreamInferResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
)

from reference_engine.config import FrontendSettings
from reference_engine.context import Cancellation, CancelReason, Context, DetectionMethod
from reference_engine.triton.model import (
    FINAL_PARAMETER,
    InferenceError,
    Model,
    check_request,
    invalid,
    is_decoupled,
    metadata_of,
    read_parameters,
)

log: Final = logging.getLogger(__name__)
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
OPEN_CALLS: Final = frozenset({"ServerLive", "ServerReady"})  # as /health: they need no key
_SERVICE: Final = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_GRPC_ERRORS: Final = "triton_grpc_error"  # header: an error ends the stream, with its status
_EXTENSIONS: Final = ("model_configuration", "parameters", "sequence")
# gRPC sends a deadline with two or three digits, rounded up: the server's is that much later.
_DEADLINE_SHARE: Final = 0.01
_DEADLINE_S: Final = 0.005

Call = grpc.aio.ServicerContext[Any, Any]


async def infer(
    models: Mapping[str, Model], request: ModelInferRequest, context: Context
) -> AsyncGenerator[ModelInferResponse, None]:
    """All responses to one request. Raises InferenceError, also for a model's bug."""
    model = find_model(models, request.model_name, request.model_version)
    check_request(request, model.config)
    controls, _ = read_parameters(request)
    wanted = {output.name for output in request.outputs}
    head = ModelInferResponse(
        model_name=model.name,
        model_version=request.model_version or model.versions[-1],
        id=request.id,
    )
    is_final = not is_decoupled(model.config)
    try:
        async with aclosing(model.infer(request, context)) as responses:
            async for response in responses:
                response.MergeFrom(head)
                if wanted:
                    _keep(response, wanted)
                if controls.wants_final:
                    is_final = is_final or FINAL_PARAMETER in response.parameters
                    response.parameters[FINAL_PARAMETER].bool_param = is_final
                yield response
    except InferenceError:
        raise
    except Exception as error:
        log.exception("model %r has a bug", model.name)
        message = f"model '{model.name}' has a bug: see its server's log"
        raise InferenceError(StatusCode.INTERNAL, message) from error
    if controls.wants_final and not is_final:
        head.parameters[FINAL_PARAMETER].bool_param = True
        yield head


def find_model(models: Mapping[str, Model], name: str, version: str) -> Model:
    model = models.get(name)
    if model is None:
        raise InferenceError(
            StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found"
        )
    if version and version not in model.versions:
        message = f"Request for unknown model: '{name}' version {version} is not found"
        raise InferenceError(StatusCode.NOT_FOUND, message)
    return model


def _keep(response: ModelInferResponse, wanted: set[str]) -> None:
    for at in reversed(range(len(response.outputs))):
        if response.outputs[at].name not in wanted:
            del response.outputs[at]
            del response.raw_output_contents[at]


class InferenceService:
    """`answering` holds the tasks that answer a request; the caller may wait for them.

    `is_allowed` is asked for the value of a call's `authorization`. `count_left` gets the model of
    each request whose client has left, whether on a stream, and the number of responses sent.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        answering: MutableSet[Any],
        *,
        stall_timeout_s: float,
        is_allowed: Callable[[str | None], bool],
        count_left: Callable[[str, bool, int], object] = lambda *_: None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._models = models
        self._answering = answering
        self._stall_timeout_s = stall_timeout_s
        self._is_allowed = is_allowed
        self._count_left = count_left
        self._now_ns = now_ns

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The calls that this class has; gRPC answers all others with UNIMPLEMENTED."""
        methods = {}
        for method in _SERVICE.methods:
            answer = getattr(self, method.name, None)
            if answer is None:
                continue
            kind = (
                grpc.stream_stream_rpc_method_handler
                if method.client_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            methods[method.name] = kind(
                partial(self._answer, answer, is_open=method.name in OPEN_CALLS),
                request_deserializer=partial(_read, GetMessageClass(method.input_type)),
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
        return grpc.method_handlers_generic_handler(_SERVICE.full_name, methods)

    async def _answer(self, answer: Any, request: Any, call: Call, *, is_open: bool) -> Any:
        try:
            headers = _headers_of(call)
            if not is_open and not self._is_allowed(headers.get("authorization")):
                message = "authorization: a valid API key is needed, as `Bearer KEY`"
                raise InferenceError(StatusCode.UNAUTHENTICATED, message)
            if isinstance(request, InferenceError):
                raise request
            return await answer(request, call)
        except InferenceError as error:
            await self._caller(call, None).abort(error)

    async def ServerLive(self, request: Any, call: Call) -> ServerLiveResponse:
        return ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, call: Call) -> ServerReadyResponse:
        return ServerReadyResponse(ready=all(model.is_ready for model in self._models.values()))

    async def ServerMetadata(self, request: Any, call: Call) -> ServerMetadataResponse:
        return ServerMetadataResponse(
            name="walkaway", version=version("walkaway"), extensions=_EXTENSIONS
        )

    async def ModelReady(self, request: Any, call: Call) -> ModelReadyResponse:
        model = self._models.get(request.name)
        has_version = model is not None and request.version in ("", *model.versions)
        return ModelReadyResponse(ready=model is not None and has_version and model.is_ready)

    async def ModelMetadata(self, request: Any, call: Call) -> ModelMetadataResponse:
        return metadata_of(find_model(self._models, request.name, request.version))

    async def ModelConfig(self, request: Any, call: Call) -> ModelConfigResponse:
        model = find_model(self._models, request.name, request.version)
        return ModelConfigResponse(config=model.config)

    async def ModelInfer(self, request: ModelInferRequest, call: Call) -> ModelInferResponse:
        model = find_model(self._models, request.model_name, request.model_version)
        if is_decoupled(model.config):
            message = (
                "ModelInfer RPC doesn't support models with decoupled transaction policy; "
                "use ModelStreamInfer"
            )
            raise InferenceError(StatusCode.UNIMPLEMENTED, message)
        self._note(asyncio.current_task())
        with self._caller(call, request.id) as caller:
            caller.context.watch(lambda _, why: self._left(model.name, why))
            responses = [one async for one in infer(self._models, request, caller.context)]
        if len(responses) != 1:
            message = f"model '{model.name}' gave {len(responses)} responses instead of one"
            raise InferenceError(StatusCode.INTERNAL, message)
        return responses[0]

    async def ModelStreamInfer(self, requests: Any, call: Call) -> None:
        tasks = set[asyncio.Task[None]]()
        try:
            async with asyncio.TaskGroup() as group:
                with self._caller(call, None) as caller:
                    async for request in requests:
                        if isinstance(request, InferenceError):
                            await caller.abort(request)
                        task = group.create_task(self._stream(request, caller))
                        self._note(task)
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                    if tasks:
                        await asyncio.wait(tasks)
        except* grpc.aio.AbortError as errors:
            raise errors.exceptions[0] from None

    async def _stream(self, request: ModelInferRequest, caller: "_Caller") -> None:
        stream = caller.context
        context = Context(request.id or None, stream.metadata)
        stream.link_child(context)
        num_sent = 0
        context.watch(lambda _, why: self._left(request.model_name, why, num_sent, stream=True))
        try:
            async with aclosing(infer(self._models, request, context)) as responses:
                async for response in responses:
                    await caller.send(ModelStreamInferResponse(infer_response=response))
                    num_sent += 1
        except InferenceError as error:
            if stream.metadata.get(_GRPC_ERRORS) == "true":
                await caller.abort(error)
            failed = ModelStreamInferResponse(error_message=error.message)
            failed.infer_response.id = request.id
            await caller.send(failed)
        finally:
            stream.unlink_child(context)

    def _left(
        self, model: str, why: Cancellation | None, num_sent: int = 0, *, stream: bool = False
    ) -> None:
        if why is not None and why.method is not DetectionMethod.NONE:
            self._count_left(model, stream, num_sent)

    def _note(self, task: "asyncio.Task[Any] | None") -> None:
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _caller(self, call: Call, name: str | None) -> "_Caller":
        context = Context(name or None, _headers_of(call))
        return _Caller(call, context, self._stall_timeout_s, self._now_ns)


class _Caller:
    """The client of a call. Its leaving, inside the `with` block, kills the context."""

    def __init__(
        self, call: Call, context: Context, stall_timeout_s: float, now_ns: Callable[[], int]
    ) -> None:
        self._call = call
        self.context = context
        self._stall_timeout_s = stall_timeout_s
        self._now_ns = now_ns
        self._deadline_s = call.time_remaining()
        self._sending = asyncio.Lock()  # gRPC takes one message at a time, and never takes it back

    def __enter__(self) -> "_Caller":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is asyncio.CancelledError:
            self._left()

    async def send(self, message: ModelStreamInferResponse) -> None:
        async with self._sending:
            loop = asyncio.get_running_loop()
            stalled = loop.call_later(self._stall_timeout_s, self._kill, DetectionMethod.STALL)
            try:
                await self._call.write(message)
            except grpc.aio.InternalError:  # the client has left; gRPC says so in a moment
                self._left()
                raise asyncio.CancelledError from None
            finally:
                stalled.cancel()

    async def abort(self, error: InferenceError) -> NoReturn:
        """End the call, and with it the other requests of a stream; the first error is sent."""
        self._kill(DetectionMethod.NONE, CancelReason.API)
        async with self._sending:
            # The client may have left, or another request may have ended the call.
            with suppress(grpc.aio.InternalError, grpc.aio.UsageError):
                await self._call.abort(error.code, error.message)
        raise asyncio.CancelledError

    def _left(self) -> None:
        reason = CancelReason.USER_DISCONNECT
        if self._deadline_s is not None:
            left_s = self._call.time_remaining() or 0.0
            if left_s <= max(self._deadline_s * _DEADLINE_SHARE, _DEADLINE_S):
                reason = CancelReason.CLIENT_TIMEOUT
        self._kill(DetectionMethod.GRPC, reason)

    def _kill(
        self, method: DetectionMethod, reason: CancelReason = CancelReason.USER_DISCONNECT
    ) -> None:
        self.context.kill(Cancellation(reason, method, self._now_ns()))


def grpc_server(service: InferenceService, settings: FrontendSettings) -> grpc.aio.Server:
    """It belongs to the running event loop."""
    keepalive_ms = int((settings.heartbeat_s or settings.ack_timeout_s) * 1000)
    timeout_ms = int(settings.ack_timeout_s * 1000)
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # a second server on this port fails
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.max_ping_strikes", 0),  # clients may ping as often as they like
        ]
    )
    server.add_generic_rpc_handlers((service.handler(),))
    return server


def _read(kind: Any, data: bytes) -> Any:
    """An InferenceError in the place of a broken message: gRPC would answer UNKNOWN."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return invalid(f"the message is no {kind.DESCRIPTOR.name}")


def _headers_of(call: Call) -> dict[str, str]:
    metadata = call.invocation_metadata() or ()
    return {str(name): value for name, value in metadata if isinstance(value, str)}
