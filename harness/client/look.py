"""The thorough reader of events: what one says, in any of the dialects. It raises nothing.

The data of an event is one JSON object, nearly always. In its place may be several, a list of them,
a text, or nothing; and lines of the stream may belong to no event. Each has one meaning: an error,
an end, a heartbeat, a notice, or what the reader of the dialect finds in it; else it is named as
unread. An event of another dialect is named with what to set.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from harness.client.chunk import (
    ABORT,
    DONE,
    NONSENSE,
    CancellationReason,
    Choice,
    Look,
    UsageCounts,
)
from harness.client.loose import (
    REASONS,
    Unread,
    account_in,
    as_json,
    choice_of,
    listed,
    reason_at,
    shown,
    texts,
    usage_of,
    values_of,
)
from harness.client.plain import END_FLAGS, plain_text
from harness.client.server_error import (
    error_message,
    failure_in,
    notice_in,
    words_beside,
    words_of,
)
from harness.client.sse import STRAY
from harness.client.words import (
    cut,
    end_of,
    is_done_text,
    is_doubtful_text,
    is_end_name,
    is_error_key,
    is_error_name,
    is_error_text,
    is_heartbeat,
    is_well,
    names_aside,
    names_failure,
    says_nothing,
    words_of_text,
)

Event = Mapping[str, Any]
Read = Callable[[Event, str, Unread], Look]

_FINISH_REASONS: Final = {
    "completed": "stop",
    "cancelled": ABORT,
    "max_output_tokens": "length",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
}
_PLAIN_KINDS: Final = frozenset(
    {"", "message", "completion", "chunk", "delta", "token", "data", "result"}
)
_AT_THE_TOP: Final = ("delta", "message", "text", "content", "response")  # without `choices`
_END_STATES: Final = frozenset({"object", "status", "state"})
_WRAPPERS: Final = ("data", "result", "response", "output", "payload", "body", "chunk")
_DEEPEST_LIST: Final = 3
_MESSAGES: Final = frozenset(
    {"message_start", "message_delta", "content_block_start", "content_block_delta"}
)
_FIELD_LINE: Final = re.compile(r"\s*([\w-]+)\s*:\s*(.*)", re.DOTALL)


def _look(read: Read, family: str, data: bytes, name: bytes) -> list[Look]:
    """What an event says, or a whole answer, or lines of no event; nothing for a heartbeat."""
    if name == STRAY:
        return _look_at_lines(data)
    if is_error_name(name):
        return [Look(error=words_of(data))]
    if (called := name.decode("latin-1").strip()).lower() in _PLAIN_KINDS:
        called = ""  # "message" is the name of an event without one
    end = [Look(ends=True)] if is_end_name(called) else []
    if not data.strip():
        return end
    try:
        values = values_of(data)
    except NONSENSE as error:
        text = data.decode("utf-8", "replace")
        return [*_look_at_text(text, called, f"{shown(data)} is no JSON ({error})"), *end]
    if not name and family == "older" and len(values) == 1:
        plain = plain_text(values[0])
        if plain is not None:
            return [plain]
    parts = (part for value in values for part in _flat(value))
    return [look for part in parts for look in _look_at(read, family, part, called)] + end


def _flat(value: Any, depth: int = 0) -> Iterator[Any]:
    """What is in a list, in lists of it, too; texts alone are one text."""
    if not isinstance(value, list) or depth > _DEEPEST_LIST:
        yield value
    elif value and all(isinstance(one, str) for one in value):
        yield ": ".join(value)
    else:
        for one in value:
            yield from _flat(one, depth + 1)


def _look_at(read: Read, family: str, value: Any, name: str) -> list[Look]:
    if value == DONE:
        return [Look(is_done=True)]
    if isinstance(value, str):
        return _look_at_text(value, name, f"{shown(value)} is no object")
    if not isinstance(value, dict):
        if not value:
            return []
        return _look_at_text(as_json(value), name, f"{shown(value)} is no object")
    if not names_aside(name) and failure_in(value, has_name=bool(name)):
        return [Look(error=error_message(value))]
    unread, kind = Unread(), _kind_of(value) or name
    if (other := _of_other_dialect(value, kind, family)) is not None:
        return [Look(unread=other)]
    found = read(value, kind, unread)
    found.unread = unread.text
    found.ends |= (bool(kind) and is_end_name(kind)) or _says_end(value)
    if not found.choices and not is_heartbeat(kind):
        found.notice = notice_in(value) or words_beside(value)
    return [found]


def _says_end(value: Event) -> bool:
    if _has_end_flag(value) or value.get("data") == DONE.decode():
        return True
    choices = listed(value.get("choices"), "", Unread())
    if any(_has_end_flag(one) for one in choices if isinstance(one, dict)):
        return True
    states = () if value.get("choices") else (value.get(key) for key in _END_STATES)
    return any(isinstance(state, str) and is_end_name(state) for state in states)


def _has_end_flag(fields: Event) -> bool:
    is_there = not END_FLAGS.isdisjoint(fields)
    return is_there and any(fields.get(flag) in (True, "true") for flag in END_FLAGS)


def _kind_of(value: Event) -> str:
    kind = value.get("type", value.get("event"))
    return kind if isinstance(kind, str) else ""


def _look_at_text(text: str, name: str, why: str) -> list[Look]:
    if says_nothing(text) or is_heartbeat(name):
        return []
    if is_done_text(text):
        return [Look(is_done=True)]
    if is_error_text(text) and not names_aside(name):
        return [Look(error=words_of_text(text))]
    return [Look(notice=cut(text))] if name or is_doubtful_text(text) else [Look(unread=why)]


def _look_at_lines(data: bytes) -> list[Look]:
    """Lines that are of no event: an error, as a whole or in one of them, or nothing."""
    text = data.decode("utf-8", "replace")
    if not text.strip():
        return []
    try:
        values = [part for value in values_of(data) for part in _flat(value)]
    except NONSENSE:
        return _look_at_plain(text)
    for value in values:
        if isinstance(value, dict) and failure_in(value, has_name=False):
            return [Look(error=error_message(value))]
        if value == DONE:
            return [Look(is_done=True)]
    hints = (_of_lines(one) for one in values if isinstance(one, dict))
    notices = (notice_in(one) for one in values if isinstance(one, dict))
    notice = next((one for one in notices if one), None)
    if notice is not None:
        return [Look(notice=notice)]
    return [Look(unread=next((one for one in hints if one), f"{shown(text)} is in no event"))]


def _look_at_plain(text: str) -> list[Look]:
    found = _FIELD_LINE.fullmatch(text)
    if found is not None and "\n" not in text.strip():  # a field that no event has
        key, value = found.groups()
        if (is_error_key(key) or names_failure(key)) and not is_well(value):
            return [Look(error=words_of(value.encode()))]
        return [Look(notice=cut(text))]
    if is_error_text(text):
        return [Look(error=words_of_text(text), is_plain=True)]
    is_of_gemini = '"candidates"' in text  # in lines that are JSON only together
    why = _of_gemini(shown(text)) if is_of_gemini else f"{shown(text)} is in no event"
    return [Look(unread=why)]


def _of_lines(value: Event) -> str | None:
    """JSON in lines without `data:`."""
    if "done" in value and ("message" in value or "response" in value):
        return (
            f"{shown(value)} is of Ollama's own dialect: set `path` in the target's file to the "
            'server\'s OpenAI API, "/v1/chat/completions"'
        )
    if "choices" in value:
        return f"{shown(value)} is a line of JSON or a whole answer, and no server-sent event"
    return _of_other_dialect(value, _kind_of(value), "")


def _of_other_dialect(value: Event, kind: str, family: str) -> str | None:
    """The dialect that it looks like, and what to set. `family`: that of the requested dialect."""
    other = ""
    if isinstance(choices := value.get("choices"), list) and choices:
        is_chat = isinstance(choices[0], dict) and "text" not in choices[0]
        other = "chat" if is_chat else "completions"
    elif kind.startswith("response."):
        other = "responses"
    elif kind in _MESSAGES:
        other = "messages"
    elif "candidates" in value:
        return _of_gemini(shown(value))
    is_asked_for = other == family or (family == "older" and other in ("chat", "completions"))
    if not other or is_asked_for:
        return None
    return (
        f'{shown(value)} is of the dialect "{other}": set `dialect = "{other}"` and its `path` in '
        "the target's file"
    )


def _of_gemini(what: str) -> str:
    return (
        f"{what} is of Gemini's own dialect: set `path` in the target's file to the server's "
        "OpenAI API"
    )


def _look_older(event: Event, kind: str, unread: Unread) -> Look:
    chunk = _chunk_in(event)
    listed_choices = listed(chunk.get("choices"), "`choices`", unread)
    if kind.lower() in _PLAIN_KINDS and "choices" not in chunk:
        chunk, at_top = _without_choices(event, kind)
        listed_choices = [_renamed(at_top)] if at_top else []
    choices = [choice_of(one, place, unread) for place, one in enumerate(listed_choices)]
    reason = reason_at(event) or reason_at(chunk)
    if (end := end_of(reason)) is not None and not any(one.finish_reason for one in choices):
        choices = choices or [Choice()]
        for one in choices:
            one.finish_reason = end
    return Look(
        choices=choices,
        usage=account_in(event, listed_choices, unread),
        cancellation_info=_why_cancelled(event, listed_choices),
        repeats=any(one.message is not None and one.finish_reason for one in choices),
    )


def _chunk_in(event: Event) -> Event:
    """The event itself, or a part of it that a gateway has wrapped."""
    return next((one for one in _parts(event) if "choices" in one), event)


def _parts(event: Event) -> Iterator[Event]:
    parts = (event, *(event.get(key) for key in _WRAPPERS))
    return (one for one in parts if isinstance(one, dict))


def _without_choices(event: Event, kind: str) -> tuple[Event, dict[str, Any]]:
    """The event, or a wrapped part, that has text or a finish reason without a choice, and what of
    it is the answer's. A `result` itself, and the `content` of a wrapped part that has no place
    for a finish reason, may be about the answer."""
    for part in _parts(event):
        found = {key: part[key] for key in _AT_THE_TOP if _may_be_of_an_answer(key, part)}
        if part is event:
            is_about_it = kind.lower() == "result"
        else:
            is_about_it = {"text", "delta"}.isdisjoint(part) and REASONS.isdisjoint(part)
        if not is_about_it and (found or end_of(reason_at(part)) is not None):
            return part, found
    return event, {}


def _may_be_of_an_answer(key: str, event: Event) -> bool:
    """A `message` that is a text is a sentence about the answer; a `response`, Ollama's answer."""
    value = event.get(key)
    if key == "message":
        return isinstance(value, dict) and bool(value)
    return bool(value) and (key != "response" or isinstance(value, str))


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    if "response" in fields:
        fields.setdefault("text", fields.pop("response"))
    return fields


