"""What a request asks the upstream to do, in a line that survives gateways.

    [walkaway id=try-7 act=break-reset after=5]

Gateways drop headers and fields that they do not know, but hand the prompt on. So the line stands
in the prompt; `user`, a value of `metadata`, the model's name and the header `x-walkaway` are read
where the prompt has none. Of several lines in one text the last counts: a conversation repeats the
earlier ones.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Final, get_type_hints

ACTS: Final = ("go-on", "break-reset", "break-end", "silent", "500", "429")
_LINE: Final = re.compile(r"\[walkaway ([^\[\]]*)\]")
_LONGEST: Final = 200  # characters of a value


class OrderError(ValueError):
    """The message names the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`act`: what becomes of the answer; `after`: when this number of tokens has been sent (the
    breaks and `silent`). `times`: only the first requests with this id do it; 0: all of them.
    `tokens`: the answer's length; 0: as long as the request allows. `pad`: how many
    characters each word is longer, to fill buffers. `prefill_ms`, `end_ms`, `headers`: in place of
    the server's settings. `usage`: "no": the answer names none; "yes": it does, unasked. `words`:
    "plain": English words that are a token each in the usual vocabularies, not numbered.
    """

    id: str = ""
    act: str = "go-on"
    after: int = 0
    times: int = 0
    tokens: int = 0
    pad: int = 0
    prefill_ms: float | None = None
    end_ms: float | None = None
    headers: str | None = None
    usage: str | None = None
    words: str | None = None

    def line(self) -> str:
        values = {key: getattr(self, key) for key in _TYPES}
        given = [f"{key}={values[key]}" for key in _TYPES if values[key] != _DEFAULTS[key]]
        return f"[walkaway {' '.join(given)}]"


_TYPES: Final = get_type_hints(Order)
_DEFAULTS: Final[dict[str, Any]] = {one.name: one.default for one in fields(Order)}
_ALLOWED: Final = {
    "act": ACTS,
    "headers": ("early", "late"),
    "usage": ("yes", "no"),
    "words": ("plain",),
}


def read_order(texts: Iterable[str]) -> Order:
    """The order in the first text that has one. Raises OrderError."""
    for text in texts:
        if found := _LINE.findall(text):
            return _order(found[-1])
    return Order()


def _order(words: str) -> Order:
    given: dict[str, Any] = {}
    for word in words.split():
        key, _, value = word.partition("=")
        if key not in _TYPES:
            raise OrderError(f"[walkaway ...]: unknown key {key[:_LONGEST]!r}; {', '.join(_TYPES)}")
        given[key] = _value(key, value[:_LONGEST])
    return Order(**given)


def _value(key: str, text: str) -> str | int | float:
    allowed = _ALLOWED.get(key)
    if allowed is not None and text not in allowed:
        raise OrderError(f"[walkaway {key}={text}]: must be one of {', '.join(allowed)}")
    if _TYPES[key] is int and re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if _TYPES[key] == float | None and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    if _TYPES[key] in (str, str | None):
        return text
    raise OrderError(f"[walkaway {key}={text}]: must be a number from 0 on, of at most 9 digits")
