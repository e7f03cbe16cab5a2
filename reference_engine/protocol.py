"""The messages between frontend and worker: length-prefixed msgpack frames over one connection.

Frontend to worker: Hello first, then AddRequest, AbortRequest, SetFaults. Worker to frontend: Ready
or Failed once, then one StepReport a step boundary. A peer that breaks the protocol loses the
connection, and the requests that came over it.
"""

import struct
from typing import Final, TypeVar

import msgspec

from reference_engine.config import EngineConfig
from reference_engine.core.accounting import Counters
from reference_engine.core.early_stop import Condition
from reference_engine.core.request import FinishReason, Phase, Sampling
from reference_engine.faults import Faults

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024  # a step's report at full load is under 1 MiB
_LENGTH: Final = struct.Struct("<I")
_Message = TypeVar("_Message")


class ProtocolError(RuntimeError):
    """A frame that breaks the protocol."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    faults: Faults
    secret: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", array_like=True):
    """The first frame; the secret shows that it comes from the worker's frontend."""

    secret: str


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add", array_like=True):
    """The n requests for the n answers of one client request share a `parent_id`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    priority: int = 0
    parent_id: str | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort", array_like=True):
    """`request_id` names a request, or a parent and with it all its children."""

    request_id: str
    reason: str


class SetFaults(msgspec.Struct, frozen=True, kw_only=True, tag="faults", array_like=True):
    faults: Faults


ToWorker = Hello | AddRequest | AbortRequest | SetFaults


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", array_like=True):
    """The worker has built its model. `gpu_name` and `gpu_uuid` (NVML's) are None on a CPU;
    `is_compiled`: whether plain steps are compiled or captured, which may have failed.
    """

    pid: int
    device: str
    vocab_size: int
    gpu_name: str | None
    gpu_uuid: str | None = None
    is_compiled: bool = False


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", array_like=True):
    """The settings cannot work here; the worker ends."""

    message: str


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One line of the lifecycle log, without the fields that the frontend adds."""

    t_ns: int
    event: str
    request_id: str
    step: int
    num_generated: int = 0
    num_blocks: int = 0
    reason: str | None = None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of the step log.

    `num_running`, `num_waiting` and `free_blocks` when it was scheduled; `scheduled` and `sampled`
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


class EarlyStopped(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The condition that was met, and the tokens that were left of max_tokens."""

    condition: Condition
    tokens_saved: int


class Ending(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`phase`: the request's when it ended; its counts of tokens are those of `Request`.

    `stop_reason`: the stop string, the stop token or "early_stop"; None for any other end.
    """

    finish_reason: FinishReason
    phase: Phase
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    stop_reason: str | int | None = None
    early_stop: EarlyStopped | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """New text for one request, which has an `ending` with its last output.

    `num_generated` counts all its tokens so far.
    """

    request_id: str
    text: str
    num_generated: int
    ending: Ending | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.ending is None else self.ending.finish_reason


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="report", array_like=True):
    """All changes since the last report. `step` is None when a boundary led to no step.

    `cached_blocks` of the `free_blocks` hold a prefix that can be hit; `host_blocks` hold what
    requests that were swapped out have computed.
    """

    step: StepRecord | None
    outputs: list[Output]
    events: list[Event]
    num_running: int
    num_waiting: int
    free_blocks: int
    cached_blocks: int
    host_blocks: int
    counters: Counters


FromWorker = Ready | Failed | StepReport

_encoder: Final = msgspec.msgpack.Encoder()


def encode_frame(message: ToWorker | FromWorker) -> bytes:
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def decode_payload(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes) -> _Message:
    try:
        return decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        # msgspec raises errors of others for bad bytes: for text that is not UTF-8, and for depth.
        raise ProtocolError(f"a frame that is no message: {error}") from error


class FrameReader:
    """Bytes in, whole payloads out; the caller does the reading."""

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
