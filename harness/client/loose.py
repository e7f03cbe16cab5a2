"""The thorough reader's means: JSON as it is meant, and the text in it.

**A token is a token wherever its text is.** Any text in a choice, a delta or a message is
generated, whatever its field is called, so that the fields of tomorrow count, also in an answer
whose other events have `content`: reasoning in a new field comes before it. Text is not generated
if its key is in `NOT_TEXT`, or ends like an id, a time or a reason; if it is in a field that is not
known and has the shape of an id, a time or a blob; or if it comes with a finish reason and outside
the delta. Only the `name` of a function is generated. A message that comes with a delta repeats
what deltas brought, unless that delta is empty.

Types are read as they are meant: null is absent, 12.0 and "12" are 12, a number in place of text is
that text, an object stands for a list of one. What cannot be read is named in `Unread`, and nothing
but `values_of` raises.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from harness.client.chunk import (
    DONE,
    LARGEST_ANSWER,
    LARGEST_COUNT,
    MAX_CHARS,
    NONSENSE,
    Choice,
    Delta,
    PromptDetails,
    TokenDetails,
    UsageCounts,
)
from harness.client.words import clean, end_of, is_done_text

# All keys are compared in snake case.
NOT_TEXT: Final = frozenset(
    {
        # Who speaks, and what kind of thing it is.
        *("role", "author", "name", "id", "type", "object", "index", "model", "created", "status"),
        *("phase", "channel", "recipient", "format", "language", "mime_type", "filename", "url"),
        *("agent", "sender", "speaker", "lang", "locale", "state", "stage", "mode", "event"),
        # Why it ended.
        *("stop", "matched_stop", "stop_sequence", "finish_details", "end_turn"),
        *("stop_details", "finish_message", "status_message"),
        # About the tokens, and about the text.
        *("logprobs", "top_logprobs", "prompt_logprobs", "tokens", "routed_experts"),
        *("hidden_states", "usage", "timings", "metadata", "system_fingerprint", "service_tier"),
        *("provider", "provider_specific_fields", "obfuscation", "signature", "encrypted_content"),
        *("content_filter", "content_filter_offsets", "safety_ratings", "error"),
        *("p", "pad", "padding", "nonce", "seed", "version", "revision", "trace", "cost", "price"),
        *("date", "time", "latency", "duration", "region", "server", "host", "backend", "worker"),
        *("engine", "node", "device", "tier", "priority", "session", "user", "tag", "etag", "kind"),
        *("class", "level", "source", "encoding", "confidence", "score", "ip", "ttft", "finish"),
        *("progress", "step", "parent", "cursor", "voice", "attributes", "cached", "verbosity"),
        *("elapsed", "hostname", "deployment", "cluster", "build", "sdk", "warning", "warnings"),
        # Sources that the text rests on.
        *("annotations", "citation", "citations", "references", "sources", "context", "documents"),
    }
)
_NOT_TEXT_ENDS: Final = (
    *("id", "ids", "type", "signature", "uri"),
    *("time", "timestamp", "date", "hash", "uuid", "guid", "url", "version", "seed", "digest"),
    *("checksum", "fingerprint", "metadata", "cost", "price", "nonce", "trace", "usage", "status"),
)
_NOT_TEXT_LATER_WORDS: Final = (
    *("at", "ts", "reason", "result", "results", "params", "name", "identifier", "key", "effort"),
    *("budget", "format", "language"),
)
_CALLS: Final = frozenset({"tool_calls", "function_call"})  # a `name` in them is generated
_ARGUMENTS: Final = frozenset({"arguments", "input", "partial_json"})  # all that is in them is
# The `type` of what nobody can read, or of what a tool has brought, contains one of these.
_NOT_MADE: Final = ("redacted", "encrypted", "tool_result")
_TEXT_ITSELF: Final = frozenset({"text", "content", "thinking", "reasoning", "reasoning_content"})
# Whatever shape it has: a token of an answer may look like an id.
_KNOWN_TEXT: Final = (
    _TEXT_ITSELF | _ARGUMENTS | {"name", "refusal", "transcript", "data", "summary"}
)
_SHAPE_OF_NO_TEXT: Final = re.compile(
    r"""
      [0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}          # a UUID
    | \d{4}-\d\d-\d\d[T ]\d\d:\d\d\S*                      # a time
    | (?:0x|sha256:)?(?=[a-f]*\d)[0-9a-f]{16,}             # a hash
    | \d{10,}(?:\.\d+)? | https?://\S+                     # a moment, an address
    | (?=\S*\d)(?=\S*[a-z])(?=\S*[A-Z])[\w+/.-]{32,}={0,2}  # a blob, a JWT
    """,
    re.VERBOSE,
).fullmatch
_CAPITAL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_DEEPEST: Final = 40

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
    missing; an object may come as a text. `DONE` is a value, too. Raises NONSENSE."""
    try:
        value = msgspec.json.decode(data)
        if isinstance(value, str) and value.startswith("{"):
            return values_of(value.encode())
        return [DONE if isinstance(value, str) and is_done_text(value) else value]
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
    """It may have half a pair of surrogates, line ends in texts, NaN, or numbers of any length."""
    if is_done_text(text):
        return DONE
    return json.loads(text, strict=False, parse_int=_whole)


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < MAX_CHARS else float(digits)


