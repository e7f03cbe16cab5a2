"""What a request asks for, in any of the dialects: `read_asked`.

It is lenient where gateways differ: unknown fields are left out, any model is served. A token of a
prompt is a word between blanks, or a token id.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from harness.client.dialect import dialect_of_path
from harness.upstream.orders import Order, OrderError, read_order
from harness.workload.target import DialectName

DEFAULT_TOKENS: Final = 128  # of an answer whose request names no limit
MOST_TOKENS: Final = 32_768  # of an answer: what a reader that has stalled leaves here is bounded
ORDER_HEADER: Final = "x-walkaway"
ROUTES: Final = ("/chat/completions", "/completions", "/responses", "/messages")
_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class AskedError(ValueError):
    """The request cannot be answered; the message says why, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`usage`: in which events of a stream: at its "end", in "each" as well, or in "none"."""

    dialect: DialectName
    model: str
    is_stream: bool
    tokens: int
    is_cut: bool  # the answer ends at its limit, and not on its own
    prompt_tokens: int
    usage: str
    order: Order


def is_answered(path: str) -> bool:
    return path.rstrip("/").endswith(ROUTES)


def read_asked(path: str, body: bytes, headers: Mapping[str, str]) -> Asked:
    """`headers`: their names in small letters. Raises AskedError."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AskedError(f"the body is no JSON: {error}") from error
    if not isinstance(asked, dict):
        raise AskedError("the body must be a JSON object")
    if asked.get("n") not in (None, 1):
        raise AskedError("n: this server gives one answer a request")
    dialect = dialect_of_path(path)
    try:
        prompt = list(_texts(_prompt(asked)))
        order = read_order([" \n".join(prompt), *_other_texts(asked, headers)])
    except OrderError as error:
        raise AskedError(str(error)) from error
    except RecursionError as error:
        raise AskedError("the prompt: lists in too many lists") from error
    limit = _limit(asked)
    tokens = min(order.tokens or limit, limit)
    return Asked(
        dialect=dialect.name,
        model=str(asked.get("model") or ""),
        is_stream=asked.get("stream") is True,
        tokens=tokens,
        is_cut=tokens == limit,
        prompt_tokens=sum(len(text.split()) for text in prompt),
        usage=_usage(asked, order, is_asked_for=dialect.is_older),
        order=order,
    )


def _limit(body: Mapping[str, Any]) -> int:
    for key in _LIMITS:
        limit = body.get(key)
        if limit is None:
            continue
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise AskedError(f"{key}: must be a whole number, 1 or more")
        return min(limit, MOST_TOKENS)
    return DEFAULT_TOKENS


def _usage(body: Mapping[str, Any], order: Order, *, is_asked_for: bool) -> str:
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    if order.usage == "no":
        return "none"
    if options.get("continuous_usage_stats"):
        return "each"
    is_wanted = not is_asked_for or order.usage == "yes" or not body.get("stream")
    return "end" if is_wanted or options.get("include_usage") else "none"


def _prompt(body: Mapping[str, Any]) -> list[Any]:
    """All that the model reads, in its order."""
    return [body.get(key) for key in ("system", "instructions", "prompt", "messages", "input")]


def _texts(value: Any) -> Iterator[str]:
    """The texts in a prompt, whole messages and parts of them too; a token id is a text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for key in ("content", "text"):
            yield from _texts(value.get(key))


def _other_texts(body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[str]:
    metadata = body.get("metadata")
    values = metadata.values() if isinstance(metadata, dict) else []
    for one in (body.get("user"), *values, body.get("model"), headers.get(ORDER_HEADER)):
        if isinstance(one, str):
            yield one
