"""The short way of the thorough reader says what the long way says."""

import json
from contextlib import suppress
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.client.chunk import NONSENSE, Look
from harness.client.look import look_older
from harness.client.loose import values_of
from harness.client.plain import plain_text
from tests.harness.client.odd_streams import ALL
from tests.harness.client.test_samples import FIELDS, nested

KEYS = [
    *(*FIELDS, "index", "object", "thinking", "thought", "logprobs", "stop", "eos", "finishReason"),
    *("token_ids", "usageMetadata", "last_error", "role", "cancellation_info", "state", "level"),
]
fields = st.dictionaries(st.sampled_from(KEYS), nested, max_size=2)
OBJECT = "chat.completion.chunk"


def ways(data: bytes) -> tuple[list[Look], list[Look]]:
    """An event that is called "message" is one without a name, but goes the long way."""
    return look_older(data, b""), look_older(data, b"message")


@settings(max_examples=300)
@given(fields, fields, fields)
@example({"object": OBJECT, "usage": {"completion_tokens": "7"}}, {"index": 1}, {"thinking": "a"})
@example({"usage": {"completion_tokens": -1}}, {"logprobs": {"error": "x"}}, {"content": ["a"]})
@example({"stop": True}, {}, {})
@example({"data": "[DONE]"}, {}, {})
@example({"eval_count": 7}, {}, {})
@example({"type": "error"}, {}, {})
@example({"code": 500}, {}, {"content": ""})
@example({}, {"done": True}, {})
@example({}, {"usage": {"completion_tokens": 7}}, {})
@example({}, {}, {"error": {"message": "engine died"}})
@example({}, {}, {"finishReason": "stop"})
@example({}, {}, {"message": {"error": "engine died"}})
def test_both_ways_say_the_same(event: Any, choice: Any, delta: Any) -> None:
    choices = [{"delta": {"content": "a"} | delta} | choice]
    short, long = ways(json.dumps({"choices": choices} | event).encode())
    assert short == long


def test_it_is_taken_for_text_alone() -> None:
    """And by a good part of the odd streams' events, for which both ways say the same."""
    thinking = {"choices": [{"index": 0, "delta": {"thinking": "a"}, "finish_reason": None}]}
    assert plain_text(thinking) is not None
    assert plain_text(thinking | {"error": "engine died"}) is None
    short_ones = 0
    for part in (part for odd in ALL for part in odd.parts if part.startswith(b"data: {")):
        event = part.removeprefix(b"data: ").partition(b"\n")[0]
        short, long = ways(event)
        assert short == long
        with suppress(*NONSENSE):
            short_ones += plain_text(values_of(event)[0]) is not None
    assert short_ones > 100
