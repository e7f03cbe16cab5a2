"""The dialects, as far as a user needs them: the body of a request, the events of its stream.

OpenAI's completions, chat and responses, and Anthropic's messages: the path says which, or the
target's file. An event of any of them is read as a chunk of the first two, by two readers: `quick`
is typed and takes nearly every token; `look` takes events in which `quick` found nothing.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from harness.client.chunk import Choice, Chunk, Look, decode_chunk
from harness.client.look import look_message, look_older, look_response
from harness.records import Delivery
from harness.workload.target import NO_LIMIT_KEY, DialectName, Target


class _ResponsesEvent(msgspec.Struct):
    """`delta` is text in all events that have it."""

    delta: str | None = None


class _MessagesDelta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None


class _MessagesEvent(msgspec.Struct):
    delta: _MessagesDelta | None = None
    error: Any = None


_decode_response: Final = msgspec.json.Decoder(_ResponsesEvent).decode
_decode_message: Final = msgspec.json.Decoder(_MessagesEvent).decode


def _quick_response(data: bytes) -> Chunk:
    text = _decode_response(data).delta
    return Chunk(choices=[Choice(text=text)] if text else [])


def _quick_message(data: bytes) -> Chunk:
    event = _decode_message(data)
    delta = event.delta
    if event.error is not None or delta is None:
        return Chunk()
    return Chunk(choices=[Choice(text=delta.text or delta.thinking or delta.partial_json)])


class Dialect(NamedTuple):
    """`put`: a prompt as keys of the body. `limit_key`: of the most tokens of an answer. `quick`
    reads an event's data and raises NONSENSE; `look` reads its data and its name, or a whole
    answer, and raises nothing. `is_older`: with `n` and `stream_options`."""

    name: DialectName
    put: Callable[[str], dict[str, Any]]
    limit_key: str
    quick: Callable[[bytes], Chunk]
    look: Callable[[bytes, bytes], list[Look]]
    is_older: bool


def _put_messages(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


COMPLETIONS: Final = Dialect(
    "completions",
    lambda prompt: {"prompt": prompt},
    "max_tokens",
    decode_chunk,
    look_older,
    is_older=True,
)
_DIALECTS: Final = {
    "/chat/completions": COMPLETIONS._replace(name="chat", put=_put_messages),
    "/completions": COMPLETIONS,
    "/responses": Dialect(
        "responses",
        lambda prompt: {"input": prompt},
        "max_output_tokens",
        _quick_response,
        look_response,
        is_older=False,
    ),
    "/messages": Dialect(
        "messages",
        _put_messages,
        "max_tokens",
        _quick_message,
        look_message,
        is_older=False,
    ),
}


def _parts(path: str) -> tuple[str, str, str]:
    """Before the dialect's ending, that ending, and the query."""
    bare, mark, query = path.partition("?")
    bare = bare.rstrip("/")
    ending = next((one for one in _DIALECTS if bare.endswith(one)), "")
    return bare.removesuffix(ending), ending, mark + query


def dialect_of_path(path: str) -> Dialect:
    return _DIALECTS.get(_parts(path)[1], COMPLETIONS)


def dialect_of(target: Target) -> Dialect:
    """The dialect that the target names, else that of its path."""
    if target.dialect is None:
        return dialect_of_path(target.path)
    return next(one for one in _DIALECTS.values() if one.name == target.dialect)


def route(path: str, name: str) -> str:
    """The route of this name ("chat/completions") on the server that has this path."""
    before, _, query = _parts(path)
    return f"{before}/{name}{query}"


def limit_key_of(target: Target) -> str | None:
    """The key by which a request says how long its answer may be; None: by none."""
    if target.limit_key is None:
        return dialect_of(target).limit_key
    return None if target.limit_key == NO_LIMIT_KEY else target.limit_key


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
    dialect, is_stream = dialect_of(target), delivery is Delivery.STREAM
    key = limit_key_of(target)
    limit = {} if key is None else {key: max_tokens}
    body = {"model": model, **limit, **dialect.put(prompt), "stream": is_stream}
    if is_stream and dialect.is_older and target.stream_options is not None:
        body["stream_options"] = target.stream_options
    if n > 1:
        body["n"] = n
    if temperature is not None:
        body["temperature"] = temperature
    return body | target.extra_body
