"""What frontend and worker say to each other: length-prefixed msgpack frames over one socket.

Frontend to worker: AddRequest, AbortRequest, SetFaults. Worker to frontend: Ready or Failed once,
then one StepReport a step boundary. Each side takes the end of the stream for the other's death.
"""

import struct
from typing import Final

import msgspec

from reference_engine.config import EngineConfig
from reference_engine.core.counters import Counters
from reference_engine.faults import Faults
from reference_engine.request import Sampling

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024  # a step's report at full load is under 1 MiB
_LENGTH: Final = struct.Struct("<I")


class ProtocolError(RuntimeError):
    """A frame that the other side cannot have meant."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the frontend hands to its worker at birth, as one JSON argument."""

    config: EngineConfig
    faults: Faults


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add", array_like=True):
    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort", array_like=True):
    request_id: str
    reason: str


class SetFaults(msgspec.Struct, frozen=True, kw_only=True, tag="faults", array_like=True):
    faults: Faults


ToWorker = AddRequest | AbortRequest | SetFaults


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", array_like=True):
    """The worker has built its model. `gpu_name` is None on a CPU."""

    pid: int
    device: str
    vocab_size: int
    gpu_name: str | None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", array_like=True):
    """The settings cannot work here, and why; the worker ends."""

    message: str


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A stage in a request's life, as the lifecycle log tells it."""

    t_ns: int
    event: str
    request_id: str
    step: int
    num_generated: int = 0
    num_blocks: int = 0
    reason: str | None = None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step, as the frames carry it and as the step log shows it.

    `num_running`, `num_waiting` and `free_blocks` as it was scheduled; `scheduled` and `sampled`
    map request ids to tokens.
    """

    step: int
    started_ns: int
    ended_ns: int
    num_running: int
    num_waiting: int
    free_blocks: int
    scheduled: dict[str, int]
    sampled: dict[str, int]


class Output(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """New text for one request; `num_generated` counts all its tokens so far."""

    request_id: str
    text: str
    num_generated: int
    finish_reason: str | None


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="report", array_like=True):
    """All that changed since the last report. `step` is None when a boundary led to no step."""

    step: StepRecord | None
    outputs: list[Output]
    events: list[Event]
    num_running: int
    num_waiting: int
    free_blocks: int
    counters: Counters


FromWorker = Ready | Failed | StepReport

_encoder: Final = msgspec.msgpack.Encoder()


def encode_frame(message: ToWorker | FromWorker) -> bytes:
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Bytes in, whole payloads out. Pure: the caller does the reading."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. Raises ProtocolError for one over MAX_FRAME_BYTES."""
        payloads = []
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return payloads
