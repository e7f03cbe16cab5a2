"""The bodies of requests with all their limits, X-Request-Id, and page numbers.

`/openapi.json` shows the same types that check a body. A field of OpenAI's that this engine does
not implement is accepted only with a value that changes nothing.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers
from starlette.requests import Request

from reference_engine.api.schemas import ApiError
from reference_engine.config import LONGEST_S
from reference_engine.core.early_stop import LowConfidence, Repetition, Task

MAX_ANSWERS: Final = 16
MAX_MESSAGES: Final = 1024
MAX_STOP_STRINGS: Final = 4
MAX_TOOLS: Final = 128
MAX_STOP_TOKENS: Final = 64
MAX_LABELS: Final = 1000
_Flag = bool | None
_Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Name = Annotated[str, Meta(max_length=256)]
_StopString = Annotated[str, Meta(min_length=1, max_length=256)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_StopSequence = Annotated[list[_TokenId], Meta(min_length=1, max_length=64)]
_StopSequences = Annotated[list[_StopSequence], Meta(max_length=MAX_STOP_TOKENS)]
_Pattern = Annotated[int, Meta(ge=1, le=1000)]
_Label = Annotated[str, Meta(min_length=1, max_length=256)]
_StopStrings = Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)]
_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]
_Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)]
_Count = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]
_SameCount = Annotated[int, Meta(ge=1, le=MAX_ANSWERS, description="Must equal n.")]
_UntilMaxTokens = Annotated[bool, Meta(description="Do not end before max_tokens.")]
_Priority = Annotated[
    int,
    Meta(
        ge=-(2**31),
        le=2**31 - 1,
        description="Smaller is more important, where the scheduler goes by priority.",
    ),
]
_Deadline = Annotated[
    float, Meta(gt=0, le=LONGEST_S, description="Seconds until it is ended, complete or not.")
]
_KeepAlive = Annotated[
    float,
    Meta(
        ge=0.1,
        le=LONGEST_S,
        description="The client promises a ping within this many seconds of the last.",
    ),
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage`: after the last event; `continuous_usage_stats`: in every event."""

    include_usage: _Flag = False
    continuous_usage_stats: _Flag = False


class Neutral(NamedTuple):
    """The values, other than null, that a field which is not implemented may have."""

    values: list[object]


class RepetitionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ends an answer whose newest tokens are a pattern with `repeats` copies before it."""

    min_pattern: _Pattern = Repetition().min_pattern
    max_pattern: _Pattern = Repetition().max_pattern
    window: Annotated[int, Meta(ge=2, le=10_000)] = Repetition().window
    after: Annotated[int, Meta(ge=0, le=2**31 - 1)] = Repetition().after
    repeats: Annotated[int, Meta(ge=1, le=100)] = Repetition().repeats


class LowConfidenceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ends an answer when the mean probability of its `last` tokens is below `below`."""

    last: Annotated[int, Meta(ge=1, le=1000)] = LowConfidence().last
    below: Annotated[float, Meta(gt=0, le=1)] = LowConfidence().below


class EarlyStopBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Conditions that end an answer early; all are off unless asked for."""

    repetition: bool | RepetitionBody | None = None
    low_confidence: bool | LowConfidenceBody | None = None
    task: Task | None = None
    labels: Annotated[list[_Label], Meta(max_length=MAX_LABELS)] | None = None


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both endpoints share."""

    model: _Name
    max_tokens: _Length | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopString | _StopStrings | None = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    stop_token_sequences: _StopSequences | None = None
    early_stop: EarlyStopBody | None = None
    n: _Count | None = None
    best_of: _SameCount | None = None
    stream: _Flag = False
    stream_options: StreamOptions | None = None
    user: _Name | None = None
    metadata: _Metadata | None = None
    ignore_eos: _UntilMaxTokens | None = False
    priority: _Priority | None = None
    deadline_s: _Deadline | None = None
    keep_alive_s: _KeepAlive | None = None
    echo: Annotated[Any, Neutral([False])] = None
    logprobs: Annotated[Any, Neutral([False])] = None
    top_p: Annotated[Any, Neutral([1])] = None
    presence_penalty: Annotated[Any, Neutral([0])] = None
    frequency_penalty: Annotated[Any, Neutral([0])] = None
    suffix: Annotated[Any, Neutral([""])] = None
    logit_bias: Annotated[Any, Neutral([{}])] = None
    tools: Annotated[Any, Neutral([[]])] = None
    tool_choice: Annotated[Any, Neutral(["none", "auto"])] = None
    top_logprobs: Annotated[Any, Neutral([0])] = None
    response_format: Annotated[Any, Neutral([{"type": "text"}])] = None
    parallel_tool_calls: Annotated[Any, Neutral([True, False])] = None
    store: Annotated[Any, Neutral([False])] = None
    top_k: Annotated[Any, Neutral([-1, 0])] = None
    min_p: Annotated[Any, Neutral([0])] = None
    repetition_penalty: Annotated[Any, Neutral([1])] = None
    min_tokens: Annotated[Any, Neutral([0])] = None


