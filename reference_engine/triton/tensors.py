"""Tensors of KServe v2, typed or raw, as numpy arrays, and back.

Raw contents are little-endian and in row-major order; each element of a BYTES tensor follows its
length in four bytes. A BYTES array holds `bytes` objects.
"""

import struct
from itertools import zip_longest
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from reference_engine.triton.model import invalid

_LENGTH: Final = struct.Struct("<I")
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def read_inputs(request: ModelInferRequest) -> dict[str, npt.NDArray[Any]]:
    """The arrays by name; they cannot be written to. Raises InferenceError."""
    return _read(request.inputs, request.raw_input_contents)


def read_outputs(response: ModelInferResponse) -> dict[str, npt.NDArray[Any]]:
    return _read(response.outputs, response.raw_output_contents)


def write_input(request: ModelInferRequest, name: str, array: npt.NDArray[Any]) -> None:
    _write(request.inputs, request.raw_input_contents, name, array)


def write_output(response: ModelInferResponse, name: str, array: npt.NDArray[Any]) -> None:
    """Add an output with raw contents. An array of objects holds `bytes` or `str`."""
    _write(response.outputs, response.raw_output_contents, name, array)


def _read(tensors: Any, raw: Any) -> dict[str, npt.NDArray[Any]]:
    if raw and len(raw) != len(tensors):
        raise invalid(f"{len(raw)} raw contents for {len(tensors)} inputs")
    arrays = {}
    for tensor, data in zip_longest(tensors, raw):
        if raw and tensor.HasField("contents"):
            raise invalid(f"input '{tensor.name}': raw contents and typed contents")
        try:
            array = _raw(tensor, data) if raw else _typed(tensor)
            arrays[tensor.name] = array.reshape(tensor.shape)
        except (OverflowError, ValueError) as error:  # a number or a size is beyond numpy
            raise invalid(f"input '{tensor.name}': {error}") from error
        arrays[tensor.name].flags.writeable = False
    return arrays


def _write(tensors: Any, raw: Any, name: str, array: npt.NDArray[Any]) -> None:
    if array.dtype.kind in "OSU":
        datatype, data = "BYTES", _join_bytes(array)
    else:
        datatype, data = np_to_triton_dtype(array.dtype), array.tobytes()
    tensors.add(name=name, datatype=datatype, shape=array.shape)
    raw.append(data)


def _raw(tensor: Any, data: bytes) -> npt.NDArray[Any]:
    size = prod(tensor.shape)
    if tensor.datatype == "BYTES":
        return _objects(tensor, _split_bytes(tensor.name, data))
    dtype = np.dtype(_numpy_type(tensor))
    if len(data) != size * dtype.itemsize:
        raise invalid(
            f"input '{tensor.name}': {len(data)} bytes, where shape {list(tensor.shape)} of "
            f"{tensor.datatype} takes {size * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype)


def _typed(tensor: Any) -> npt.NDArray[Any]:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise invalid(f"input '{tensor.name}': {tensor.datatype} needs raw contents")
    given = [name.name for name, _ in tensor.contents.ListFields()]
    if any(name != field for name in given):
        raise invalid(f"input '{tensor.name}': {tensor.datatype} is read from {field}, not {given}")
    values = getattr(tensor.contents, field)
    if tensor.datatype == "BYTES":
        return _objects(tensor, list(values))
    _check_count(tensor, len(values))
    return np.array(values, dtype=_numpy_type(tensor))


def _numpy_type(tensor: Any) -> Any:
    dtype = triton_to_np_dtype(tensor.datatype)
    if dtype is None:
        raise invalid(f"input '{tensor.name}': there is no data-type '{tensor.datatype}'")
    return dtype


def _objects(tensor: Any, values: list[bytes]) -> npt.NDArray[Any]:
    _check_count(tensor, len(values))
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array


def _check_count(tensor: Any, count: int) -> None:
    if count != prod(tensor.shape):
        raise invalid(
            f"input '{tensor.name}': {count} elements, where shape {list(tensor.shape)} has "
            f"{prod(tensor.shape)}"
        )


def _split_bytes(name: str, data: bytes) -> list[bytes]:
    elements: list[bytes] = []
    start = 0
    while start < len(data):
        at = start + _LENGTH.size
        end = at + _LENGTH.unpack_from(data, start)[0] if at <= len(data) else at
        if end > len(data):
            raise invalid(f"input '{name}': element {len(elements)} is cut short")
        elements.append(data[at:end])
        start = end
    return elements


def _join_bytes(array: npt.NDArray[Any]) -> bytes:
    parts = []
    for element in array.ravel().tolist():
        value = element if isinstance(element, bytes) else str(element).encode()
        parts.append(with_length(value))
    return b"".join(parts)


def with_length(element: bytes) -> bytes:
    return _LENGTH.pack(len(element)) + element
