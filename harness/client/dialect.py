"""The dialects, as far as a user needs them: the body of a request, the events of its stream.

OpenAI's completions, chat and responses, and Anthropic's messages; documents to embed (OpenAI's) or
to rank (Cohere's). The path says which, or the target's file. An event is read as a chunk of the
first two, by two readers: `quick` is typed and takes nearly every token; `look` takes events in
which `quick` found nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from harness.client.chunk import Choice, Chunk, Delta, Function, Look, ToolCall, decode_chunk
from harness.client.look import look_message, look_older, look_pooled, look_response
from harness.records import Delivery
from harness.workload.session import ChatMessage
from harness.workload.target import NO_LIMIT_KEY, DialectName, Target


class _ResponsesEvent(msgspec.Struct):
    """`delta` is text in all events that have it."""

    type: str = ""
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
    event = _decode_response(data)
    if not event.delta:
        return Chunk()
    is_call = event.type.startswith("response.function_call")
    return Chunk(choices=[_of_call(event.delta) if is_call else Choice(text=event.delta)])


def _quick_message(data: bytes) -> Chunk:
    event = _decode_message(data)
    delta = event.delta
    if event.error is not None or delta is None:
        return Chunk()
    if delta.partial_json:
        return Chunk(choices=[_of_call(delta.partial_json)])
    return Chunk(choices=[Choice(text=delta.text or delta.thinking)])


def _of_call(arguments: str) -> Choice:
    return Choice(delta=Delta(tool_calls=[ToolCall(Function(arguments=arguments))]))


ToolChoice = Literal["required", "none"]  # the answer is a call, or has none


class Dialect(NamedTuple):
    """`put`: messages, the prompt last, as keys of the body; `put_tool`: a tool that is, or is not
    to be called. `limit_key`: of the most tokens of an answer. `quick` reads an event's data and
    raises NONSENSE; `look` reads its data and its name, or a whole answer, and raises nothing.
    `is_older`: with `n` and `stream_options`. `generates`: else the messages are documents, and the
    answer is in one piece."""

    name: DialectName
    put: Callable[[Sequence[ChatMessage]], dict[str, Any]]
    put_tool: Callable[[ToolChoice], dict[str, Any]]
    limit_key: str | None
    quick: Callable[[bytes], Chunk]
    look: Callable[[bytes, bytes], list[Look]]
    is_older: bool
    generates: bool = True


def _put_text(messages: Sequence[ChatMessage]) -> dict[str, Any]:
    return {"prompt": "\n\n".join(one.text for one in messages)}


def _put_chat(messages: Sequence[ChatMessage]) -> dict[str, Any]:
    return {"messages": [{"role": one.role, "content": one.text} for one in messages]}


def _put_input(messages: Sequence[ChatMessage]) -> dict[str, Any]:
    if len(messages) == 1 and messages[0].role == "user":
        return {"input": messages[0].text}
    return {"input": _put_chat(messages)["messages"]}


def _put_messages(messages: Sequence[ChatMessage]) -> dict[str, Any]:
    """Anthropic's: the system's text has a key of its own."""
    system = [one.text for one in messages if one.role == "system"]
    rest = [one for one in messages if one.role != "system"]
    return ({"system": system[0]} if system else {}) | _put_chat(rest)


def _put_texts(messages: Sequence[ChatMessage]) -> dict[str, Any]:
    return {"input": [one.text for one in messages]}


def _put_documents(messages: Sequence[ChatMessage]) -> dict[str, Any]:
    return {"query": _QUERY, "documents": [one.text for one in messages]}


_QUERY: Final = "Who wrote the letter?"
_TOOL: Final = {"name": "write_file", "description": "Writes a text to a file."}
_PARAMETERS: Final = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    "required": ["path", "text"],
}


def _put_tool_of_chat(choice: ToolChoice) -> dict[str, Any]:
    function = {**_TOOL, "parameters": _PARAMETERS}
    return {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }


def _put_tool_of_responses(choice: ToolChoice) -> dict[str, Any]:
    return {
        "tools": [{"type": "function", **_TOOL, "parameters": _PARAMETERS}],
        "tool_choice": choice,
    }


def _put_tool_of_messages(choice: ToolChoice) -> dict[str, Any]:
    return {
        "tools": [{**_TOOL, "input_schema": _PARAMETERS}],
        "tool_choice": {"type": "any" if choice == "required" else "none"},
    }


COMPLETIONS: Final = Dialect(
    "completions",
    _put_text,
    lambda _choice: {},
    "max_tokens",
    decode_chunk,
    look_older,
    is_older=True,
)
_POOLING: Final = Dialect(
    "embeddings",
    _put_texts,
    lambda _choice: {},
    None,
    decode_chunk,
    look_pooled,
    is_older=False,
    generates=False,
)
_DIALECTS: Final = {
    "/chat/completions": COMPLETIONS._replace(
        name="chat", put=_put_chat, put_tool=_put_tool_of_chat
    ),
    "/completions": COMPLETIONS,
    "/responses": Dialect(
        "responses",
        _put_input,
        _put_tool_of_responses,
        "max_output_tokens",
        _quick_response,
        look_response,
        is_older=False,
    ),
    "/messages": Dialect(
        "messages",
        _put_messages,
        _put_tool_of_messages,
        "max_tokens",
        _quick_message,
        look_message,
        is_older=False,
    ),
    "/embeddings": _POOLING,
    "/rerank": _POOLING._replace(name="rerank", put=_put_documents),
}


def _parts(path: str) -> tuple[str, str, str]:
    """The path before the dialect's ending, that ending, and the query."""
    bare, mark, query = path.partition("?")
    bare = bare.rstrip("/")
    ending = next((one for one in _DIALECTS if bare.lower().endswith(one)), "")
    return bare[: len(bare) - len(ending)], ending, mark + query


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
    prompt: str | Sequence[ChatMessage],
    *,
    max_tokens: int,
    delivery: Delivery = Delivery.STREAM,
    n: int = 1,
    temperature: float | None = None,
) -> dict[str, Any]:
    dialect, is_stream = dialect_of(target), delivery is Delivery.STREAM
    key = limit_key_of(target)
    limit = {} if key is None else {key: max_tokens}
    said = [ChatMessage("user", prompt)] if isinstance(prompt, str) else prompt
    body = {"model": model, **limit, **dialect.put(said)}
    if dialect.generates:
        body["stream"] = is_stream
    if is_stream and dialect.is_older and target.stream_options is not None:
        body["stream_options"] = target.stream_options
    if n > 1:
        body["n"] = n
    if temperature is not None:
        body["temperature"] = temperature
    return body | target.extra_body
