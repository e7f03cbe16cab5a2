"""The dialects, as far as a user needs them: the body of a request, the events of its stream.

OpenAI's completions, chat and responses, and Anthropic's messages: the path says which, or the
target's file. An event of any of them is read as a chunk of the first two, by two readers: `quick`
is typed and takes nearly every token; `look` takes what that one found nothing in.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from harness.load.chunk import (
    ABORT,
    DONE,
    NONSENSE,
    CancellationInfo,
    Choice,
    Chunk,
    Count,
    Look,
    Reason,
    Usage,
    decode_chunk,
)
from harness.load.loose import (
    Unread,
    choice_of,
    end_of,
    listed,
    shown,
    texts,
    usage_of,
    values_of,
)
from harness.load.server_error import (
    HEARTBEATS,
    error_in,
    error_message,
    is_error_name,
    is_heartbeat,
    words_of,
)
from harness.records import Delivery
from harness.workload.target import NO_LIMIT_KEY, DialectName, Target

Event = Mapping[str, Any]


class _Incomplete(msgspec.Struct):
    reason: Reason | None = None


class _NewUsage(msgspec.Struct):
    input_tokens: Count | None = None
    output_tokens: Count | None = None

    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.input_tokens, completion_tokens=self.output_tokens)


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
_FINISH_REASONS: Final = {
    "completed": "stop",
    "cancelled": ABORT,
    "max_output_tokens": "length",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
}
_PLAIN_KINDS: Final = frozenset({"", "message", "completion", "chunk", "delta", "token", "data"})
_AT_THE_TOP: Final = ("delta", "message", "text", "content")  # of an event without `choices`


def _quick_response(data: bytes) -> Chunk:
    text = _decode_response(data).delta
    return Chunk(choices=[Choice(text=text)] if text else [])


def _quick_message(data: bytes) -> Chunk:
    event = _decode_message(data)
    delta = event.delta
    if event.error is not None or delta is None:
        return Chunk()
    return Chunk(choices=[Choice(text=delta.text or delta.thinking or delta.partial_json)])


def _look_older(event: Event, kind: str, unread: Unread) -> Look:
    choices = listed(event.get("choices"), "`choices`", unread)
    if kind in _PLAIN_KINDS and "choices" not in event:
        told = {key: event[key] for key in _AT_THE_TOP if event.get(key)}
        if not isinstance(told.get("message"), dict):  # else it is a sentence about the answer
            told.pop("message", None)
        choices = [told] if told else []
    info = event.get("cancellation_info")
    why = end_of(info.get("reason")) if isinstance(info, dict) else None
    accounts = [event.get("usage"), *(one.get("usage") for one in choices if isinstance(one, dict))]
    return Look(
        choices=[choice_of(one, place, unread) for place, one in enumerate(choices)],
        usage=usage_of(next((one for one in accounts if one), None), unread),
        cancellation_info=None if why is None else CancellationInfo(why),
    )


def _look_response(event: Event, _kind: str, unread: Unread) -> Look:
    response = event.get("response")
    if isinstance(response, dict):
        return _end_of_response(response, "", unread)
    if "output" in event and "status" in event:  # a whole answer
        return _end_of_response(event, "".join(texts(event["output"])), unread)
    text = "".join(texts(event.get("delta")))
    return Look(choices=[Choice(text=text)] if text else [])


def _end_of_response(response: Event, text: str, unread: Unread) -> Look:
    status, details = response.get("status"), response.get("incomplete_details")
    if status == "failed":
        return Look(error=error_message(response.get("error")))
    if status not in ("completed", "incomplete", "cancelled"):
        return Look()
    why = end_of(details.get("reason")) if isinstance(details, dict) else None
    reason = why or status
    choice = Choice(text=text, finish_reason=_FINISH_REASONS.get(reason, reason))
    return Look(choices=[choice], usage=usage_of(response.get("usage"), unread))


def _look_message(event: Event, kind: str, unread: Unread) -> Look:
    message, usage = event.get("message"), event.get("usage")
    if isinstance(message, dict):  # its beginning
        prompt = usage_of(message.get("usage"), unread)
        return Look(usage=None if prompt is None else Usage(prompt_tokens=prompt.prompt_tokens))
    told = event.get("delta") or event.get("content_block") or {}
    if event.get("type") == "message":  # a whole answer
        told = event
    found = "".join(texts({"delta": told}))
    why = end_of(told.get("stop_reason")) if isinstance(told, dict) else None
    reason = None if why is None else _FINISH_REASONS.get(why, why)
    is_any = found or reason is not None
    return Look(
        choices=[Choice(text=found, finish_reason=reason)] if is_any else [],
        usage=usage_of(usage, unread),
        is_done=kind == "message_stop",
    )


Read = Callable[[Event, str, Unread], Look]


def _look(read: Read, data: bytes, name: bytes) -> list[Look]:
    """What an event says, or a whole answer; nothing for a heartbeat. It raises nothing."""
    if is_error_name(name):
        return [Look(error=words_of(data))]
    if name.decode("latin-1").strip().lower() in _PLAIN_KINDS:
        name = b""  # "message" is the name of an event without one
    if is_heartbeat(name) or not data.strip():
        return []
    try:
        values = values_of(data)
    except NONSENSE as error:
        is_other = bool(name) or is_heartbeat(data)
        return [] if is_other else [Look(unread=f"{shown(data)} is no JSON ({error})")]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return [look for part in parts if (look := _look_at(read, part, name)) is not None]


def _look_at(read: Read, value: Any, name: bytes) -> Look | None:
    if value == DONE:
        return Look(is_done=True)
    if isinstance(value, dict):
        error = error_in(value, has_name=bool(name))
        if error is not None:
            return Look(error=error_message(error))
        unread = Unread()
        kind = value.get("type")
        found = read(value, kind if isinstance(kind, str) else name.decode("latin-1"), unread)
        found.unread = unread.text
        return found
    is_beat = isinstance(value, str) and value.strip().lower() in HEARTBEATS
    return None if name or not value or is_beat else Look(unread=f"{shown(value)} is no object")


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
    partial(_look, _look_older),
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
        partial(_look, _look_response),
        is_older=False,
    ),
    "/messages": Dialect(
        "messages",
        _put_messages,
        "max_tokens",
        _quick_message,
        partial(_look, _look_message),
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
