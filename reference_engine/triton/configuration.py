"""Triton's model configuration: what of a config.pbtxt is supported, and the scheduler it asks for.

Anything else that is set is refused by its name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.text_format import Parse, ParseError
from tritonclient.grpc.model_config_pb2 import (
    DataType,
    ModelConfig,
    ModelInstanceGroup,
    ModelQueuePolicy,
    ModelSequenceBatching,
)

from reference_engine.config import EngineConfigError
from reference_engine.triton.model import RequestControls, invalid
from reference_engine.triton.python_backend.messages import Control
from reference_engine.triton.queue import BatchSizes, ModelScheduler, Queue, QueuePolicy
from reference_engine.triton.sequences import Sequences

DEFAULT_IDLE_US: Final = 1_000_000
_SUPPORTED: Final = {
    "": "name platform backend version_policy max_batch_size input output dynamic_batching "
    "sequence_batching ensemble_scheduling instance_group default_model_filename parameters "
    "model_transaction_policy",
    "version_policy": "latest",
    "version_policy.latest": "num_versions",
    "input": "name data_type dims optional allow_ragged_batch",
    "output": "name data_type dims",
    "dynamic_batching": "preferred_batch_size max_queue_delay_microseconds priority_levels "
    "default_priority_level default_queue_policy priority_queue_policy",
    **dict.fromkeys(
        ("dynamic_batching.default_queue_policy", "dynamic_batching.priority_queue_policy"),
        "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size",
    ),
    "sequence_batching": "max_sequence_idle_microseconds control_input direct oldest",
    "sequence_batching.control_input": "name control",
    "sequence_batching.control_input.control": "kind int32_false_true fp32_false_true "
    "bool_false_true data_type",
    "sequence_batching.direct": "",
    "sequence_batching.oldest": "preferred_batch_size max_queue_delay_microseconds "
    "max_candidate_sequences",
    "ensemble_scheduling": "step",
    "ensemble_scheduling.step": "model_name model_version input_map output_map",
    "instance_group": "name kind count",
    "parameters": "string_value",
    "model_transaction_policy": "decoupled",
}
_Control = ModelSequenceBatching.Control
_ID_TYPES: Final = {  # and where their numbers end
    DataType.TYPE_UINT64: 2**64,
    DataType.TYPE_INT64: 2**63,
    DataType.TYPE_UINT32: 2**32,
    DataType.TYPE_INT32: 2**31,
    DataType.TYPE_STRING: None,
}


def read_configuration(file: Path) -> ModelConfig:
    """Raises EngineConfigError with one sentence."""
    try:
        config = Parse(file.read_text(encoding="utf-8"), ModelConfig())
    except FileNotFoundError:
        raise EngineConfigError(f"{file} is missing: write the model's configuration") from None
    except (OSError, ValueError, ParseError) as error:
        raise EngineConfigError(f"{file}: {error}") from error
    name = file.parent.name
    config.name = config.name or name
    for problem in _problems(config, name):
        raise EngineConfigError(f"{file}: {problem}")
    return config


def _problems(config: ModelConfig, name: str) -> Iterator[str]:
    for field in _unsupported(config):
        yield f"{field} is not supported here: remove it"
    if config.name != name:
        yield f"name is {config.name!r}, but the folder is {name!r}: make them equal"
    is_ensemble = config.HasField("ensemble_scheduling")
    if is_ensemble != (config.platform == "ensemble") or (not is_ensemble and config.platform):
        yield f'platform {config.platform!r} is not supported here: set backend to "python"'
    if not is_ensemble and config.backend != "python":
        yield f'backend {config.backend!r} is not supported here: use "python"'
    if config.version_policy.latest.num_versions > 1:
        yield "version_policy.latest.num_versions over 1 is not supported here"
    if config.max_batch_size < 0:
        yield f"max_batch_size is {config.max_batch_size}: it must be 0 or more"
    yield from _tensor_problems(config)
    for group in config.instance_group:
        kind = ModelInstanceGroup.Kind.Name(group.kind)
        if kind not in ("KIND_AUTO", "KIND_CPU"):
            yield f"instance_group.kind {kind} is not supported here: use KIND_CPU"
    yield from _batching_problems(config)


def _unsupported(message: Message, path: str = "") -> Iterator[str]:
    for field, value in message.ListFields():
        here = f"{path}.{field.name}" if path else field.name
        if field.name not in _SUPPORTED[path].split():
            yield here
        elif field.message_type is not None:
            is_map = field.message_type.GetOptions().map_entry
            values = (value.values() if is_map else value) if field.is_repeated else [value]
            for one in values:
                if isinstance(one, Message):
                    yield from _unsupported(one, here)


def _tensor_problems(config: ModelConfig) -> Iterator[str]:
    for kind, tensors in (("input", config.input), ("output", config.output)):
        if not tensors:
            yield f"{kind} is missing: name at least one"
        names = [tensor.name for tensor in tensors]
        for tensor in tensors:
            if not tensor.name or names.count(tensor.name) > 1:
                yield f"{kind}.name {tensor.name!r}: each needs a name of its own"
            if tensor.data_type in (DataType.TYPE_INVALID, DataType.TYPE_BF16):  # numpy has none
                yield f"{kind} {tensor.name!r}: data_type is missing, or TYPE_BF16"
            if not tensor.dims or any(size < -1 or size == 0 for size in tensor.dims):
                yield f"{kind} {tensor.name!r}: dims must be sizes over 0, or -1 for any"


def _batching_problems(config: ModelConfig) -> Iterator[str]:
    dynamic, sequence = config.dynamic_batching, config.sequence_batching
    for path, batching in (("dynamic_batching", dynamic), ("sequence_batching", sequence.oldest)):
        sizes = batching.preferred_batch_size
        if any(not 0 < size <= max(1, config.max_batch_size) for size in sizes):
            yield f"{path}.preferred_batch_size {list(sizes)}: sizes are from 1 to max_batch_size"
    levels, default = dynamic.priority_levels, dynamic.default_priority_level
    if (levels or default) and not 1 <= default <= levels:
        yield f"dynamic_batching.default_priority_level is {default}: use 1 to {levels}"
    for level in dynamic.priority_queue_policy:
        if not 1 <= level <= levels:
            yield f"dynamic_batching.priority_queue_policy has level {level}: use 1 to {levels}"
    if sequence.HasField("oldest") and sequence.oldest.max_candidate_sequences < 1:
        yield "sequence_batching.oldest.max_candidate_sequences must be over 0"
    yield from _control_problems(sequence)


def _control_problems(sequence: ModelSequenceBatching) -> Iterator[str]:
    for control_input in sequence.control_input:
        for control in control_input.control:
            given = [control.int32_false_true, control.fp32_false_true, control.bool_false_true]
            is_id = control.kind == _Control.CONTROL_SEQUENCE_CORRID
            if not is_id and sorted(map(len, given)) != [0, 0, 2]:
                yield f"control_input {control_input.name!r}: give one pair, false and true"
            if is_id and control.data_type not in _ID_TYPES:
                yield f"control_input {control_input.name!r}: data_type must be integer or string"


def make_scheduler(config: ModelConfig, *, is_faithful: bool) -> ModelScheduler:
    instances, largest = count_instances(config), max(1, config.max_batch_size)
    if config.HasField("sequence_batching"):
        batching = config.sequence_batching
        oldest = batching.oldest if batching.HasField("oldest") else None
        return Sequences(
            instances,
            largest if oldest is None else oldest.max_candidate_sequences,
            None if oldest is None else _sizes(oldest, largest),
            model=config.name,
            idle_us=batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US,
            is_faithful=is_faithful,
        )
    if not config.HasField("dynamic_batching"):
        return Queue(instances, is_faithful=is_faithful)
    dynamic = config.dynamic_batching
    return Queue(
        instances,
        _sizes(dynamic, largest),
        is_faithful=is_faithful,
        policy=_policy(dynamic.default_queue_policy),
        levels=dynamic.priority_levels,
        default_level=dynamic.default_priority_level,
        level_policies={
            level: _policy(policy) for level, policy in dynamic.priority_queue_policy.items()
        },
    )


def count_instances(config: ModelConfig) -> int:
    return sum(max(1, group.count) for group in config.instance_group) or 1


def _sizes(batching: Any, largest: int) -> BatchSizes:
    preferred = tuple(sorted(batching.preferred_batch_size))
    return BatchSizes(largest, preferred, batching.max_queue_delay_microseconds)


def _policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        policy.default_timeout_microseconds,
        policy.allow_timeout_override,
        policy.timeout_action == ModelQueuePolicy.TimeoutAction.DELAY,
        policy.max_queue_size,
    )


def controls_of(
    config: ModelConfig, asked: RequestControls, *, is_ready: bool = True
) -> list[Control]:
    """The control inputs of one request. Raises InferenceError for an id that does not fit."""
    sequence = asked.sequence_id
    flags = {
        _Control.CONTROL_SEQUENCE_START: asked.sequence_start,
        _Control.CONTROL_SEQUENCE_END: asked.sequence_end,
        _Control.CONTROL_SEQUENCE_READY: is_ready,
    }
    controls: list[Control] = []
    for control_input in config.sequence_batching.control_input:
        for control in control_input.control:
            if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
                datatype = DataType.Name(control.data_type).removeprefix("TYPE_")
                value: int | float | str = sequence
                end = _ID_TYPES[control.data_type]
                if end is not None and (isinstance(sequence, str) or sequence >= end):
                    raise invalid(f"sequence id {sequence!r} is no {datatype}, as the model wants")
            else:
                datatype, (false, true) = _values(control)
                value = true if flags[control.kind] else false
            controls.append((control_input.name, datatype, value))
    return controls


def _values(control: Any) -> tuple[str, Any]:
    if control.int32_false_true:
        return "INT32", control.int32_false_true
    if control.fp32_false_true:
        return "FP32", control.fp32_false_true
    return "BOOL", control.bool_false_true


def as_dict(config: ModelConfig) -> dict[str, Any]:
    """The configuration as Triton hands it to a model: every field, 64-bit integers as numbers."""
    shown = MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _make_numbers(config.DESCRIPTOR, shown)
    return shown


def _make_numbers(descriptor: Any, shown: dict[str, Any]) -> None:
    for field in descriptor.fields:
        value = shown.get(field.name)
        if value is None:
            continue
        if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            shown[field.name] = [int(one) for one in value] if field.is_repeated else int(value)
        elif field.message_type is not None:
            kind = field.message_type
            if kind.GetOptions().map_entry:
                kind, value = kind.fields_by_name["value"].message_type, list(value.values())
            if kind is not None:
                for one in value if isinstance(value, list) else [value]:
                    _make_numbers(kind, one)
