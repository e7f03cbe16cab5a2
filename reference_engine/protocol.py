"""The messages between frontend and worker, in the frames of `wire`.

Frontend to worker: Hello first, then AddRequest, AbortRequest, SetFaults. Worker to frontend: Ready
or Failed once, then one StepReport a step boundary.
"""

from typing import Final

import msgspec

from reference_engine.config import EngineConfig
from reference_engine.context import CancelReason, Signal
from reference_engine.core.accounting import Counters
from reference_engine.core.early_stop import Condition
from reference_engine.core.request import FinishReason, Phase, Sampling
from reference_engine.faults import Faults
from reference_engine.wire import Beat, Beats, Failed, Hello

OUT_OF_MEMORY: Final = "out_of_memory"  # an answer's step did not fit into the device's memory
LESS_MEMORY: Final = "lower --max-num-batched-tokens, --max-num-seqs or --num-blocks"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a worker's standard input. Port 0 takes a free one; without a
    `metrics_port` nothing is served there. A prefill worker has a `decode_worker` at this address.
    `is_restarted`: another one of this name has died, and its frontends are up.
    """

    config: EngineConfig
    faults: Faults
    secret: str
    name: str = "worker-0"
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int | None = None
    peer_timeout_s: float = Beats().timeout_s
    decode_worker: tuple[str, int] | None = None
    is_restarted: bool = False


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a worker's standard output; its model is not yet built."""

    port: int
    metrics_port: int | None = None

    def metrics_urls(self, host: str) -> list[str]:
        """One or none."""
        return [f"http://{host}:{self.metrics_port}/metrics"] if self.metrics_port else []


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add", array_like=True):
    """The n requests for the n answers of one client request share a `parent_id`.

    `answer`: tokens that another worker has generated; this worker continues after them. If the
    other one is its prefill worker, the keys and values that it hands over follow in KVBlocks.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    priority: int = 0
    parent_id: str | None = None
    answer: list[int] = []
    handed_over: "HandedOver | None" = None


class HandedOver(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The blocks hold all tokens but the newest. `probability`: its own, if it was asked for."""

    num_bytes: int
    num_cached_tokens: int
    probability: float | None


class KVBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="kv", array_like=True):
    """The next piece of the keys and values of a request, short enough to let an abort pass."""

    request_id: str
    data: bytes


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort", array_like=True):
    """`request_id` names a request, or a parent and with it all its children."""

    request_id: str
    reason: CancelReason
    signal: Signal = Signal.STOP


class SetFaults(msgspec.Struct, frozen=True, kw_only=True, tag="faults", array_like=True):
    faults: Faults


ToWorker = Hello | Beat | AddRequest | KVBlocks | AbortRequest | SetFaults


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", array_like=True):
    """The worker has built its model; `worker` is its name. `gpu_name` and `gpu_uuid` (NVML's) are
    None on a CPU; `is_compiled`: whether plain steps are compiled or captured, which may have
    failed; `config`: None of a worker that is not of this engine.
    """

    pid: int
    device: str
    vocab_size: int
    gpu_name: str | None
    gpu_uuid: str | None = None
    is_compiled: bool = False
    worker: str = ""
    config: EngineConfig | None = None


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One line of the lifecycle log, without the fields that the frontend adds."""

    t_ns: int
    event: str
    request_id: str
    step: int
    num_generated: int = 0
    num_blocks: int = 0
    reason: str | None = None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of the step log of a worker.

    `num_running`, `num_waiting` and `free_blocks` are from when it was scheduled; `scheduled` and
    `sampled` map request ids to tokens. In a step that was out of memory nothing was sampled.
    """

    step: int
    started_ns: int
    ended_ns: int
    num_running: int
    num_waiting: int
    free_blocks: int
    scheduled: dict[str, int]
    sampled: dict[str, int]
    worker: str = ""


class EarlyEnding(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The condition that was met, and the tokens that were left of max_tokens."""

    condition: Condition
    tokens_saved: int


class Ending(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`phase`: the request's phase when it ended. The counts of tokens are defined as in `Request`.

    `stop_reason`: the stop string, the stop token or "early_stop"; for an error, what it was; None
    for any other end.
    """

    finish_reason: FinishReason
    phase: Phase
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    stop_reason: str | int | None = None
    early_stop: EarlyEnding | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """New text for one request, which has an `ending` with its last output.

    `num_generated` counts all its tokens so far; `token_id` is the newest, None if there is no new
    one.
    """

    request_id: str
    text: str
    num_generated: int
    ending: Ending | None = None
    token_id: int | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.ending is None else self.ending.finish_reason


class StepReport(
    msgspec.Struct, frozen=True, kw_only=True, tag="report", array_like=True, gc=False
):
    """All changes since the last report. `step` is None when a boundary led to no step.

    `cached_blocks` of the `free_blocks` hold a prefix that can be hit; `host_blocks` hold what
    requests that were swapped out have computed.
    """

    step: StepRecord | None = None
    outputs: list[Output] = []
    events: list[RequestEvent] = []
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int
    cached_blocks: int = 0
    host_blocks: int = 0
    counters: Counters
    worker: str = ""


FromWorker = Ready | Failed | Beat | StepReport
