"""A request is checked before a model sees it."""

from collections.abc import Callable

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelInferRequest

from reference_engine.triton.model import (
    InferenceError,
    RequestControls,
    check_request,
    read_parameters,
)

CONFIG = text_format.Parse(
    """
    name: "m" max_batch_size: 4
    input { name: "text" data_type: TYPE_STRING dims: 1 }
    input { name: "size" data_type: TYPE_INT32 dims: [-1, 2] }
    input { name: "hint" data_type: TYPE_BOOL dims: 1 optional: true }
    output { name: "out" data_type: TYPE_STRING dims: 1 }
    """,
    ModelConfig(),
)


def request() -> ModelInferRequest:
    made = ModelInferRequest(model_name="m")
    made.inputs.add(name="text", datatype="BYTES", shape=[4, 1])
    made.inputs.add(name="size", datatype="INT32", shape=[4, 7, 2])
    made.outputs.add(name="out")
    return made


def test_a_fitting_request_passes() -> None:
    check_request(request(), CONFIG)


@pytest.mark.parametrize(("change", "message"), [
    (lambda r: r.inputs.pop(1), "model 'm' misses the required input(s) ['size']; got ['text']"),
    (lambda r: r.inputs.add(name="z"), "unexpected inference input 'z' for model 'm'"),
    (lambda r: r.inputs.append(r.inputs[0]), "input 'text' of model 'm' is given twice"),
    (lambda r: setattr(r.inputs[0], "datatype", "FP32"), "data-type is 'FP32', but"),
    (lambda r: r.inputs[0].shape.append(1), "expected [-1, 1], got [4, 1, 1]"),
    (lambda r: r.inputs[1].shape.pop(), "expected [-1, -1, 2], got [4, 7]"),
    (lambda r: r.inputs[1].shape.__setitem__(1, -3), "expected [-1, -1, 2], got [4, -3, 2]"),
    (lambda r: r.inputs[0].shape.__setitem__(0, 5), "from 1 to 4, but the shape is [5, 1]"),
    (lambda r: r.inputs[0].parameters["shared_memory_region"].SetInParent(), "'text': its par"),
    (lambda r: r.outputs[0].parameters["classification"].SetInParent(), "'out': its parameter 'cl"),
    (lambda r: r.outputs.add(name="z"), "unexpected inference output 'z' for model 'm'"),
])  # fmt: skip
def test_a_request_that_does_not_fit_is_refused(
    change: Callable[[ModelInferRequest], object], message: str
) -> None:
    made = request()
    change(made)
    with pytest.raises(InferenceError) as caught:
        check_request(made, CONFIG)
    assert message in caught.value.message


def test_parameters_are_tritons_or_the_models() -> None:
    made = request()
    made.parameters["sequence_id"].string_param = "s"
    made.parameters["sequence_end"].bool_param = True
    made.parameters["timeout"].int64_param = 5
    made.parameters["temperature"].double_param = 0.5
    controls, others = read_parameters(made)
    assert controls == RequestControls(sequence_id="s", sequence_end=True, timeout_us=5)
    assert others == {"temperature": 0.5}


@pytest.mark.parametrize(("name", "kind", "value", "message"), [
    ("sequence_start", "int64_param", 1, "'sequence_start': int64_param is the wrong type"),
    ("sequence_id", "bool_param", True, "'sequence_id': bool_param is the wrong type"),
    ("timeout", "int64_param", -1, "'timeout': -1 is below 0"),
])  # fmt: skip
def test_a_parameter_of_the_wrong_type_is_refused(
    name: str, kind: str, value: object, message: str
) -> None:
    made = request()
    setattr(made.parameters[name], kind, value)
    with pytest.raises(InferenceError, match=message):
        read_parameters(made)


def test_a_parameter_without_a_value_is_refused() -> None:
    made = request()
    made.parameters["x"].SetInParent()
    with pytest.raises(InferenceError, match="parameter 'x': it has no value"):
        read_parameters(made)
