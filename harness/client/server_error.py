"""Errors of a server, in any shape: is this one, and what are its words?

An error has no standard form inside a stream. An object is one if

- a key of it names an error and has something in it: {"error": ...} of any type, `errors`,
  `fault`, `error_code`. If every leaf is empty, 0 or a word for "well", it says that there is none;
- its type or its name does: "error", "abort", "response.failed";
- it has a failing code, status or success flag: {"code": 500}, {"ok": false};
- one of these is in a part of it: `response`, `base_resp`, `data`, a choice, a delta.

It is none if it is about something else (its type, its level or its state: `info`, `warning`,
`retry`, `tool_result`), or if a code next to the words of an error says that all is well.

A message or a detail alone is a notice. It is the reason only if the stream then ends early.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from harness.client.chunk import DONE, MAX_CHARS, NONSENSE
from harness.client.loose import as_json, texts, values_of
from harness.client.words import (
    cut,
    is_error_key,
    is_error_text,
    is_failing_state,
    is_failing_word,
    is_heartbeat,
    is_progress,
    is_well,
    names_aside,
    names_failed_state,
    names_failure,
    words_of_text,
)

NO_REASON: Final = "no reason given"
_OF_ANSWERS: Final = ("choices", "delta", "content_block", "response", "item", "output")
_OF_CHUNKS: Final = ("type", "event", "object", "id", "model", "created", "usage")
_KINDS: Final = (
    *("type", "event", "object", "kind", "level", "event_type", "eventType", "msg_type"),
    *("message_type", "messageType", "__type"),
)
_CODES: Final = (
    *("code", "status_code", "statusCode", "http_status", "httpStatus", "Code", "StatusCode"),
    *(
        "http_status_code",
        "httpStatusCode",
        "grpc_status",
        "grpcStatus",
        "result_code",
        "resultCode",
    ),
    *("return_code", "returnCode", "ret_code", "retCode", "retcode", "ret", "rc"),
)
_STATES: Final = ("status", "state", "Status")
_FLAGS: Final = ("success", "ok", "succeeded", "is_success", "isSuccess")
_BAD_FLAGS: Final = ("failed", "aborted", "cancelled", "canceled", "timed_out", "interrupted")
_PARTS: Final = ("response", "data", "result", "results", "body", "payload", "header", "base_resp")
_MORE_PARTS: Final = ("meta", "status", "resp", "reply", "detail", "details", "value", "params")
_ALL_PARTS: Final = (*_PARTS, *_MORE_PARTS)
_OF_CHOICES: Final = ("choices", "delta", "message")  # only their `error` is one
KIND_KEYS: Final = frozenset(_KINDS)
_PART_KEYS: Final = frozenset(_ALL_PARTS)
CHOICE_KEYS: Final = frozenset(_OF_CHOICES)
FAILING_KEYS: Final = frozenset((*_CODES, *_STATES, *_FLAGS, *_BAD_FLAGS))
# Keys of a tool, of an account, or of the client's own words, which the server repeats.
_OF_OTHERS: Final = frozenset(
    {"item", "part", "content_block", "arguments", "input", "usage", "metadata"}
)
_DEEPEST: Final = 6
_MOST_DEEP: Final = 40
_IS_GOOD_CODE: Final = re.compile(r"200+").fullmatch
_CODES_OF_ERRORS: Final = ("code", "errcode", "errorcode", "errno", "statuscode", "retcode")
_COUNTED: Final = ("errors", "exceptions", "failures")  # a number of them is an account
_WORDS: Final = (
    *("message", "msg", "detail", "errormessage", "errormsg", "errmsg", "errordescription"),
    *("statusmsg", "statusmessage", "faultstring", "description", "reason", "title", "info"),
    *("grpcmessage", "resultmsg", "resultmessage", "returnmsg", "returnmessage", "retmsg"),
)
_WORDS_AT_LAST: Final = ("data", "body", "result", "text", "content", "response")


def error_in(event: Mapping[str, Any], *, has_name: bool) -> Any:
    """What the event says went wrong; None: it is no error. `has_name`: it is an event of its own,
    such as `status`, whose codes are its own, too, unless they are HTTP's. A body with nothing but
    a message is an error: it stands in place of an answer."""
    found = failure_in(event, has_name=has_name)
    return event if found or (not has_name and notice_in(event)) else None


def failure_in(event: Mapping[str, Any], *, has_name: bool, depth: int = 0) -> bool:
    kinds = _strings(event, _KINDS) if not KIND_KEYS.isdisjoint(event) else ()
    for one in (*kinds, *_strings(event, _STATES)):
        if names_aside(one):
            return False
        if one in kinds and names_failure(one):
            return True
    if _has_error(event):
        return True
    may_fail = not FAILING_KEYS.isdisjoint(event) and not _has_text(event)
    if may_fail and _fails(event, has_name=has_name):
        return True
    parts = event.items() if depth < _DEEPEST else ()
    return any(
        _fails_inside(key, value, has_name=has_name, depth=depth + 1)
        for key, value in parts
        if isinstance(value, dict | list) and key not in _OF_OTHERS
    )


def _fails_inside(key: str, value: Any, *, has_name: bool, depth: int) -> bool:
    """A part can say all that an event can; a choice, and whatever else, only has an `error`."""
    is_part, is_choice = key in _PART_KEYS, key in CHOICE_KEYS
    if isinstance(value, dict):
        value = (value,)
    elif not isinstance(value, list) or not (is_part or is_choice):
        return False
    for one in value:
        if not isinstance(one, dict):
            continue
        if failure_in(one, has_name=has_name, depth=depth) if is_part else _has_error(one):
            return True
        if is_choice and depth < _DEEPEST:
            inner = ((name, one[name]) for name in _OF_CHOICES if name in one)
            if any(_fails_inside(*two, has_name=has_name, depth=depth + 1) for two in inner):
                return True
    return False


def notice_in(event: Mapping[str, Any]) -> str | None:
    """The words of an object that is nothing but words."""
    if _has_answer(event) or any(event.get(key) is not None for key in _OF_CHUNKS):
        return None
    fields = _normal(event)
    text = _first_text(fields, (*_WORDS, *_CODES, *_STATES))
    if text:
        return None if is_well(text) or is_heartbeat(text) else cut(text)
    return _words_in(fields) or as_json(event)[:MAX_CHARS] if fields.get("detail") else None


def words_beside(event: Mapping[str, Any]) -> str | None:
    """The words of an event that has a type or an account, too."""
    if _has_answer(event):
        return None
    words = _first_text(_normal(event), _WORDS)
    return None if is_progress(words) else cut(words)


def _has_answer(event: Mapping[str, Any]) -> bool:
    return any(event.get(key) for key in _OF_ANSWERS) or isinstance(event.get("message"), dict)


def _has_text(event: Mapping[str, Any]) -> bool:
    is_message = isinstance(event.get("message"), dict)
    return is_message or any(True for key in _OF_ANSWERS for _ in texts(event.get(key), key))


def _strings(event: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for key in keys if isinstance(one := event.get(key), str))


def _has_error(event: Mapping[str, Any]) -> bool:
    wrong = [key for key in event if is_error_key(key) and not _is_hollow(event[key], key)]
    return bool(wrong) and not _says_well_by_code(event, wrong)


def _says_well_by_code(event: Mapping[str, Any], wrong: list[str]) -> bool:
    """{"errcode": 0, "errmsg": "processed"}: there are words alone, and none of a failure."""
    fields = _normal(event)
    has_good_code = any(_is_zero(fields.get(key)) for key in _CODES_OF_ERRORS)
    return has_good_code and all(
        key.lower().endswith(("msg", "message")) and not is_error_text(_text(event[key]))
        for key in wrong
    )


def _is_zero(code: Any) -> bool:
    return code in (0, "0", 200, "200") and not isinstance(code, bool)


def _is_hollow(value: Any, key: str, depth: int = 0) -> bool:
    """Nothing in it says anything."""
    if isinstance(value, dict) and depth < _MOST_DEEP:
        return all(_is_hollow(one, name, depth + 1) for name, one in value.items())
    if isinstance(value, list) and depth < _MOST_DEEP:
        return all(_is_hollow(one, key, depth + 1) for one in value)
    is_code = key.lower().endswith(("code", "status", "no"))
    if isinstance(value, str):
        return is_well(value) or (is_code and _is_good(value.strip()))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_count = is_number and key.lower().endswith(_COUNTED)
    return not value or is_count or (is_code and _is_good(str(value)))


def _is_good(code: str) -> bool:
    return _IS_GOOD_CODE(code) is not None


def _fails(event: Mapping[str, Any], *, has_name: bool) -> bool:
    """A flag, a code or a status of the event says that it failed."""
    words = _first_text(_normal(event), _WORDS)
    if any(_is_false(event.get(key), words) for key in _FLAGS):
        return True
    if any(event.get(key) is True for key in _BAD_FLAGS):
        return True
    failed = is_failing_state if words else names_failed_state
    if any(failed(one) for one in _strings(event, _STATES)):
        return True
    codes = [event.get(key) for key in _CODES]
    codes += [one for key in _STATES if not isinstance(one := event.get(key), str)]
    return any(_is_wrong(code, words, has_name=has_name) for code in codes)


def _is_false(flag: Any, words: str) -> bool:
    """0 may be a number of something, unless words come with it."""
    is_zero = isinstance(flag, int) and flag == 0 and (bool(words) or flag is False)
    return is_zero or flag in ("false", "False")


def _is_wrong(code: Any, words: str, *, has_name: bool) -> bool:
    """A status of HTTP, or the code of a gateway: 0, 1xx to 3xx and 20000 are well, and so is any
    other with a word of success."""
    if isinstance(code, str):
        if not code.strip().lstrip("-").isdecimal():
            return is_failing_word(code)
        code = float(code)
    if isinstance(code, bool) or not isinstance(code, int | float) or not math.isfinite(code):
        return False
    if 400 <= code < 600:
        return True
    is_good = code == 0 or 100 <= code < 400 or _is_good(f"{code:.0f}")
    if has_name or is_good or (words and is_progress(words)):
        return False
    return code >= 600 or bool(words)


def words_of(data: bytes) -> str:
    """The words of an event that is an error by its name."""
    try:
        value = values_of(data)[0]
        return NO_REASON if value == DONE else error_message(value)
    except NONSENSE:
        return words_of_text(data.decode("utf-8", "replace")) or NO_REASON


def error_message(error: Any) -> str:
    """The server's own words, else the whole of what it sent."""
    if isinstance(error, str):
        return cut(error) or NO_REASON
    if isinstance(error, dict | list):
        inner = error
        while isinstance(inner, dict) and (next_one := inner.get("error")):
            if not isinstance(next_one, dict | list):
                break
            inner = next_one
        return _words_at(inner) or _words_at(error) or _rest(inner) or NO_REASON
    return NO_REASON if error is None else as_json(error)[:MAX_CHARS]


