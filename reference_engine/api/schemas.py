"""What answers look like, for `/openapi.json`: types only, that the tests hold real answers to."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from reference_engine.cancellation import CancelReason, DetectionMethod
from reference_engine.core.request import FinishReason, Phase


class CachedTokens(Struct, kw_only=True, forbid_unknown_fields=True):
    """Tokens of the prompt that were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct, kw_only=True, forbid_unknown_fields=True):
    """Tokens of a request: the prompt once, all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class CancellationInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """How an aborted request ended. `position`: its tokens when it was cancelled."""

    reason: CancelReason | None
    phase: Phase
    position: int
    tokens_generated: int
    tokens_remaining: int


class CompletionChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """One answer."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason


class Completion(Struct, kw_only=True, forbid_unknown_fields=True):
    """`partial` and `cancellation_info` are there if the request was aborted."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    partial: bool | UnsetType = UNSET
    cancellation_info: CancellationInfo | UnsetType = UNSET


class CompletionPiece(Struct, kw_only=True, forbid_unknown_fields=True):
    """More of one answer."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


class CompletionChunk(Struct, kw_only=True, forbid_unknown_fields=True):
    """One event of a stream. `usage` is in the last, or in all, where it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionPiece]
    usage: Usage | UnsetType = UNSET
    partial: bool | UnsetType = UNSET
    cancellation_info: CancellationInfo | UnsetType = UNSET


class AnswerMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the model said."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: FinishReason


class ChatCompletion(Struct, kw_only=True, forbid_unknown_fields=True):
    """`partial` and `cancellation_info` are there if the request was aborted."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    partial: bool | UnsetType = UNSET
    cancellation_info: CancellationInfo | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True, forbid_unknown_fields=True):
    """The role comes first, and alone."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatPiece(Struct, kw_only=True, forbid_unknown_fields=True):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReason | None


class ChatChunk(Struct, kw_only=True, forbid_unknown_fields=True):
    """One event of a stream. `usage` is in the last, or in all, where it was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPiece]
    usage: Usage | UnsetType = UNSET
    partial: bool | UnsetType = UNSET
    cancellation_info: CancellationInfo | UnsetType = UNSET


class Cancelled(Struct, kw_only=True, forbid_unknown_fields=True):
    """The first cancellation of a request. `t_ns` is a monotonic stamp."""

    reason: CancelReason
    method: DetectionMethod
    t_ns: int


class RequestFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """How a request stands."""

    id: str
    request_id: str
    client_request_id: str | None
    status: str
    phase: Phase
    tokens_generated: int
    preemptions: int
    cancellation: Cancelled | None


class RequestShown(RequestFacts, kw_only=True, forbid_unknown_fields=True):
    """With the answers so far: lengths, and of an aborted request the texts."""

    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage
    partial: bool | UnsetType = UNSET
    cancellation_info: CancellationInfo | UnsetType = UNSET


class RequestCancelled(RequestFacts, kw_only=True, forbid_unknown_fields=True):
    """`cancelled`: by this very call."""

    cancelled: bool


class CancelAnswer(Struct, kw_only=True, forbid_unknown_fields=True):
    """All requests of a name."""

    id: str
    cancelled: bool
    requests: list[RequestCancelled]


class PingAnswer(Struct, kw_only=True, forbid_unknown_fields=True):
    """Requests of a name, with the most seconds until their next ping."""

    id: str
    keep_alive_s: dict[str, float | None]


class ModelCard(Struct, kw_only=True, forbid_unknown_fields=True):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, kw_only=True, forbid_unknown_fields=True):
    """All one of them."""

    object: Literal["list"]
    data: list[ModelCard]


class ClockAnswer(Struct, kw_only=True, forbid_unknown_fields=True):
    """The clock of all `_ns` stamps. `boot_id` tells whether it is the reader's own."""

    clock: Literal["CLOCK_MONOTONIC"]
    now_ns: int
    boot_id: str | None


_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorText(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. `param` is the field of the request that is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 and above."""

    error: ErrorText


class ApiError(Exception):
    """A request that cannot be served: becomes an ErrorBody with `status` and `headers`."""

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

    def response(self, request_id: str | None = None) -> Response:
        """The answer; a client's X-Request-Id is echoed."""
        echo = {} if request_id is None else {"x-request-id": request_id}
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, usual)
        text = ErrorText(message=str(self), type=kind, param=self.param, code=self.code)
        return Response(
            msgspec.json.encode(ErrorBody(text)),
            status_code=self.status,
            media_type="application/json",
            headers={**self.headers, **echo},
        )


class LifecycleEntry(Struct, frozen=True, kw_only=True):
    """One event, as `GET /walkaway/lifecycle` shows it."""

    seq: int
    t_ns: int
    event: str
    request_id: str
    client_request_id: str | None
    step: int
    num_generated: int
    num_blocks: int
    reason: str | None
