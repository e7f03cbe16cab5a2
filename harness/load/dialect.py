"""The OpenAI dialect, as far as a user needs it: the body of a request, the chunks of its stream.

Works for `/v1/completions` and `/v1/chat/completions`. Fields that nobody here reads are skipped
by the decoder without being built, which matters: this runs for every token.
"""

from typing import Any, Final

import msgspec

from harness.load.plan import LoadPlan

DONE: Final = b"[DONE]"
_MAX_MESSAGE_CHARS: Final = 300


class Usage(msgspec.Struct):
    """Token counts; with continuous usage, those so far."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Delta(msgspec.Struct):
    """What a chat chunk adds. Thinking is generated text like any other."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """The one choice of a chunk: `text` in completions, `delta` in chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        """Whether the chunk shows the user anything: a role alone or an empty text does not."""
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(delta.content or delta.reasoning_content)


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_chunk_decoder: Final = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Read the data of one event. Raises `msgspec.DecodeError` for anything but a chunk."""
    return _chunk_decoder.decode(data)


def request_body(plan: LoadPlan, prompt: str, max_tokens: int) -> bytes:
    """The JSON body of one streaming request."""
    body: dict[str, Any] = {"model": plan.model, "max_tokens": max_tokens, "stream": True}
    if plan.path.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if plan.stream_options is not None:
        body["stream_options"] = plan.stream_options
    return msgspec.json.encode(body | plan.extra_body)


def error_message(error: Any) -> str:
    """What a server's error says to a person, whichever way it wrapped it."""
    match error:
        case {"error": inner} if inner:
            return error_message(inner)
        case {"message": str(text)} | str(text):
            return text[:_MAX_MESSAGE_CHARS]
        case _:
            return msgspec.json.encode(error).decode()[:_MAX_MESSAGE_CHARS]


def refusal_message(status: int, body: bytes) -> str:
    """The reason that an answer other than 200 gave, from its JSON or else its text."""
    try:
        reason = error_message(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        reason = body.decode(errors="replace").strip()[:_MAX_MESSAGE_CHARS]
    return f"HTTP {status}: {reason}" if reason else f"HTTP {status}"
