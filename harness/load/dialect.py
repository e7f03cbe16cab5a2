"""The dialects, as far as a user needs them: the body of a request, the chunks of its stream.

OpenAI's completions, chat and responses, and Anthropic's messages: the path says which. An event of
any of them is read as a chunk of the first two. The decoders run for every token, and skip fields
that are not declared here without building them.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

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


class _Incomplete(msgspec.Struct):
    reason: Reason | None = None


class _NewUsage(msgspec.Struct):
    input_tokens: Count | None = None
    output_tokens: Count | None = None

    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.input_tokens, completion_tokens=self.output_tokens)


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _NewUsage | None = None
    error: Any = None
    incomplete_details: _Incomplete | None = None


class _ResponsesEvent(msgspec.Struct):
    """`delta`: text in all events that have it, but for audio's. `message`, `error`: of type
    "error"."""

    type: str = ""
    delta: Any = None
    response: _Response | None = None
    message: str | None = None
    error: Any = None


class _MessagesDelta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: Reason | None = None


class _MessagesEvent(msgspec.Struct):
    delta: _MessagesDelta | None = None
    usage: _NewUsage | None = None
    error: Any = None


_decode_response: Final = msgspec.json.Decoder(_ResponsesEvent).decode
_decode_message: Final = msgspec.json.Decoder(_MessagesEvent).decode
_FINISH_REASONS: Final = {
    "completed": "stop",
    "cancelled": ABORT,
    "max_output_tokens": "length",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
}


def _read_response(data: bytes) -> Chunk:
    event = _decode_response(data)
    if event.response is None:
        if event.type == "error":
            return Chunk(error=event.error or event.message or "no reason given")
        text = event.delta if isinstance(event.delta, str) else None
        return Chunk(choices=[Choice(text=text)] if text else [])
    response = event.response
    if response.status == "failed":
        return Chunk(error=response.error or "no reason given")
    if response.status not in ("completed", "incomplete", "cancelled"):
        return Chunk()
    why = response.status
    if response.incomplete_details is not None:
        why = response.incomplete_details.reason or why
    usage = None if response.usage is None else response.usage.usage()
    return Chunk(choices=[Choice(finish_reason=_FINISH_REASONS.get(why, why))], usage=usage)


def _read_message(data: bytes) -> Chunk:
    event = _decode_message(data)
    if event.error is not None or event.delta is None:
        return Chunk(error=event.error)
    delta, usage = event.delta, None if event.usage is None else event.usage.usage()
    why = delta.stop_reason
    choice = Choice(
        text=delta.text or delta.thinking or delta.partial_json,
        finish_reason=None if why is None else _FINISH_REASONS.get(why, why),
    )
    return Chunk(choices=[choice], usage=usage)


class Dialect(NamedTuple):
    """`put`: a prompt and the number of tokens as keys of the body. `decode`: an event's data, or a
    whole answer of the older two; it raises NONSENSE. `is_older`: with `n` and `stream_options`."""

    put: Callable[[str, int], dict[str, Any]]
    decode: Callable[[bytes], Chunk]
    is_older: bool


def _put_messages(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "messages": [{"role": "user", "content": prompt}]}


_COMPLETIONS: Final = Dialect(
    lambda prompt, max_tokens: {"max_tokens": max_tokens, "prompt": prompt},
    decode_chunk,
    is_older=True,
)
_BY_ENDING: Final = {
    "/chat/completions": Dialect(_put_messages, decode_chunk, is_older=True),
    "/responses": Dialect(
        lambda prompt, max_tokens: {"max_output_tokens": max_tokens, "input": prompt},
        _read_response,
        is_older=False,
    ),
    "/messages": Dialect(_put_messages, _read_message, is_older=False),
}


def dialect_of(path: str) -> Dialect:
    found = (one for ending, one in _BY_ENDING.items() if path.endswith(ending))
    return next(found, _COMPLETIONS)


def route(path: str, name: str) -> str:
    """The route of this name ("chat/completions") beside a route of any dialect."""
    known = (path.removesuffix(ending) for ending in _BY_ENDING if path.endswith(ending))
    return f"{next(known, path.removesuffix('/completions'))}/{name}"


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
    dialect, is_stream = dialect_of(target.path), delivery is Delivery.STREAM
    body = {"model": model, **dialect.put(prompt, max_tokens), "stream": is_stream}
    if is_stream and dialect.is_older and target.stream_options is not None:
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
