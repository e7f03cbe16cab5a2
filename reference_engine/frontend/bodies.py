"""The bodies of requests, with all their limits: what is checked is what `/openapi.json` says.

Fields of OpenAI's that this engine does not implement are there too, and are accepted only with a
value that changes nothing. Names that nobody knows are refused, of a name given twice the last
counts. A body is JSON in UTF-8, whatever its Content-Type says.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from reference_engine.frontend.settings import LONGEST_S

MAX_ANSWERS: Final = 16
MAX_MESSAGES: Final = 1024
MAX_STOP_STRINGS: Final = 4
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "echo": (False,),
    "logprobs": (False,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
}
"""Fields that are not implemented, and beside null the values with which they are accepted."""

_Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Name = Annotated[str, Meta(max_length=256)]
_StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage`: after the last event; `continuous_usage_stats`: in every event."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share."""

    model: _Name
    max_tokens: _Length | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = (
        None
    )
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_ANSWERS, description="As many as n.")] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: _Name | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    ignore_eos: Annotated[bool, Meta(description="Go on to max_tokens.")] | None = False
    priority: (
        Annotated[
            int,
            Meta(
                ge=-(2**31),
                le=2**31 - 1,
                description="Smaller is more important, where the scheduler goes by priority.",
            ),
        ]
        | None
    ) = None
    deadline_s: (
        Annotated[
            float,
            Meta(gt=0, le=LONGEST_S, description="When it is ended, done or not."),
        ]
        | None
    ) = None
    keep_alive_s: (
        Annotated[
            float,
            Meta(
                ge=0.1,
                le=LONGEST_S,
                description="The client promises a ping at least so often, and is gone without.",
            ),
        ]
        | None
    ) = None
    echo: Any = None
    logprobs: Any = None
    top_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    suffix: Any = None
    logit_bias: Any = None
    tools: Any = None
    tool_choice: Any = None
    top_logprobs: Any = None
    response_format: Any = None
    parallel_tool_calls: Any = None
    store: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None


class CompletionBody(Body):
    """Of /v1/completions. One prompt: text, token ids, or a list with one of these in it."""

    prompt: str | list[int | str | list[int]]


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A piece of a message."""

    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`name` is accepted and changes nothing; what cannot be answered with tools is null."""

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


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Length | None = None
