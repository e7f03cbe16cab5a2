"""The thorough reader's means: JSON as it is meant, and the text in it.

**A token is a token wherever its text is.** Any text in a choice, a delta or a message is
generated, whatever its field is called, so that the fields of tomorrow count. What is not text has
one of the keys in `NOT_TEXT`, or one that ends like an id, a time or a reason. Only the `name` of a
function is generated, and only a delta's message is not looked at: it repeats what deltas brought.

Types are read as they are meant: null is absent, 12.0 and "12" are 12, a number in place of text is
that text, an object stands for a list of one. What cannot be read is named in `Unread`, and nothing
but `values_of` raises.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from harness.load.chunk import (
    DONE,
    LARGEST_ANSWER,
    LARGEST_COUNT,
    MAX_CHARS,
    NONSENSE,
    Choice,
    Delta,
    TokenDetails,
    Usage,
)

NOT_TEXT: Final = frozenset(
    {
        # Who speaks, and what kind of thing it is.
        *("role", "author", "name", "id", "type", "object", "index", "model", "created", "status"),
        *("phase", "channel", "recipient", "format", "language", "mime_type", "filename", "url"),
        # Why it ended.
        *("stop", "matched_stop", "stop_sequence", "finish_details", "end_turn"),
        # About the tokens, and about the text.
        *("logprobs", "top_logprobs", "prompt_logprobs", "tokens", "routed_experts"),
        *("hidden_states", "usage", "timings", "metadata", "system_fingerprint", "service_tier"),
        *("provider", "provider_specific_fields", "obfuscation", "signature", "encrypted_content"),
        *("content_filter", "content_filter_offsets", "safety_ratings", "error"),
        # Sources that the text rests on.
        *("annotations", "citation", "citations", "references", "sources", "context", "documents"),
    }
)
_NOT_TEXT_ENDS: Final = ("_id", "_ids", "_at", "_type", "_reason", "_result", "_results")
_CALLS: Final = frozenset({"tool_calls", "function_call"})  # a `name` in them is generated
_ARGUMENTS: Final = frozenset({"arguments", "input", "partial_json"})  # all that is in them is
# In the `type` of what nobody can read, or what a tool has brought.
_NOT_MADE: Final = ("redacted", "encrypted", "tool_result")
_TEXT_ITSELF: Final = frozenset({"text", "content", "thinking", "reasoning", "reasoning_content"})
_DEEPEST: Final = 40

# Not only null: what servers write where there is no reason yet.
_NO_END: Final = frozenset(
    {"", "null", "none", "nil", "undefined", "unspecified", "in_progress", "not_finished"}
    | {"finish_reason_unspecified", "unfinished", "running", "generating", "false", "0"}
)
_SHOWN_CHARS: Final = 120


class Unread:
    """The first thing of an event that could not be read."""

    text: str | None = None

    def note(self, what: str, value: Any) -> None:
        if self.text is None and value not in _NOTHING:
            self.text = f"{what} is {shown(value)}"


_NOTHING: Final[tuple[Any, ...]] = (None, "", [], {}, False)


def values_of(data: bytes) -> list[Any]:
    """The JSON values of an event: one, or one a line, where blank lines between events are
    missing. `DONE` is a value, too. Raises NONSENSE."""
    try:
        return [msgspec.json.decode(data)]
    except NONSENSE:
        text = data.decode("utf-8", "replace").lstrip("\ufeff")
    try:
        return [_value(text)]
    except NONSENSE:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [_value(line) for line in lines]


def _value(text: str) -> Any:
    """Also with half a pair of surrogates, line ends in texts, NaN, or numbers of any length."""
    if text.strip().strip('"').upper() == "[DONE]":
        return DONE
    return json.loads(text, strict=False, parse_int=_whole)


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < MAX_CHARS else float(digits)


def shown(value: Any) -> str:
    """For a message: what was sent, shortened."""
    is_raw = isinstance(value, bytes)
    text = repr(value.decode("utf-8", "replace")) if is_raw else as_json(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def as_json(value: Any) -> str:
    try:
        return clean(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    except NONSENSE:
        return "something that cannot be shown"


def clean(text: str) -> str:
    """Fit for a file: half a pair of surrogates is replaced."""
    return text.encode("utf-8", "replace").decode()


def texts(value: Any, key: str = "", *, is_call: bool = False, depth: int = 0) -> Iterator[str]:
    """All generated texts in `value`, which came under this key."""
    if isinstance(value, str):
        if value:
            yield clean(value)
    elif _stands_for_text(key, value):
        yield as_json(value)
    elif depth < _DEEPEST:
        for name, part, is_in_call in _parts_of(value, key, is_call=is_call):
            yield from texts(part, name, is_call=is_in_call, depth=depth + 1)


def _stands_for_text(key: str, value: Any) -> bool:
    """A number where text should be, or arguments that came as an object."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (is_number and key in _TEXT_ITSELF) or (bool(value) and key in _ARGUMENTS)


