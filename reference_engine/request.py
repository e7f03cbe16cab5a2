"""A request as the engine knows it, and the only ways in which its status may change.

    WAITING ──▶ RUNNING ◀──▶ PREEMPTED
       └───────────┴─────────────┴──────▶ FINISHED

A request is a list of tokens of which the first `num_computed_tokens` have their keys and values in
the cache. There is no prefill phase and no decode phase: what a request is owed is always
`num_tokens - num_computed_tokens`. Preemption sets the computed tokens back to zero and nothing
else; the request then recomputes prompt and answer alike.
"""

from enum import Enum, StrEnum

import msgspec


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


LEGAL_TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class FinishReason(StrEnum):
    """Why a request ended: the label values that vLLM uses."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class CancelReason(StrEnum):
    """Why a request was aborted."""

    USER_DISCONNECT = "user_disconnect"
    SERVER_SHUTDOWN = "server_shutdown"


class IllegalTransitionError(RuntimeError):
    """A bug in the engine: a status change that the table does not allow."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


class Request:
    """One request.

    Its mutable fields are changed by the scheduler only: the token list by `update`, the block
    table by the KV cache on the scheduler's behalf, the status through `move_to`.
    """

    __slots__ = (
        "block_table",
        "finish_reason",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "request_id",
        "sampling",
        "status",
        "token_ids",
    )

    def __init__(self, request_id: str, prompt_token_ids: list[int], sampling: Sampling) -> None:
        if not prompt_token_ids:
            raise ValueError(f"request {request_id}: an empty prompt has nothing to compute")
        self.request_id = request_id
        self.sampling = sampling
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """All tokens sampled for this request, read by somebody or not."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_owed_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    def move_to(self, status: Status) -> None:
        """Change the status, or raise IllegalTransitionError and leave it as it was."""
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise IllegalTransitionError(
                f"request {self.request_id}: {self.status.value} -> {status.value}"
            )
        self.status = status

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.value} computed "
            f"{self.num_computed_tokens}/{self.num_tokens} blocks {len(self.block_table)}>"
        )
