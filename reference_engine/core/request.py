"""A request as the engine knows it, and the only ways in which its status may change.

    WAITING ──▶ RUNNING ◀──▶ PREEMPTED
       │           ├──▶ HANDING_OVER
       └───────────┴─────────────┴──────▶ FINISHED

A request is a list of tokens of which the first `num_computed_tokens` have their keys and values in
the cache. There is no prefill phase and no decode phase: what a request is owed is always
`num_tokens - num_computed_tokens`. Of a step that is in flight the new token is not known yet: a
placeholder counts for it, so that the next step can be planned. Preemption sets the computed tokens
back to zero and nothing else; the request then recomputes prompt and answer alike. If instead its
blocks were copied to the host, it keeps its computed tokens, and a `host_table` until it is
resumed.

A request can also begin at one worker and continue at another. The first worker hands it over: the
request is out of the batch, and holds its blocks until the other worker has them. At the other
worker it begins with an answer, and with a `host_table` as after a swap-out.
"""

from collections.abc import Sequence
from enum import Enum, StrEnum

import msgspec

from reference_engine.core.early_stop import EarlyStopping


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    HANDING_OVER = "handing_over"
    FINISHED = "finished"


LEGAL_TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.HANDING_OVER, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.HANDING_OVER: frozenset({Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class FinishReason(StrEnum):
    """The label values that vLLM uses."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Phase(StrEnum):
    """The phase in which a request was cancelled. A preempted request waits."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class IllegalTransitionError(RuntimeError):
    """A bug in the engine: a status change that the table does not allow."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """`temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    early_stopping: EarlyStopping | None = None


class Request:
    """One request, from `frontend`. A smaller `priority` is more important; `answer` was generated
    elsewhere.

    Only the scheduler changes its fields: the token list in `update`, the block table and the
    computed tokens also through the KV cache, the status through `move_to`.

    `num_lost_tokens`: the most tokens that a preemption took away, or that another worker had
    computed and could not hand over. `num_counted_tokens`: the prompt's and the lost tokens;
    computing them changes counters, computing any later token does not. `num_prefilled_tokens`:
    the prompt tokens that were computed, those computed again included. While fewer than
    `plain_decode_until` tokens are computed, its steps are plain decodes.

    While the next step is planned, and until the one in flight is over, `num_in_flight` are the
    tokens that this one computes, and `num_placeholders` those that it will bring. `num_dropped`
    tokens came when the request had ended.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "finish_reason",
        "frontend",
        "host_table",
        "max_tokens_in_all",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_tokens",
        "num_dropped",
        "num_in_flight",
        "num_lost_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_prefilled_tokens",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "plain_decode_until",
        "priority",
        "request_id",
        "sampling",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        answer: Sequence[int] = (),
        frontend: str = "",
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"request {request_id}: an empty prompt has nothing to compute")
        self.request_id = request_id
        self.sampling = sampling
        self.priority = priority
        self.frontend = frontend
        self.arrival = 0
        self.max_tokens_in_all = len(prompt_token_ids) + sampling.max_tokens
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = [*prompt_token_ids, *answer]
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.num_placeholders = 0
        self.num_dropped = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_prefilled_tokens = 0
        self.num_lost_tokens = 0
        self.num_counted_tokens = len(prompt_token_ids)
        self.num_recomputed_tokens = 0
        self.plain_decode_until = 0
        self.block_table: list[int] = []
        self.host_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Computed when the step in flight is over."""
        return self.num_computed_tokens + self.num_in_flight

    @property
    def num_owed_tokens(self) -> int:
        num_known = len(self.token_ids) + self.num_placeholders
        return num_known - self.num_computed_tokens - self.num_in_flight

    @property
    def num_tokens_left(self) -> int:
        """The rest of its `max_tokens`."""
        return self.max_tokens_in_all - len(self.token_ids)

    @property
    def phase(self) -> Phase:
        if self.status is not Status.RUNNING:
            return Phase.WAITING
        is_behind = self.num_generated == 0 or self.num_owed_tokens > 1
        return Phase.PREFILL if is_behind else Phase.DECODE

    @property
    def wants_probabilities(self) -> bool:
        stopping = self.sampling.early_stopping
        return stopping is not None and stopping.low_confidence is not None

    def lose_computed(self) -> None:
        """Its tokens are to be computed again, which will be counted."""
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_counted_tokens = max(self.num_prompt_tokens, self.num_lost_tokens)
        self.num_computed_tokens = 0

    def plain_decode_limit(self, block_size: int) -> int:
        """The computed tokens up to which its steps are plain decodes; 0 if the next one is not.

        In one, it is owed its newest token only, its block table has room, and the token that comes
        of it is not its last.
        """
        if self.num_planned_tokens < self.num_counted_tokens:
            return 0
        return min(len(self.block_table) * block_size, self.max_tokens_in_all - 2)

    def move_to(self, status: Status) -> None:
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise IllegalTransitionError(
                f"request {self.request_id}: {self.status.value} -> {status.value}"
            )
        self.status = status
        self.plain_decode_until = 0

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.value} computed "
            f"{self.num_computed_tokens}/{self.num_tokens} blocks {len(self.block_table)}>"
        )