def _parts_of(value: Any, key: str, *, is_call: bool) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(value, list):
        for one in value:
            yield key, one, is_call
    elif isinstance(value, dict) and not _is_not_made(value):
        for name, one in value.items():
            is_in_call = is_call or name in _CALLS
            if _may_be_text(name, is_call=is_in_call):
                yield name, one, is_in_call


def _is_not_made(thing: Mapping[str, Any]) -> bool:
    kind = thing.get("type")
    return isinstance(kind, str) and any(word in kind for word in _NOT_MADE)


def _may_be_text(key: str, *, is_call: bool) -> bool:
    if key in NOT_TEXT:
        return is_call and key == "name"
    return not key.endswith(_NOT_TEXT_ENDS)


def count_of(value: Any) -> int | None:
    """A number of tokens; None for what is none."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value <= LARGEST_COUNT or value != int(value):
        return None
    return int(value)


def end_of(reason: Any) -> str | None:
    """Why an answer has ended; None if it has not. SGLang's own form is {"type": "length"}."""
    if isinstance(reason, dict):
        reason = reason.get("type") or reason.get("reason")
    if not isinstance(reason, str) or reason.strip().lower() in _NO_END:
        return None
    return clean(reason.strip())[:MAX_CHARS]


def listed(value: Any, what: str, unread: Unread) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and value:
        return [value]
    unread.note(what, value)
    return []


def choice_of(one: Any, place: int, unread: Unread) -> Choice:
    """`place`: its number, if it names none that can be."""
    if not isinstance(one, dict):
        unread.note("a choice", one)
        return Choice(index=place, text="".join(texts(one)))
    index, reason, ids = count_of(one.get("index")), one.get("finish_reason"), one.get("token_ids")
    if not isinstance(reason, str | dict):
        unread.note("`finish_reason`", reason)
    return Choice(
        index=place if index is None or index > LARGEST_ANSWER else index,
        delta=_delta_of(one),
        finish_reason=end_of(reason),
        token_ids=ids if isinstance(ids, list) else None,
    )


def _delta_of(choice: Mapping[str, Any]) -> Delta:
    """`content`: the answer's own text; `reasoning`: all other text that was generated."""
    fields, delta = dict(choice), choice.get("delta")
    if delta is None:
        delta = fields.pop("message", None)
    else:
        fields.pop("message", None)
    fields.pop("delta", None)
    fields.pop("token_ids", None)
    own = fields.pop("text", None)
    more = dict(delta) if isinstance(delta, dict) else {}
    content = [*texts(own, "text"), *texts(more.pop("content", None), "content")]
    if not isinstance(delta, dict):
        content += texts(delta, "content")
    return Delta(content="".join(content), reasoning="".join([*texts(fields), *texts(more)]))


def usage_of(value: Any, unread: Unread) -> Usage | None:
    """By the names of either kind of dialect."""
    if not isinstance(value, dict):
        unread.note("`usage`", value)
        return None
    prompt = _counted(value, ("prompt_tokens", "input_tokens"), unread)
    completion = _counted(value, ("completion_tokens", "output_tokens"), unread)
    if prompt is None and completion is None:
        return None
    details = value.get("completion_tokens_details") or value.get("output_tokens_details")
    hidden = count_of(details.get("reasoning_tokens")) if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        completion_tokens_details=None if hidden is None else TokenDetails(hidden),
    )


def _counted(usage: Mapping[str, Any], names: tuple[str, ...], unread: Unread) -> int | None:
    for name in names:
        if (count := count_of(usage.get(name))) is not None:
            return count
        unread.note(f"`usage.{name}`", usage.get(name))
    return None
