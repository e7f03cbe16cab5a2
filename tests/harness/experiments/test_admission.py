"""A request that is refused for another reason than full slots says nothing of slots."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.experiments.admission import Admission
from harness.experiments.filling import Filling
from harness.experiments.full_slots import FullSlots
from harness.experiments.outcome import CannotDecideError
from harness.experiments.streams import Streams
from harness.records import Outcome
from tests.made_up.rows import request_row


def refused(error: str) -> SimpleNamespace:
    row = request_row("r", sent_ns=0, ended_ns=1, outcome=Outcome.REJECTED, error=error)
    return SimpleNamespace(row=row, wait_tokens=lambda *_: False, join=lambda _: row)


def admission(*errors: str) -> Admission:
    """Each request is refused with the next of these words, and then with the last ones."""
    words = list(errors)

    def start(_: object) -> SimpleNamespace:
        return refused(words.pop(0) if len(words) > 1 else words[0])

    streams: Any = SimpleNamespace(
        step_s=0.02, ttft_s=0.02, slots=4, start=start, probe=lambda: None, pause=lambda _: None
    )
    return Admission(
        cast(Streams, streams), cast(Filling, None), cast(FullSlots, None), random.Random(0)
    )


def test_a_slot_that_stays_taken_is_known_by_the_words_of_full_slots() -> None:
    one = admission(
        "429: no slot is free for request 9f3e-77ab01, ask again in 3 s",
        "429: no slot is free for request beef-1c2d3e, ask again in 2 s",
    )
    one._check_full()
    assert one._knock(0, 0.0) is None


def test_other_words_are_another_limit() -> None:
    one = admission("429: no slot is free", "429: too many requests in this minute")
    one._check_full()
    with pytest.raises(CannotDecideError, match=r"another reason than full slots.*this minute"):
        one._knock(0, 0.0)