def _why_cancelled(event: Event, choices: list[Any]) -> CancellationReason | None:
    info = event.get("cancellation_info")
    why = end_of(info.get("reason")) if isinstance(info, dict) else None
    for choice in choices:
        reason = None if why is not None else reason_at(choice)
        said = reason.get("message") if isinstance(reason, dict) else None
        why = cut(said) if isinstance(said, str) and said.strip() else why
    return None if why is None else CancellationReason(why)


def _look_response(event: Event, kind: str, unread: Unread) -> Look:
    response, last = event.get("response"), kind.rpartition(".")[2]
    if isinstance(response, dict):
        return _end_of_response(response, last, "", unread)
    if "output" in event and "status" in event:  # a whole answer
        return _end_of_response(event, "", "".join(texts(event["output"])), unread)
    text = "".join(texts(event.get("delta")))
    return Look(choices=[Choice(text=text)] if text else [])


def _end_of_response(response: Event, kind: str, text: str, unread: Unread) -> Look:
    status, details = response.get("status") or kind, response.get("incomplete_details")
    if status not in ("completed", "incomplete", "cancelled"):
        return Look()
    why = end_of(details.get("reason")) if isinstance(details, dict) else None
    reason = why or status
    choice = Choice(text=text, finish_reason=_FINISH_REASONS.get(reason, reason))
    name = response.get("id")
    return Look(
        choices=[choice],
        usage=usage_of(response.get("usage"), unread),
        response_id=name if isinstance(name, str) else None,
    )


def _look_message(event: Event, kind: str, unread: Unread) -> Look:
    message, usage = event.get("message"), event.get("usage")
    if isinstance(message, dict):  # its beginning
        prompt = usage_of(message.get("usage"), unread)
        return Look(
            usage=None
            if prompt is None
            else UsageCounts(
                prompt_tokens=prompt.prompt_tokens,
                prompt_tokens_details=prompt.prompt_tokens_details,
            )
        )
    part = event.get("delta") or event.get("content_block") or {}
    if event.get("type") == "message":  # a whole answer
        part = event
    found = "" if kind == "message_delta" else "".join(texts({"delta": part}))
    why = end_of(part.get("stop_reason")) if isinstance(part, dict) else None
    reason = None if why is None else _FINISH_REASONS.get(why, why)
    is_any = found or reason is not None
    return Look(
        choices=[Choice(text=found, finish_reason=reason)] if is_any else [],
        usage=usage_of(usage, unread),
        is_done=kind == "message_stop",
    )


_POOLED: Final = (
    *("data", "results", "predictions", "embedding", "embeddings"),
    *("score", "scores", "relevance_score"),
)


def _look_pooled(event: Event, _kind: str, unread: Unread) -> Look:
    """Embeddings, or scores: all of an answer, or one of a bare list of them."""
    is_any = any(event.get(key) not in (None, []) for key in _POOLED)
    return Look(
        choices=[Choice(finish_reason="stop")] if is_any else [],
        usage=usage_of(event["usage"], unread) if "usage" in event else None,
    )


look_pooled: Final = partial(_look, _look_pooled, "pooled")
look_older: Final = partial(_look, _look_older, "older")
look_response: Final = partial(_look, _look_response, "responses")
look_message: Final = partial(_look, _look_message, "messages")
