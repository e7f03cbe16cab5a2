"""Models that the server can serve, and the checks of a request before a model sees it.

A model answers a request with an iterator of responses: exactly one, or any number if its
configuration says that it is decoupled. The server kills the request's context when the client
cancels, lets its deadline pass or loses its connection; after that, it cancels the task that
iterates. A model cleans up in a `finally`, and ends a request that something else has cancelled
with an InferenceError.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from grpc import StatusCode
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
)

from reference_engine.context import Context

FINAL_PARAMETER: Final = "triton_final_response"  # of a decoupled model's last response
Parameter = bool | int | float | str


class InferenceError(Exception):
    """The end of a request, with gRPC's status and one sentence."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> InferenceError:
    return InferenceError(StatusCode.INVALID_ARGUMENT, message)


def cancelled() -> InferenceError:
    return InferenceError(StatusCode.CANCELLED, "the request was cancelled")


class Model(Protocol):
    """`versions` in ascending order; `is_ready`: it can answer now."""

    name: str
    versions: tuple[str, ...]
    config: ModelConfig

    @property
    def is_ready(self) -> bool: ...

    def infer(
        self, request: ModelInferRequest, context: Context
    ) -> AsyncGenerator[ModelInferResponse, None]:
        """Raises InferenceError. The server sets model, version and id of each response."""


def is_decoupled(config: ModelConfig) -> bool:
    return bool(config.model_transaction_policy.decoupled)


def metadata_of(model: Model) -> ModelMetadataResponse:
    config = model.config
    batch = [-1] if config.max_batch_size > 0 else []
    metadata = ModelMetadataResponse(
        name=model.name, versions=model.versions, platform=config.platform or config.backend
    )
    for tensors, shown in ((config.input, metadata.inputs), (config.output, metadata.outputs)):
        for tensor in tensors:
            datatype = datatype_of(tensor.data_type)
            shown.add(name=tensor.name, datatype=datatype, shape=[*batch, *tensor.dims])
    return metadata


def datatype_of(configured: int) -> str:
    """KServe's name of a configuration's type: `BYTES` for `TYPE_STRING`."""
    name: str = DataType.Name(configured).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


class RequestControls(NamedTuple):
    """Triton's own parameters of a request; a `sequence_id` of 0 or "" names no sequence.

    `timeout_us`: 0 for none. `wants_final`: an empty response ends a decoupled model's answer.
    """

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    wants_final: bool = False


_CONTROLS: Final[Mapping[str, tuple[str, tuple[type, ...]]]] = {
    "sequence_id": ("sequence_id", (int, str)),
    "sequence_start": ("sequence_start", (bool,)),
    "sequence_end": ("sequence_end", (bool,)),
    "priority": ("priority", (int,)),
    "timeout": ("timeout_us", (int,)),
    "triton_enable_empty_final_response": ("wants_final", (bool,)),
}


def read_parameters(request: ModelInferRequest) -> tuple[RequestControls, dict[str, Parameter]]:
    """Triton's own parameters, and the model's. Raises InferenceError."""
    controls: dict[str, Any] = {}
    others: dict[str, Parameter] = {}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise invalid(f"parameter '{name}': it has no value")
        value: Parameter = getattr(parameter, kind)
        if name not in _CONTROLS:
            others[name] = value
            continue
        field, types = _CONTROLS[name]
        if not isinstance(value, types) or isinstance(value, bool) != (bool in types):
            raise invalid(f"parameter '{name}': {kind} is the wrong type")
        if not isinstance(value, str) and value < 0:
            raise invalid(f"parameter '{name}': {value} is below 0")
        controls[field] = value
    return RequestControls(**controls), others


def check_request(request: ModelInferRequest, config: ModelConfig) -> None:
    """Names, types and shapes of the inputs, names of the wanted outputs. Raises InferenceError."""
    model, known = request.model_name, {tensor.name: tensor for tensor in config.input}
    given = [tensor.name for tensor in request.inputs]
    for tensor in request.inputs:
        if tensor.name not in known:
            raise invalid(f"unexpected inference input '{tensor.name}' for model '{model}'")
        if given.count(tensor.name) > 1:
            raise invalid(f"input '{tensor.name}' of model '{model}' is given twice")
        wanted = known[tensor.name]
        datatype = datatype_of(wanted.data_type)
        if tensor.datatype != datatype:
            raise invalid(
                f"inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                f"but model '{model}' expects '{datatype}'"
            )
        _check_shape(tensor, wanted.dims, config)
    missing = [name for name, tensor in known.items() if name not in given and not tensor.optional]
    if missing:
        raise invalid(f"model '{model}' misses the required input(s) {missing}; got {given}")
    for tensor in (*request.inputs, *request.outputs):
        for name in tensor.parameters:  # shared memory, classification
            raise invalid(f"'{tensor.name}': its parameter '{name}' is not supported here")
    outputs = {tensor.name for tensor in config.output}
    for output in request.outputs:
        if output.name not in outputs:
            raise invalid(f"unexpected inference output '{output.name}' for model '{model}'")


def _check_shape(tensor: Any, dims: Any, config: ModelConfig) -> None:
    shape, expected = list(tensor.shape), list(dims)
    batch: list[int] = []
    if config.max_batch_size > 0:
        batch, shape = shape[:1], shape[1:]
        if not batch or not 1 <= batch[0] <= config.max_batch_size:
            raise invalid(
                f"input '{tensor.name}': batch size must be from 1 to {config.max_batch_size}, "
                f"but the shape is {list(tensor.shape)}"
            )
        expected_shown = [-1, *expected]
    else:
        expected_shown = expected
    fits = len(shape) == len(expected) and all(
        size >= 0 and wanted in (-1, size) for size, wanted in zip(shape, expected, strict=True)
    )
    if not fits:
        raise invalid(
            f"unexpected shape for input '{tensor.name}' of model '{config.name}': expected "
            f"{expected_shown}, got {list(tensor.shape)}"
        )
