"""Tensors over the wire: what tritonclient writes is what is read, and bad ones are refused."""

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferResult
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from reference_engine.triton.model import InferenceError
from reference_engine.triton.tensors import read_inputs, write_output
from tests.reference_engine.triton.served_repository import request_of, tensor

DTYPES = ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")


def typed_request(datatype: str, shape: list[int], **contents: Any) -> ModelInferRequest:
    request = ModelInferRequest()
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    return request


@pytest.mark.parametrize("array", [
    *(np.array([[0, 1], [1, 0], [1, 1]], dtype) for dtype in DTYPES),
    np.array([[b"", "ä".encode(), b"\0end\0"]], dtype=np.object_),
    np.empty((0, 3), dtype=np.object_),
    np.empty((2, 0), dtype="f4"),
])  # fmt: skip
def test_what_the_client_sends_is_read_and_comes_back(array: Any) -> None:
    read = read_inputs(request_of(tensor("x", array)))["x"]
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)
    response = ModelInferResponse()
    write_output(response, "y", read)
    np.testing.assert_array_equal(InferResult(response).as_numpy("y"), array)


@pytest.mark.parametrize(("request_", "values"), [
    (typed_request("BYTES", [2], bytes_contents=[b"a", b"\0"]), [b"a", b"\0"]),
    (typed_request("INT8", [2, 1], int_contents=[-128, 127]), [[-128], [127]]),
    (typed_request("BOOL", [1], bool_contents=[True]), [True]),
])  # fmt: skip
def test_typed_contents_are_read(request_: ModelInferRequest, values: list[Any]) -> None:
    assert read_inputs(request_)["x"].tolist() == values


def raw(datatype: str, shape: list[int], *data: bytes) -> ModelInferRequest:
    request = typed_request(datatype, shape)
    request.raw_input_contents.extend(data)
    return request


both = typed_request("INT32", [1], int_contents=[1])
both.raw_input_contents.append(b"1234")


@pytest.mark.parametrize(("request_", "message"), [
    (raw("INT32", [2], b"1234"), "input 'x': 4 bytes, where shape [2] of INT32 takes 8"),
    (raw("INT32", [1], b"1234", b"1234"), "2 raw contents for 1 inputs"),
    (raw("BYTES", [1], b"\5\0\0\0abcd"), "input 'x': element 0 is cut short"),
    (raw("BYTES", [1], b"\0\0\0\0\0\0"), "input 'x': element 1 is cut short"),
    (raw("BYTES", [2], b"\0\0\0\0"), "input 'x': 1 elements, where shape [2] has 2"),
    (raw("COMPLEX", [1], b"1234"), "input 'x': there is no data-type 'COMPLEX'"),
    (both, "input 'x': raw contents and typed contents"),
    (typed_request("INT32", [2], int_contents=[1]), "input 'x': 1 elements, where shape [2] has 2"),
    (typed_request("BYTES", [0, 2**62, 4]), "input 'x': array is too big"),
    (typed_request("INT8", [1], int_contents=[300]), "300 out of bounds for int8"),
    (typed_request("FP16", [1], fp32_contents=[1.0]), "input 'x': FP16 needs raw contents"),
    (typed_request("INT32", [1], fp32_contents=[1.0]), "read from int_contents, not ['fp32_"),
])  # fmt: skip
def test_contents_that_do_not_fit_are_refused(request_: ModelInferRequest, message: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read_inputs(request_)
    assert message in caught.value.message
