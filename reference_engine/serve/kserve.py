"""The engine behind KServe: the model `generate`, and the gRPC port next to the HTTP port.

A call of `generate` is submitted as any HTTP request is, so it has the same log, metrics, limits
and cancellations; a response holds one token, or several for a client that reads slowly;
its parameter `completion_tokens` counts them from the beginning.
"""

import logging
import time
from collections.abc import AsyncGenerator, Mapping, MutableSet
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
from google.protobuf import text_format
from grpc import StatusCode
from starlette.datastructures import Headers
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import InferParameter, ModelInferRequest, ModelInferResponse

from reference_engine.api.bodies import read_request_id
from reference_engine.api.openai import Generation, read_completion
from reference_engine.api.schemas import ApiError
from reference_engine.config import EngineConfig
from reference_engine.context import Cancellation, CancelReason, Context, Signal
from reference_engine.core.request import FinishReason
from reference_engine.model.tokenizer import Tokenizer
from reference_engine.serve.access import find_key
from reference_engine.serve.client_request import ClientRequest
from reference_engine.serve.generate import admit, read_generation
from reference_engine.serve.http import ListenError
from reference_engine.serve.link import WorkerLink
from reference_engine.serve.supervisor import EngineStoppedError
from reference_engine.triton.model import (
    InferenceError,
    Parameter,
    RequestControls,
    invalid,
    read_parameters,
)
from reference_engine.triton.repository import Repository, load_repository
from reference_engine.triton.server import InferenceService, grpc_server
from reference_engine.triton.tensors import read_inputs, with_length

_CONFIG: Final = text_format.Parse(
    """
    name: "generate" backend: "walkaway"
    input { name: "text_input" data_type: TYPE_STRING dims: 1 }
    input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 }
    output { name: "text_output" data_type: TYPE_STRING dims: 1 }
    model_transaction_policy { decoupled: true }
    """,
    ModelConfig(),
)
_OUTPUT: Final = ModelInferResponse.InferOutputTensor(
    name="text_output", datatype="BYTES", shape=[1]
)
_TOKENS: Final = "completion_tokens"  # parameter of a response: how many there are so far
_PARAMETERS: Final = frozenset({"deadline_s", "ignore_eos", "seed", "stop", "temperature"})
_CODES: Final = {
    404: StatusCode.NOT_FOUND,
    413: StatusCode.RESOURCE_EXHAUSTED,
    429: StatusCode.RESOURCE_EXHAUSTED,
}
_ABORTED: Final = {
    CancelReason.CLIENT_TIMEOUT: (StatusCode.DEADLINE_EXCEEDED, "its deadline has passed"),
    CancelReason.RATE_LIMIT: (StatusCode.RESOURCE_EXHAUSTED, "its key has no tokens left"),
    CancelReason.SERVER_SHUTDOWN: (StatusCode.UNAVAILABLE, "the server is shutting down"),
}
_CANCELLED: Final = (StatusCode.CANCELLED, "it was cancelled")
_CLOSING_S: Final = 1.0  # for calls in which nothing is being answered


