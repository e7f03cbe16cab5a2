"""A model whose answer is made by others in turn: Triton's ensemble.

Each step's context is a child of the request's, so a cancellation reaches the step that runs; no
further step starts after it.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeAlias

import numpy.typing as npt
from grpc import StatusCode
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from reference_engine.config import EngineConfigError
from reference_engine.context import Context
from reference_engine.triton.model import (
    InferenceError,
    Model,
    cancelled,
    check_request,
    is_decoupled,
)
from reference_engine.triton.tensors import read_inputs, read_outputs, write_input, write_output

_Tensors: TypeAlias = dict[str, npt.NDArray[Any]]


class Ensemble:
    """`models` are all of the repository; they may be complete only after this."""

    def __init__(self, config: ModelConfig, version: str, models: Mapping[str, Model]) -> None:
        self.name, self.config = config.name, config
        self.versions: tuple[str, ...] = (version,)
        self._models = models
        self._steps = list(config.ensemble_scheduling.step)

    @property
    def is_ready(self) -> bool:
        return all(self._models[step.model_name].is_ready for step in self._steps)

    async def infer(
        self, request: ModelInferRequest, context: Context
    ) -> AsyncGenerator[ModelInferResponse, None]:
        tensors = read_inputs(request)
        for step in self._steps:
            if context.is_stopped():
                raise cancelled()
            child = Context()
            context.link_child(child)
            try:
                outputs = await self._run(step, request, tensors, child)
            except InferenceError as error:
                message = f"in ensemble '{self.name}', {error.message}"
                raise InferenceError(error.code, message) from error
            finally:
                context.unlink_child(child)
            for name, to in step.output_map.items():
                if name in outputs:
                    tensors[to] = outputs[name]
        yield self._response(request, tensors)

    async def _run(
        self, step: Any, request: ModelInferRequest, tensors: _Tensors, child: Context
    ) -> _Tensors:
        model = self._models[step.model_name]
        wanted = ModelInferRequest(model_name=model.name, id=request.id)
        for name, parameter in request.parameters.items():
            wanted.parameters[name].CopyFrom(parameter)
        for name, source in step.input_map.items():
            if source in tensors:
                write_input(wanted, name, tensors[source])
        check_request(wanted, model.config)
        responses = [response async for response in model.infer(wanted, child)]
        return read_outputs(responses[0])

    def _response(self, request: ModelInferRequest, tensors: _Tensors) -> ModelInferResponse:
        response = ModelInferResponse()
        wanted = {output.name for output in request.outputs}
        for output in self.config.output:
            if wanted and output.name not in wanted:
                continue
            if output.name not in tensors:
                message = f"no step of ensemble '{self.name}' gave '{output.name}'"
                raise InferenceError(StatusCode.INTERNAL, message)
            write_output(response, output.name, tensors[output.name])
        return response


def order_steps(config: ModelConfig, others: Mapping[str, ModelConfig]) -> None:
    """Put each step after the steps that make its inputs. Raises EngineConfigError."""
    known = {tensor.name for tensor in config.input}
    left, ordered = list(config.ensemble_scheduling.step), list[Any]()
    for step in left:
        _check_step(config, step, others)
    while left:
        ready = next((step for step in left if known >= set(step.input_map.values())), None)
        if ready is None:
            missing = sorted({s for step in left for s in step.input_map.values()} - known)
            raise _problem(config, f"no step or input makes {missing} before a step needs it")
        left.remove(ready)
        ordered.append(ready)
        known |= set(ready.output_map.values())
    if missing := [tensor.name for tensor in config.output if tensor.name not in known]:
        raise _problem(config, f"no step makes the output(s) {missing}")
    del config.ensemble_scheduling.step[:]
    config.ensemble_scheduling.step.extend(ordered)


def _check_step(config: ModelConfig, step: Any, others: Mapping[str, ModelConfig]) -> None:
    model = others.get(step.model_name)
    if model is None:
        raise _problem(config, f"there is no model {step.model_name!r}")
    if model is config or model.HasField("ensemble_scheduling"):
        raise _problem(config, f"step {step.model_name!r} is an ensemble, which is not supported")
    if is_decoupled(model):
        raise _problem(config, f"step {step.model_name!r} is decoupled, which is not supported")
    if step.model_version > 0:
        raise _problem(config, f"step {step.model_name!r}: set model_version to -1, the latest")
    inputs = {tensor.name: tensor.optional for tensor in model.input}
    outputs = {tensor.name for tensor in model.output}
    unknown = sorted({*step.input_map} - {*inputs} | {*step.output_map} - outputs)
    missing = [name for name, may in inputs.items() if not may and name not in step.input_map]
    if unknown or missing:
        what = f"does not have {unknown}" if unknown else f"needs {missing}"
        raise _problem(config, f"step {step.model_name!r} {what}")


def _problem(config: ModelConfig, text: str) -> EngineConfigError:
    return EngineConfigError(f"ensemble {config.name!r}: ensemble_scheduling: {text}")
