"""The types of all answers, from which `/openapi.json` is made too.

All `t_ns` and `_ns` stamps are of one monotonic clock.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from reference_engine.context import CancelReason, DetectionMethod
from reference_engine.core.early_stop import Condition
from reference_engine.core.request import FinishReason, Phase

_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error"}


class Schema(Struct, kw_only=True, forbid_unknown_fields=True):
    """One JSON object; a `tag_field` always has the tag as its value."""


class CachedTokens(Schema):
    """Tokens of the prompt that were found in the prefix cache."""

    cached_tokens: int


class Usage(Schema):
    """Tokens of a request: the prompt once, all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class CancellationInfo(Schema):
    """How an aborted request ended.

    `position`: tokens that the frontend had when it was cancelled; a step in flight may have added
    one, which `tokens_generated` has. `reason` is null if the frontend had not asked for the abort.
    """

    reason: CancelReason | None
    phase: Phase
    position: int
    tokens_generated: int
    tokens_remaining: int


StopReason = str | int | None | UnsetType  # the stop string or token, or "early_stop"


class EarlyStopped(Schema):
    """The condition that ended an answer early, and the tokens left of its max_tokens."""

    condition: Condition
    tokens_saved: int


class CompletionChoice(Schema):
    """One answer, or more of it. `finish_reason` is null until it ends, or if the engine failed."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None
    stop_reason: StopReason = UNSET
    early_stop: EarlyStopped | UnsetType = UNSET


class FunctionCall(Schema, kw_only=True):
    """`name` is in the first piece only."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(Schema, kw_only=True):
    """The only call of an answer, or more of it. `id` and `type` come with the name."""

    index: int = 0
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatDelta(Schema):
    """The role comes first, and alone."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatPiece(Schema):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReason | None
    stop_reason: StopReason = UNSET
    early_stop: EarlyStopped | UnsetType = UNSET


class ChatMessage(Schema):
    """The model's message."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Schema):
    """One answer. `finish_reason` is null only if the engine failed."""

    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: FinishReason | None
    stop_reason: StopReason = UNSET
    early_stop: EarlyStopped | UnsetType = UNSET


class Answer(Schema, tag_field="object"):
    """An answer or a piece of it.

    An aborted request's body, or last event, has `partial` and `cancellation_info`. If an answer
    was stopped early, its last event has `early_stop`; a body has that of the first such answer.
    """

    id: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType = UNSET
    partial: bool | UnsetType = UNSET
    cancellation_info: CancellationInfo | UnsetType = UNSET
    early_stop: EarlyStopped | UnsetType = UNSET


class Completion(Answer, tag="text_completion"):
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer, tag="text_completion"):
    """One event of a stream. `usage` is in the last, or in all, where it was asked for."""

    choices: list[CompletionChoice]


class ChatCompletion(Answer, tag="chat.completion"):
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Answer, tag="chat.completion.chunk"):
    """One event of a stream. `usage` is in the last, or in all, where it was asked for."""

    choices: list[ChatPiece]


class Cancelled(Schema):
    """The first cancellation of a request, whether or not it came in time."""

    reason: CancelReason
    method: DetectionMethod
    t_ns: int


class RequestFacts(Schema):
    """The state of a request."""

    id: str
    request_id: str
    client_request_id: str | None
    status: str
    phase: Phase
    tokens_generated: int
    preemptions: int
    cancellation: Cancelled | None


class ChoiceLength(Schema):
    """One answer of a request that was not aborted: its client had the text."""

    index: int
    finish_reason: FinishReason | None
    tokens_generated: int


class RequestShown(RequestFacts):
    """A request with the lengths of its answers so far; if it was aborted, with its prompt (the
    first 4,096 characters) and the texts of its answers.
    """

    object: str
    created: int
    model: str
    choices: list[Annotated[Any, Meta(extra_json_schema={"type": "object"})]]
    usage: Usage
    partial: bool | UnsetType = UNSET
    cancellation_info: CancellationInfo | UnsetType = UNSET
    early_stop: EarlyStopped | UnsetType = UNSET
    prompt: str | UnsetType = UNSET


class RequestCancelled(RequestFacts):
    """`cancelled`: by this call, not by an earlier one."""

    cancelled: bool


class CancelAnswer(Schema):
    """All requests with that name."""

    id: str
    cancelled: bool
    requests: list[RequestCancelled]


class PingAnswer(Schema):
    """Requests with that name, and the seconds within which each needs its next ping."""

    id: str
    keep_alive_s: dict[str, float | None]


class ModelCard(Schema, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Schema, tag_field="object", tag="list"):
    data: list[ModelCard]


class ClockAnswer(Schema, tag_field="clock", tag="CLOCK_MONOTONIC"):
    """The clock of all stamps. Equal `boot_id`s mean that server and reader share it."""

    now_ns: int
    boot_id: str | None


class LifecycleEntry(Schema):
    """One event in a request's life."""

    seq: int
    t_ns: int
    event: str
    request_id: str
    client_request_id: str | None
    step: int
    num_generated: int
    num_blocks: int
    reason: str | None
    worker: str


class ErrorText(Schema):
    """An error. `param` is the field of the request at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Schema):
    """The body of every answer with a status of 400 or above."""

    error: ErrorText


class ApiError(Exception):
    """A request that cannot be served; the client gets an ErrorBody."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> ErrorBody:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, usual)
        return ErrorBody(
            error=ErrorText(message=str(self), type=kind, param=self.param, code=self.code)
        )

    def response(self, request_id: str | None = None) -> Response:
        echo = {} if request_id is None else {"x-request-id": request_id}
        return json_response(self.body, self.status, {**self.headers, **echo})


def json_response(
    body: Struct, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )
