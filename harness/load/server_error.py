"""Errors of a server, in any shape: is this one, and what are its words?

An error has no standard form inside a stream: `event: error`, {"error": ...} of any type,
{"object": "error"}, {"detail": ...}, or a bare {"code": 500, "message": ...}, which is no part of
an answer. An event with a name of its own, such as `status`, is held to be none for a code or a
message alone.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from harness.load.chunk import DONE, MAX_CHARS, NONSENSE
from harness.load.loose import as_json, clean, values_of

HEARTBEATS: Final = frozenset(
    {"ping", "pong", "heartbeat", "heart-beat", "heart_beat", "keepalive", "keep-alive"}
    | {"keep_alive", "noop", "no-op", "comment", "ok", "alive", "."}
)
NO_REASON: Final = "no reason given"
_ERRORS: Final = ("error", "exception", "failure", "fatal")
_OF_ANSWERS: Final = ("choices", "delta", "content_block", "response", "item", "output")
_OF_CHUNKS: Final = ("object", "id", "model", "created", "usage")
_CODES: Final = ("code", "status_code", "statusCode")
_FAILED: Final = frozenset({"error", "failed", "failure", "fail"})
_WELL: Final = frozenset({"ok", "success", "succeeded"})
_LEAST_STATUS: Final = 100
_FEWEST_CODE: Final = 400
_WORDS: Final = (
    *("message", "msg", "detail", "error_message", "error_msg", "error_description"),
    *("description", "reason", "title"),
)


@lru_cache(maxsize=64)
def is_error_name(name: bytes) -> bool:
    """Of an event."""
    lower = name.decode("latin-1").lower()
    return any(word in lower for word in _ERRORS)


def is_heartbeat(text: bytes) -> bool:
    """An event's name, or its data where that is no JSON."""
    return text.decode("latin-1").strip().lower() in HEARTBEATS


def error_in(event: Mapping[str, Any], *, has_name: bool) -> Any:
    """What the event says went wrong; None: it is no error."""
    if event.get("error"):
        return event
    if any(event.get(key) for key in _OF_ANSWERS) or isinstance(event.get("message"), dict):
        return None
    if any(_is_error_word(event.get(key)) for key in ("type", "object")):
        return event
    if len(event) == 1 and event.get("error") in ("", {}, []):  # nothing else is said
        return event
    return None if has_name or not _fails(event) else event


def _is_error_word(kind: Any) -> bool:
    return isinstance(kind, str) and any(word in kind.lower() for word in _ERRORS)


def _fails(event: Mapping[str, Any]) -> bool:
    """By what a bare object says, without a name and without an answer."""
    if any(value and _is_error_word(key) for key, value in event.items()):
        return True
    words, state = event.get("message") or event.get("msg"), event.get("status")
    has_words = isinstance(words, str) and words.strip().lower() not in HEARTBEATS
    if event.get("success") is False or (isinstance(state, str) and state.lower() in _FAILED):
        return True
    codes = [code for key in _CODES if (code := event.get(key)) is not None]
    codes += [] if state is None or isinstance(state, str) else [state]
    if any(_is_wrong(code, has_words=has_words) for code in codes):
        return True
    if any(event.get(key) is not None for key in ("type", *_OF_CHUNKS)):
        return False
    return bool(event.get("detail")) or (has_words and not codes and state is None)


def _is_wrong(code: Any, *, has_words: bool) -> bool:
    """A status of HTTP, or the code of a gateway: 0 and below 400 are well, and so is a word of
    success."""
    if isinstance(code, str):
        if not code.strip().lstrip("-").isdigit():
            return has_words and code.strip().lower() not in _WELL
        code = float(code)
    if not isinstance(code, int | float):
        return False
    return code >= _FEWEST_CODE or (has_words and (code < 0 or 0 < code < _LEAST_STATUS))


def words_of(data: bytes) -> str:
    """Of an event that is an error by its name."""
    try:
        value = values_of(data)[0]
        return NO_REASON if value == DONE else error_message(value)
    except NONSENSE:
        return _cut(data.decode("utf-8", "replace")) or NO_REASON


def error_message(error: Any) -> str:
    """The server's own words, else the whole of what it sent."""
    while (
        isinstance(error, dict) and isinstance(error.get("error"), dict | list) and error["error"]
    ):
        error = error["error"]
    if isinstance(error, dict):
        return _words_in(error) or NO_REASON
    if error is None or error in ("", [], {}):
        return NO_REASON
    return _cut(error) if isinstance(error, str) else as_json(error)[:MAX_CHARS]


def _words_in(error: Mapping[str, Any]) -> str:
    words = next((text for key in _WORDS if (text := _text(error.get(key)))), "")
    kind = _text(error.get("error"))
    if kind and words and kind != words:
        return _cut(f"{kind}: {words}")
    told = {key: value for key, value in error.items() if value not in (None, "", [], {})}
    return _cut(words or kind) or (as_json(error)[:MAX_CHARS] if told else "")


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _cut(text: str) -> str:
    return clean(text.strip())[:MAX_CHARS]


def refusal_message(status: int, body: bytes) -> str:
    try:
        reason = error_message(msgspec.json.decode(body))
    except NONSENSE:
        reason = _cut(body.decode(errors="replace"))
    return f"HTTP {status}: {reason}" if reason else f"HTTP {status}"
