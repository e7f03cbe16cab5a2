"""The part of Triton's module of this name that models use: `import triton_python_backend_utils`.

Names and behaviour follow Triton's Python backend. Tensors live in the host's memory, and a model
cannot call other models from here.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partialmethod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import DataType
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from reference_engine.context import Context

__all__ = ["deserialize_bytes_tensor", "serialize_byte_tensor"]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1


class TritonModelException(Exception):  # noqa: N818 Triton's name
    pass


class _ErrorCode(IntEnum):
    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = list(_ErrorCode)[:4]
    UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = list(_ErrorCode)[4:]

    def __init__(self, message: str, code: int = _ErrorCode.INTERNAL) -> None:
        self._message, self._code = message, _ErrorCode(code)

    def code(self) -> _ErrorCode:
        return self._code

    def message(self) -> str:
        return self._message


class Tensor:
    def __init__(self, name: str, numpy_array: npt.NDArray[Any]) -> None:
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        numpy_to_triton_type(numpy_array.dtype)
        self._name, self._array = name, np.ascontiguousarray(numpy_array).reshape(numpy_array.shape)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        return Tensor(name, np.from_dlpack(tensor))

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self._array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class InferenceResponse:
    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._outputs, self._error = list(output_tensors), error
        self._parameters = dict(parameters or {})

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> dict[str, Any]:
        return self._parameters


class InferenceResponseSender:
    """Any thread may send, also after `execute` has returned."""

    def __init__(
        self,
        deliver: Callable[[InferenceResponse | None, bool], object],
        context: Context,
        *,
        is_decoupled: bool,
    ) -> None:
        self._deliver, self._context, self._is_decoupled = deliver, context, is_decoupled
        self._lock = threading.Lock()
        self._num_sent = 0
        self._is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        problem = None
        with self._lock:
            if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
                problem = "Unsupported flag provided."
            elif response is None and not flags:
                problem = "Inference Response object must be provided when no flag is set."
            elif not self._is_decoupled and response is not None and self._num_sent:
                problem = "Non-decoupled model cannot send more than one response."
            elif not self._is_decoupled and response is None and not self._num_sent:
                problem = "Non-decoupled model cannot send complete final before a response."
            elif self._is_closed:
                problem = "Response sender has been closed."
            if problem is not None:
                raise TritonModelException(f"Unable to send response. {problem}")
            self._is_closed = bool(flags)
            self._num_sent += response is not None
            self._deliver(response, self._is_closed)

    def is_cancelled(self) -> bool:
        return self._context.is_stopped()


class InferenceRequest:
    def __init__(  # noqa: PLR0913 Triton's arguments
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Iterable[Tensor] = (),
        requested_output_names: Iterable[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._request_id, self._correlation_id = request_id, correlation_id
        self._inputs, self._requested = list(inputs), list(requested_output_names)
        self.model_name, self.model_version = model_name, model_version
        self._flags, self._timeout = flags, timeout
        self._parameters = dict(parameters or {})
        self._sender: InferenceResponseSender | None = None
        self._context = Context()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._requested

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """Microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> dict[str, Any]:
        return self._parameters

    def is_cancelled(self) -> bool:
        return self._context.is_stopped()

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            raise TritonModelException("A request that a model made has no response sender.")
        return self._sender

    def exec(self, **_: bool) -> InferenceResponse:
        raise TritonModelException("A model cannot call other models on this server.")

    async_exec = exec  # noqa: A003


class Logger:
    INFO, WARNING, ERROR, VERBOSE = logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG
    write: Callable[[int, str], object] = staticmethod(lambda *_: None)  # there is no server yet

    @classmethod
    def log(cls, message: str, level: int = logging.INFO) -> None:
        cls.write(level, message)

    log_info = partialmethod(log, level=INFO)
    log_warn = partialmethod(log, level=WARNING)
    log_error = partialmethod(log, level=ERROR)
    log_verbose = partialmethod(log, level=VERBOSE)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((t for t in inference_request.inputs() if t.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((t for t in inference_response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((p for p in model_config.get("input", ()) if p["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((p for p in model_config.get("output", ()) if p["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> Any:
    return triton_string_to_numpy(DataType.Name(data_type))


def numpy_to_triton_type(data_type: Any) -> int:
    name = np_to_triton_dtype(np.dtype(data_type))
    if name is None:
        raise TritonModelException(f"Tensors of {data_type} are not supported.")
    return int(DataType.Value("TYPE_" + ("STRING" if name == "BYTES" else name)))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    name = triton_type_string.removeprefix("TYPE_")
    return triton_to_np_dtype("BYTES" if name == "STRING" else name)