class GenerateModel:
    name = "generate"
    versions: tuple[str, ...] = ("1",)
    config = _CONFIG

    def __init__(self, link: WorkerLink, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._link = link
        self._engine = config
        self._tokenizer = tokenizer

    @property
    def is_ready(self) -> bool:
        return not self._link.is_draining

    async def infer(
        self, request: ModelInferRequest, context: Context
    ) -> AsyncGenerator[ModelInferResponse, None]:
        submitted = await self._submit(request, context)
        left = partial(self._left, submitted)
        context.watch(left)
        [choice] = submitted.choices
        try:
            while (item := await submitted.outbox.get()) is not None:
                _, output = item
                if output.finish_reason == FinishReason.ABORT:
                    break
                if not output.text and output.num_generated == choice.num_sent:
                    continue  # only an ending
                yield ModelInferResponse(
                    outputs=[_OUTPUT],
                    raw_output_contents=[with_length(output.text.encode())],
                    parameters={_TOKENS: InferParameter(int64_param=output.num_generated)},
                )
                choice.num_sent = output.num_generated
        except EngineStoppedError as error:
            raise InferenceError(StatusCode.UNAVAILABLE, str(error)) from error
        finally:
            context.unwatch(left)
            if not context.is_stopped():  # the iteration was given up without a word
                self._link.cancel(submitted, CancelReason.SERVER_SHUTDOWN)
        given = submitted.context.cancellation
        if given is not None and (submitted.is_aborted or not submitted.is_ended):
            code, why = _ABORTED.get(given.reason, _CANCELLED)
            raise InferenceError(code, f"request {submitted.request_id} was ended early: {why}")

    def _left(self, submitted: ClientRequest, _: Signal, why: Cancellation | None) -> None:
        if why is None or why.reason is CancelReason.API:
            self._link.cancel(submitted, CancelReason.API)
        else:
            self._link.disconnected(submitted, why.method, why.reason)

    async def _submit(self, request: ModelInferRequest, context: Context) -> ClientRequest:
        owner = find_key(context.metadata.get("authorization"), self._link.settings.api_keys)
        try:
            admit(self._link, owner)
            name = Headers(raw=[(b"x-request-id", request.id.encode())])
            submitted = self._link.submit(
                await self._read(request),
                client_request_id=read_request_id(name),
                owner=owner,
                created=int(time.time()),  # noqa: TID251 OpenAI's `created` is wall time
            )
        except ApiError as error:
            message = str(error).removeprefix("request body: ").replace("X-Request-Id", "id")
            code = _CODES.get(error.status, StatusCode.INVALID_ARGUMENT)
            raise InferenceError(code, message) from error
        except EngineStoppedError as error:
            raise InferenceError(StatusCode.UNAVAILABLE, str(error)) from error
        submitted.endpoint = "tensor"
        return submitted

    async def _read(self, request: ModelInferRequest) -> Generation:
        """Its inputs and parameters, checked as the fields of /v1/completions are."""
        inputs = read_inputs(request)
        controls, parameters = read_parameters(request)
        try:
            prompt = inputs["text_input"].item().decode()
        except UnicodeDecodeError as error:
            raise invalid(f"input 'text_input': not UTF-8 ({error.reason})") from error
        fields = {
            "model": self._engine.model,
            "prompt": prompt,
            "max_tokens": inputs["max_tokens"].item(),
            "stream": True,
            **_fields_of(controls, parameters),
        }
        body = msgspec.json.encode(fields)
        return await read_generation(read_completion, body, self._engine, self._tokenizer)


def _fields_of(
    controls: RequestControls, parameters: Mapping[str, Parameter]
) -> dict[str, Parameter]:
    if controls.sequence_id:
        raise invalid("model 'generate' has no sequences: leave sequence_id out")
    unknown = sorted(parameters.keys() - _PARAMETERS)
    if unknown:
        known = ", ".join(sorted(_PARAMETERS))
        raise invalid(f"parameter '{unknown[0][:64]}': model 'generate' knows only {known}")
    for name, value in parameters.items():
        if isinstance(value, float) and not isfinite(value):
            raise invalid(f"parameter '{name}': {value} is no number")
    fields: dict[str, Parameter] = {**parameters, "priority": controls.priority}
    if controls.timeout_us:
        fields["deadline_s"] = controls.timeout_us / 1e6
    return fields


class Door:
    """The gRPC port and the models behind it, the engine among them if there is one."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.check_integrity = repository.check_integrity
        self._server: grpc.aio.Server | None = None

    @classmethod
    async def load(
        cls, config: EngineConfig, repository: str | None, *, is_faithful: bool
    ) -> "Door":
        """Raises EngineConfigError."""
        logging.basicConfig(format="%(message)s")  # for what models log below a warning
        if repository is None:
            return cls(Repository())
        taken = [GenerateModel.name] if config.runner != "none" else []
        return cls(await load_repository(Path(repository), is_faithful=is_faithful, taken=taken))

    async def open(
        self,
        at: tuple[str, int],
        link: WorkerLink,
        config: EngineConfig,
        tokenizer: Tokenizer,
        answering: MutableSet[Any],
    ) -> str:
        """Returns its `host:port`; port 0 takes a free one. `answering`: as for InferenceService.
        Raises ListenError.
        """
        models, keys = dict(self._repository.models), link.settings.api_keys
        if config.runner != "none":
            models[GenerateModel.name] = GenerateModel(link, config, tokenizer)

        def count_left(model: str, stream: bool, num_sent: int) -> None:  # noqa: FBT001
            if model in self._repository.models:  # the link counts the engine's own
                link.collector.count_leaving(model, "tensor", stream=stream, num_sent=num_sent)

        service = InferenceService(
            models,
            answering,
            stall_timeout_s=link.settings.stall_timeout_s,
            count_left=count_left,
            is_allowed=lambda given: not keys or find_key(given, keys) is not None,
        )
        self._server = grpc_server(service, link.settings)
        host, port = at
        shown = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{shown}:{port}")
        except RuntimeError as error:
            raise ListenError(
                f"cannot listen on {host}, port {port} for KServe; choose another --kserve-port"
            ) from error
        await self._server.start()
        return f"{shown}:{bound}"

    async def aclose(self) -> None:
        if self._server is not None:
            await self._server.stop(_CLOSING_S)
        await self._repository.close()
