"""The check before the load: a few short streams show which fields of a request the server refuses,
and how many tokens an event of its answers brings.

A strict server answers 400 to a field that it does not know, and names it. That field is left out
of all further requests, which is said once. A limit of the answer that goes by another name there
gets that name.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec

from harness.load.chunk import NONSENSE
from harness.load.dialect import NO_LIMIT_KEY, limit_key_of
from harness.run.run_state import Preparation
from harness.run.settle import Asker, NotServedError, RefusedAnswerError
from harness.workload.event_scale import Counted
from harness.workload.target import Target

LENGTHS: Final = (24, 13)  # tokens; of both together a fixed number an event follows
LONGEST_S: Final = 20.0
_NEXT_LIMIT: Final = {"max_tokens": "max_completion_tokens"}  # what OpenAI's newer models take
LIMIT_KEYS: Final = ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_tokens")
MOST_REFUSALS: Final = 12  # a server may send us from one name to the other for ever
_OTHER_REASONS: Final = (401, 403, 404, 407, 408, 429)  # than a field
_ECHOES: Final = frozenset({"input", "body", "request", "ctx"})  # keys of what we sent ourselves
# Before a list of what the server does know.
_KNOWN: Final = re.compile(
    r"\bone of\b|(?<!not )\b(known|valid|supported|allowed|accepted|permitted) "
    r"(fields|parameters|arguments|keys|options)",
    re.IGNORECASE,
)
_OF_A_VALUE: Final = re.compile(
    r"\btoo\b|exceed|at (most|least)|maximum|minimum|greater|larger|less|must be|range|context",
    re.IGNORECASE,
)


def check_requests(run: Preparation, asker: Asker) -> tuple[Asker, list[Counted]]:
    """An asker whose requests the server takes, as `run.target` then describes them; and answers
    whose tokens and events are both known."""
    if not run.target.http or run.target.lifecycle:
        return asker, []
    run.progress.phase("asking for first answers")
    asker, said, counted = fit_requests(asker)
    for text in said:
        run.notes.add(text)
        run.progress.phase(text)
    run.take_target(asker.target)
    return asker, counted


def fit_requests(asker: Asker) -> tuple[Asker, list[str], list[Counted]]:
    """As `check_requests`, with what was left out, in sentences. A server that does not serve is
    left for others to judge."""
    said: list[str] = []
    counted: list[Counted] = []
    lengths = iter(LENGTHS)
    tokens = next(lengths)
    while len(said) < MOST_REFUSALS:
        try:
            answer = asker.answer(f"Count up to {tokens}.", tokens, longest_s=LONGEST_S)
        except RefusedAnswerError as error:
            found = without_refused(asker.target, error.status or 0, error.body)
            if found is None:
                break
            asker = replace(asker, target=found[0])
            said.append(f"{found[1]}: {error}")
            continue
        except NotServedError:
            break
        if answer.counted is None:
            break
        counted.append(answer.counted)
        is_plain = answer.counted[0] == answer.counted[1]  # a token an event: no more is to learn
        if is_plain or (tokens := next(lengths, 0)) == 0:
            break
    return asker, said, counted


def without_refused(target: Target, status: int, body: bytes) -> tuple[Target, str] | None:
    """The target without what this refusal names, and what was done; None if it names nothing that
    can be left out."""
    if not 400 <= status < 500 or status in _OTHER_REASONS:
        return None
    words = _words(body)
    extra = [key for key in target.extra_body if _names(words, key)]
    options = _named_options(target, words)
    if extra or options:
        kept = {key: one for key, one in target.extra_body.items() if key not in extra}
        left = {
            key: one for key, one in (target.stream_options or {}).items() if key not in options
        }
        named = ", ".join(f"`{key}`" for key in (*extra, *options))
        update: dict[str, Any] = {"extra_body": kept, "stream_options": left or None}
        return target.model_copy(update=update), f"the server refuses {named}, so it is left out"
    return _with_other_limit(target, words)


def _named_options(target: Target, words: Collection[str]) -> list[str]:
    options = target.stream_options or {}
    named = [key for key in options if _names(words, key)]
    if not named and _names(words, "stream_options"):
        return list(options)
    return named


def _with_other_limit(target: Target, words: Collection[str]) -> tuple[Target, str] | None:
    key = limit_key_of(target)
    if key is None:
        return None
    others = [one for one in LIMIT_KEYS if one != key and _names(words, one)]
    is_value = any(_OF_A_VALUE.search(text) for text in words)
    if not others and (is_value or not _names(words, key)):
        return None
    other = next(iter(others), _NEXT_LIMIT.get(key, NO_LIMIT_KEY))
    done = f"the length of answers is asked for by `{other}`"
    if other == NO_LIMIT_KEY:
        done = "no length of answers is asked for: the server decides when they end"
    return target.model_copy(update={"limit_key": other}), f"the server refuses `{key}`, so {done}"


def _names(words: Collection[str], key: str) -> bool:
    found = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(key)}(?![A-Za-z0-9_])")
    return any(found.search(text) for text in words)


def _words(body: bytes) -> list[str]:
    """The server's sentences and the places that it points to, but no echo of the request."""
    try:
        told = msgspec.json.decode(body)
    except NONSENSE:
        told = body.decode("utf-8", "replace")
    return list(_texts_of(told))


def _texts_of(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield _KNOWN.split(value)[0]
    elif isinstance(value, list) and depth < 10:
        for one in value:
            yield from _texts_of(one, depth + 1)
    elif isinstance(value, dict) and depth < 10:
        for key, one in value.items():
            if key not in _ECHOES:
                yield from _texts_of(one, depth + 1)
