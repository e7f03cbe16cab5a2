"""A short way for the thorough reader: events that can say nothing but text, as nearly all do.

Text in a field that the quick reader does not know comes with each token of some servers. Such an
event needs no search for errors, ends and notices if none of its keys can say one.
"""

from collections.abc import Mapping
from typing import Any, Final

from harness.client.chunk import Choice, Look
from harness.client.loose import (
    NATIVE_COUNTS,
    REASONS,
    Unread,
    delta_of,
    may_be_text,
    number_of,
    usage_of,
)
from harness.client.server_error import CHOICE_KEYS, FAILING_KEYS, KIND_KEYS
from harness.client.words import is_error_key, short

END_FLAGS: Final = frozenset({"done", "is_end", "is_finished", "finished", "stop", "eos"})
_ACCOUNTS: Final = frozenset({"usage", "usageMetadata", "cancellation_info", "token_ids", "data"})
_SAYS_MORE: Final = (
    CHOICE_KEYS | FAILING_KEYS | KIND_KEYS | END_FLAGS | REASONS | NATIVE_COUNTS | _ACCOUNTS
)
_OBJECTS: Final = ("chat.completion.chunk", "text_completion", "chat.completion")


def plain_text(event: Any) -> Look | None:
    """The text of an event with one choice and its delta; None: the event may say more."""
    choices = event.get("choices") if isinstance(event, dict) else None
    if not isinstance(choices, list) or len(choices) != 1:
        return None
    choice = choices[0]
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or not _is_plain(event, choice, delta):
        return None
    unread, usage = Unread(), event.get("usage")
    look = Look(
        choices=[Choice(index=number_of(choice, 0), delta=delta_of(delta))],
        usage=usage_of(usage, unread) if usage else None,
    )
    look.unread = unread.text
    return look


def _is_plain(
    event: Mapping[str, Any], choice: Mapping[str, Any], delta: Mapping[str, Any]
) -> bool:
    for key, one in event.items():
        if one is None or key in ("choices", "usage") or (key == "object" and one in _OBJECTS):
            continue
        if _may_say_more(key) or isinstance(one, dict | list):
            return False
    for key, one in choice.items():
        if one is None or key in ("index", "delta"):
            continue
        if _may_say_more(key) or may_be_text(key, is_call=False):
            return False
    return not any(_may_say_more(key) and one is not None for key, one in delta.items())


def _says_no_more(key: str) -> bool:
    return key not in _SAYS_MORE and not is_error_key(key)


_is_silent: Final = short(_says_no_more)


def _may_say_more(key: str) -> bool:
    """A key without end may say more, too."""
    return not _is_silent(key)