def _rest(error: Any) -> str:
    said = error
    if isinstance(error, dict):
        said = [value for value in error.values() if value not in (None, "", [], {})]
    return as_json(error)[:MAX_CHARS] if said else ""


def _words_at(value: Any, depth: int = 0) -> str:
    if isinstance(value, str):
        return cut(value)
    if depth > _MOST_DEEP:
        return ""
    if isinstance(value, list):
        if value and all(isinstance(one, str) for one in value):
            return cut("; ".join(value))
        return next((words for one in value if (words := _words_at(one, depth + 1))), "")
    return _words_in(_normal(value), depth) if isinstance(value, dict) else ""


def _words_in(fields: Mapping[str, Any], depth: int = 0) -> str:
    """What the object itself says, after what its error is called; else what its parts say."""
    errors = [value for key, value in fields.items() if is_error_key(key)]
    kind = next((text for one in errors if (text := _text(one))), "")
    words = _first_text(fields, _WORDS)
    if words and not kind:  # of a title, the parts say more
        parts = (_words_at(one, depth + 1) for one in errors if isinstance(one, dict | list))
        kind, words = words, next((one for one in parts if one), "")
    if kind and words and kind != words:
        return cut(f"{kind}: {words}")
    if words or kind:
        return cut(words or kind)
    inner = (*errors, *(fields.get(key.replace("_", "")) for key in _ALL_PARTS), *fields.values())
    found = (_words_at(one, depth + 1) for one in inner if isinstance(one, dict | list))
    return next((one for one in found if one), "") or cut(_first_text(fields, _WORDS_AT_LAST))


def _normal(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`errorMessage` and `error_message` are one key."""
    return {key.lower().replace("_", "").replace("-", ""): one for key, one in fields.items()}


def _first_text(fields: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return next((text for key in keys if (text := _text(fields.get(key)))), "")


def _text(value: Any) -> str:
    """One text, or the texts of a list joined; else empty."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = "; ".join(value)
    return value.strip() if isinstance(value, str) else ""


def refusal_message(status: int, body: bytes) -> str:
    try:
        reason = error_message(msgspec.json.decode(body))
    except NONSENSE:
        reason = words_of_text(body.decode(errors="replace"))
    return f"HTTP {status}: {reason}" if reason else f"HTTP {status}"