class CompletionBody(Body):
    """/v1/completions. One prompt: text, token ids, or a list with one of these in it."""

    prompt: str | list[int | str | list[int]]


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ChatRequestMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`name` changes nothing; the fields that need tools are null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: _Name | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Only its name is used."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: _Flag = None


class ToolBody(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: FunctionBody


_Tools = Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)]
_ToolChoice = Annotated[
    Literal["none", "auto", "required"],
    Meta(description="required: the answer is the arguments of a call of the first tool."),
]


class ChatBody(Body, kw_only=True):
    messages: Annotated[list[ChatRequestMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Length | None = None
    tools: _Tools | None = None
    tool_choice: _ToolChoice | None = None


def _neutral(body: type[Body]) -> dict[str, list[object]]:
    return {
        name: one.values
        for name, hint in get_type_hints(body, include_extras=True).items()
        for one in get_args(hint)[1:]
        if isinstance(one, Neutral)
    }


NEUTRAL: Final[dict[type[Body], dict[str, list[object]]]] = {
    body: _neutral(body) for body in (CompletionBody, ChatBody)
}


MAX_BODY_BYTES: Final = 1024 * 1024
MAX_DROPPED_BYTES: Final = 16 * 1024 * 1024
MAX_REQUEST_ID_CHARS: Final = 256
MAX_PAGE: Final = 10_000  # entries: more would hold up the event loop, and with it detection
_MAX_DIGITS: Final = 15
_ENGINES_NAME: Final = r"(chatcmpl-|cmpl-)?req-[0-9]+(-[0-9]+)?"
_VISIBLE: Final = rf"[!-~]{{0,{MAX_REQUEST_ID_CHARS}}}"
REQUEST_ID_PATTERN: Final = rf"^(?!{_ENGINES_NAME}$){_VISIBLE}$"


async def read_body(request: Request) -> bytes:
    """Raises ApiError: 413 for a body that is too large, 400 for an empty one.

    A client that is still sending when its connection ends may never see the answer. So a body that
    is too large is read to its end and dropped, up to MAX_DROPPED_BYTES. It is refused at once if
    Content-Length announces more than that, or if the client waits for 100-continue.
    """
    most = MAX_BODY_BYTES if "expect" in request.headers else MAX_BODY_BYTES + MAX_DROPPED_BYTES
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large()
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
        if size > most:
            break
    if size > MAX_BODY_BYTES:
        raise _too_large()
    if not size:
        raise ApiError(400, "request body: empty; a JSON object is needed, see /openapi.json")
    return b"".join(chunks)


def read_request_id(headers: Headers) -> str | None:
    request_id = headers.get("x-request-id") or None
    if request_id is None:
        return None
    if re.fullmatch(_ENGINES_NAME, request_id):
        why = (
            "the engine itself names requests req- and a number, so this id could "
            "mean another request; use one of another form"
        )
    elif echo_of(headers) is None:
        why = f"at most {MAX_REQUEST_ID_CHARS} visible ASCII characters"
    else:
        return request_id
    raise ApiError(400, f"X-Request-Id: {why}", param="X-Request-Id")


def echo_of(headers: Headers) -> str | None:
    """The client's X-Request-Id; None if a response header cannot hold it."""
    request_id = headers.get("x-request-id", "")
    return request_id if request_id and re.fullmatch(_VISIBLE, request_id) else None


def read_page(query: Mapping[str, str]) -> tuple[int, int]:
    limit = _number(query, "limit", default=MAX_PAGE)
    return _number(query, "after", default=0), min(max(limit, 1), MAX_PAGE)


def _number(query: Mapping[str, str], name: str, *, default: int) -> int:
    text = query.get(name, str(default))
    if not re.fullmatch(rf"[0-9]{{1,{_MAX_DIGITS}}}", text):
        raise ApiError(400, f"{name}: a number of at most {_MAX_DIGITS} digits", param=name)
    return int(text)


def _too_large() -> ApiError:
    return ApiError(413, f"request body: at most {MAX_BODY_BYTES} bytes")
