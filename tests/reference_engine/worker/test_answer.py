"""The text of an answer as it may be shown, token by token."""

from typing import Any

import pytest

from reference_engine.core.early_stop import Condition, EarlyStopping, Task
from reference_engine.core.request import Sampling
from reference_engine.worker.answer import GrowingAnswer, TextEnd


@pytest.mark.parametrize(
    ("stop", "texts", "sent", "stopped"),
    [
        ((), ("a", "b"), ["a", "b", ""], False),
        (("x",), ("a", "b"), ["a", "b", ""], False),
        (("end",), ("the e", "nd is"), ["the ", ""], True),  # straddles two tokens
        (("end",), ("the e", "asy"), ["the ", "easy", ""], False),  # looked like it, was not
        (("end",), ("the e",), ["the ", "e"], False),  # held back, then flushed
        (("bc", "ab"), ("xabc",), ["x"], True),  # the earliest counts
        (("aab",), ("aa", "ab"), ["", "a"], True),
    ],
)
def test_stop_strings(
    stop: tuple[str, ...], texts: tuple[str, ...], sent: list[str], stopped: bool
) -> None:
    answer = GrowingAnswer(Sampling(max_tokens=8, stop=stop), 4, None, text_of=texts.__getitem__)
    pushed = [answer.push(at) for at in range(len(texts))]
    flushed = [] if stopped else [answer.flush()]
    assert pushed + flushed == sent
    assert (answer.end is not None) == stopped


@pytest.mark.parametrize(
    ("wanted", "tokens", "sent", "end"),
    [
        ({"stop_token_ids": (7,)}, (5, 6, 7), ["e", "f", ""], TextEnd(7, Condition.STOP_SEQUENCE)),
        (  # straddles tokens, and is held back until it is decided
            {"stop_token_sequences": ((6, 6, 7),)},
            (5, 6, 6, 6, 7),
            ["e", "", "", "f", ""],
            TextEnd("early_stop", Condition.STOP_SEQUENCE),
        ),
        ({"stop_token_sequences": ((6, 7),)}, (5, 6, 5, 6), ["e", "", "fe", "", "f"], None),
    ],
)
def test_stop_tokens(
    wanted: dict[str, Any], tokens: tuple[int, ...], sent: list[str], end: TextEnd | None
) -> None:
    sampling = Sampling(max_tokens=8, early_stopping=EarlyStopping(**wanted))
    answer = GrowingAnswer(sampling, 4, None, text_of=lambda token: chr(ord("a") + token - 1))
    pushed = [answer.push(token) for token in tokens]
    flushed = [] if end else [answer.flush()]
    assert pushed + flushed == sent
    assert answer.end == end


def test_a_stop_string_goes_before_the_end_of_a_task() -> None:
    """The brace closes the JSON; the stop string stands before it."""
    wanted = EarlyStopping(task=Task.EXTRACTION)
    sampling = Sampling(max_tokens=8, stop=("2",), early_stopping=wanted)
    answer = GrowingAnswer(sampling, 4, None, text_of=lambda _: '{"a": 12} x')
    assert answer.push(5) == '{"a": 1'
    assert answer.end == TextEnd("2")