def shown(value: Any) -> str:
    """What was sent, shortened for a message."""
    is_raw = isinstance(value, bytes)
    text = repr(value.decode("utf-8", "replace")) if is_raw else as_json(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def as_json(value: Any) -> str:
    try:
        return clean(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    except NONSENSE:
        return "something that cannot be shown"


def texts(value: Any, key: str = "", *, is_call: bool = False, depth: int = 0) -> Iterator[str]:
    """All generated texts in `value`, which came under this key."""
    if isinstance(value, str):
        if value and (key in _KNOWN_TEXT or not key or _SHAPE_OF_NO_TEXT(value) is None):
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
            if may_be_text(name, is_call=is_in_call):
                yield name, one, is_in_call


def _is_not_made(thing: Mapping[str, Any]) -> bool:
    kind = thing.get("type")
    return isinstance(kind, str) and any(word in kind for word in _NOT_MADE)


@lru_cache(maxsize=1024)
def may_be_text(key: str, *, is_call: bool) -> bool:
    if key in _CALLS or key in _ARGUMENTS:
        return True
    plain = _CAPITAL.sub("_", key).lower().replace("-", "_")
    if plain in NOT_TEXT:
        return is_call and plain == "name"
    before, _, last = plain.rpartition("_")
    return last not in _NOT_TEXT_ENDS and not (before and last in _NOT_TEXT_LATER_WORDS)


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


def listed(value: Any, what: str, unread: Unread) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and value:
        return [value]
    unread.note(what, value)
    return []


def number_of(choice: Mapping[str, Any], place: int) -> int:
    """`place`: its number, if it names none that can be."""
    index = count_of(choice.get("index"))
    return place if index is None or index > LARGEST_ANSWER else index


def choice_of(choice: Any, place: int, unread: Unread) -> Choice:
    if not isinstance(choice, dict):
        unread.note("a choice", choice)
        return Choice(index=place, text="".join(texts(choice)))
    reason, ids = _reason_in(choice), choice.get("token_ids")
    finish_reason = end_of(reason)
    if finish_reason is None and not isinstance(reason, str | dict):
        unread.note("`finish_reason`", reason)
    delta, message = _deltas_of(choice, has_ended=finish_reason is not None)
    return Choice(
        index=number_of(choice, place),
        delta=delta,
        message=message,
        finish_reason=finish_reason,
        token_ids=ids if isinstance(ids, list) else None,
    )


# vLLM's `stop_reason` says more about its `finish_reason`, which comes first.
_IN_ORDER: Final = ("finish_reason", "finishReason", "done_reason", "stop_reason", "stopReason")
REASONS: Final = frozenset(_IN_ORDER)


def reason_at(fields: Any) -> Any:
    """A finish reason by any of its names."""
    if not isinstance(fields, dict) or REASONS.isdisjoint(fields):
        return None
    return next((reason for key in _IN_ORDER if (reason := fields.get(key)) is not None), None)


def _reason_in(choice: Mapping[str, Any]) -> Any:
    first = None
    for place in (choice, choice.get("delta"), choice.get("message")):
        reason = reason_at(place)
        if end_of(reason) is not None:
            return reason
        first = reason if first is None else first
    return first


def _deltas_of(choice: Mapping[str, Any], *, has_ended: bool) -> tuple[Delta | None, Delta | None]:
    """The delta, or else the message: of an end it may repeat the whole answer.
    `content`: the answer's own text; `reasoning`: all other text that was generated."""
    fields = dict(choice)
    delta, message = fields.pop("delta", None), fields.pop("message", None)
    own = [*texts(fields.pop("text", None), "text")]
    fields.pop("token_ids", None)
    found = delta_of(message if delta is None and not has_ended else delta)
    rest = "" if has_ended else "".join(texts(fields))
    if own or rest or (delta is not None and (found.content or found.reasoning)):
        content = found.content or ""
        content = content if own == [content] else "".join([*own, content])
        return Delta(content=content, reasoning=f"{rest}{found.reasoning}"), None
    found = delta_of(message)
    return (None, found) if has_ended or delta is None else (found, None)


def delta_of(value: Any) -> Delta:
    if not isinstance(value, dict):
        return Delta(content="".join(texts(value, "content")), reasoning="")
    more = dict(value)
    content = "".join(texts(more.pop("content", None), "content"))
    return Delta(content=content, reasoning="".join(texts(more)))


def account_in(event: Mapping[str, Any], choices: list[Any], unread: Unread) -> UsageCounts | None:
    """The first account of the tokens: the event's own, a choice's, or that of a part such as
    `x_groq`, `message` or `response`."""
    found = event.get("usage") or event.get("usageMetadata")
    for part in () if found else (*choices, *event.values()):
        if isinstance(part, dict) and (found := part.get("usage") or part.get("usageMetadata")):
            break
    if not found and not NATIVE_COUNTS.isdisjoint(event):
        found = {key: one for key, one in event.items() if key in NATIVE_COUNTS}
    return usage_of(found, unread) if found else None


_PROMPT: Final = (
    *("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "promptTokenCount"),
    *("inputTokenCount", "prompt_eval_count", "tokens_evaluated"),
)
_COMPLETION: Final = (
    *("completion_tokens", "output_tokens", "completionTokens", "outputTokens"),
    *("candidatesTokenCount", "outputTokenCount", "eval_count", "tokens_predicted"),
)
_CACHED: Final = ("cache_read_input_tokens", "cached_tokens", "prompt_cache_hit_tokens")
NATIVE_COUNTS: Final = frozenset(
    {"eval_count", "prompt_eval_count", "tokens_predicted", "tokens_evaluated"}
)


def usage_of(value: Any, unread: Unread) -> UsageCounts | None:
    """The counts, by any of their names."""
    if not isinstance(value, dict):
        unread.note("`usage`", value)
        return None
    prompt = _counted(value, _PROMPT, unread)
    completion = _counted(value, _COMPLETION, unread)
    if prompt is None and completion is None:
        return None
    details = value.get("completion_tokens_details") or value.get("output_tokens_details")
    hidden = count_of(details.get("reasoning_tokens")) if isinstance(details, dict) else None
    cached = _cached_in(value)
    if prompt is not None and "cache_read_input_tokens" in value:  # Anthropic's leaves them out
        prompt += (cached or 0) + (count_of(value.get("cache_creation_input_tokens")) or 0)
    return UsageCounts(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=count_of(value.get("total_tokens")),
        reasoning_tokens=count_of(value.get("reasoning_tokens")),
        completion_tokens_details=None if hidden is None else TokenDetails(hidden),
        prompt_tokens_details=None if cached is None else PromptDetails(cached),
    )


def _cached_in(usage: Mapping[str, Any]) -> int | None:
    """OpenAI's place in the details, and others': Anthropic's, Moonshot's, DeepSeek's."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    named = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = (count_of(one) for one in (named, *(usage.get(key) for key in _CACHED)))
    return next((count for count in counts if count is not None), None)


def _counted(usage: Mapping[str, Any], names: tuple[str, ...], unread: Unread) -> int | None:
    for name in names:
        if (count := count_of(usage.get(name))) is not None:
            return count
        unread.note(f"`usage.{name}`", usage.get(name))
    return None
