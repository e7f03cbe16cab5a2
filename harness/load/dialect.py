"""The OpenAI dialect, as far as a user needs it: the body of a request, the chunks of its stream.
The decoder runs for every token, and skips fields that are not declared here without building them.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from harness.records import Delivery
from harness.workload.target import Target

DONE: Final = b"[DONE]"
ABORT: Final = "abort"  # vLLM's finish reason of a request that was cancelled
EXPIRED: Final = "client_timeout"  # the bundled engine's reason: the request's deadline passed
_MAX_MESSAGE_CHARS: Final = 300

# A server's own words go into rows and files. Values beyond these are refused.
LARGEST_COUNT: Final = 2**31 - 1  # of tokens
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
AnswerNumber = Annotated[int, msgspec.Meta(ge=0, lt=1024)]
Reason = Annotated[str, msgspec.Meta(max_length=_MAX_MESSAGE_CHARS)]


class Usage(msgspec.Struct):
    """Token counts; with continuous usage, those so far."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Delta(msgspec.Struct):
    """The text that a chat chunk adds, or a whole message. Reasoning is generated text too."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """More of one answer, or the whole of it: `text` in completions; in chat `delta`, `message`."""

    index: AnswerNumber = 0
    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: Reason | None = None

    def has_text(self) -> bool:
        if self.text:
            return True
        delta = self.delta or self.message
        return delta is not None and bool(delta.content or delta.reasoning_content)

    def shown(self) -> str:
        delta = self.delta or self.message or Delta()
        return f"{self.text or ''}{delta.reasoning_content or ''}{delta.content or ''}"


class CancellationInfo(msgspec.Struct):
    reason: Reason | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    cancellation_info: CancellationInfo | None = None


# Reads an event's data, or a whole answer. Raises NONSENSE for invalid UTF-8, JSON or fields
# (ValueError, of several kinds), and for endless nesting.
NONSENSE: Final = (ValueError, RecursionError)
decode_chunk: Final[Callable[[bytes], Chunk]] = msgspec.json.Decoder(Chunk).decode


def request_body(
    target: Target,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    delivery: Delivery = Delivery.STREAM,
    n: int = 1,
    temperature: float | None = None,
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
    if target.path.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body["stream"] = delivery is Delivery.STREAM
    if body["stream"] and target.stream_options is not None:
        body["stream_options"] = target.stream_options
    if n > 1:
        body["n"] = n
    if temperature is not None:
        body["temperature"] = temperature
    return body | target.extra_body


def error_message(error: Any) -> str:
    match error:
        case {"error": inner} if inner:
            return error_message(inner)
        case {"message": str(text)} | str(text):
            return text[:_MAX_MESSAGE_CHARS]
        case _:
            return msgspec.json.encode(error).decode()[:_MAX_MESSAGE_CHARS]


def refusal_message(status: int, body: bytes) -> str:
    try:
        reason = error_message(msgspec.json.decode(body))
    except NONSENSE:
        reason = body.decode(errors="replace").strip()[:_MAX_MESSAGE_CHARS]
    return f"HTTP {status}: {reason}" if reason else f"HTTP {status}"
