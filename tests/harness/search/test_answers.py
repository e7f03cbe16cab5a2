"""What a server owes a client, seen in how its request ended."""

from typing import Any

import pytest

from harness.records import Outcome
from harness.search.answers import of_visit, whose_words
from harness.search.broken import Broken
from harness.search.schedule import Leave, Visit
from tests.made_up.rows import request_row

STAYS = Visit(answer=8)
LEAVES = Visit(answer=64, leave=Leave(at=2))


def broken(visit: Visit, *, can_refuse: bool = False, **row: Any) -> Broken | None:
    keys: dict[str, Any] = {
        "max_tokens": visit.answer,
        "sent_ns": 0,
        "ended_ns": 9,
        "outcome": Outcome.COMPLETED,
        **row,
    }
    found = of_visit(visit, request_row("r", **keys), can_refuse=can_refuse)
    return None if found is None else found[0]


def test_a_whole_answer_of_its_length_is_right() -> None:
    assert broken(STAYS, finish_reason="length", completion_tokens=8) is None
    assert broken(STAYS, finish_reason="stop", completion_tokens=3) is None
    wrong = broken(STAYS, finish_reason="length", completion_tokens=7)
    assert wrong is Broken.LENGTH


@pytest.mark.parametrize("visit", [STAYS, LEAVES])
def test_a_cut_counts_as_long_as_the_client_is_there(visit: Visit) -> None:
    assert broken(visit, outcome=Outcome.FAILED, error="500") is Broken.CUT
    assert broken(visit, outcome=Outcome.FAILED, abandoned_ns=5) is None


def test_a_server_with_a_queue_refuses_nobody_and_one_without_may() -> None:
    refused: Any = {"outcome": Outcome.REJECTED, "status_code": 429}
    assert broken(STAYS, **refused) is Broken.CUT
    assert broken(STAYS, can_refuse=True, **refused) is None


def test_a_request_that_the_server_does_not_take_is_no_fault() -> None:
    assert broken(STAYS, outcome=Outcome.FAILED, status_code=400) is None


def test_only_a_client_that_stays_is_owed_an_end() -> None:
    assert of_visit(STAYS, None, can_refuse=False) is not None
    assert of_visit(LEAVES, None, can_refuse=False) is None
    assert broken(STAYS, outcome=Outcome.TIMED_OUT) is Broken.HUNG


def test_words_of_another_are_named() -> None:
    fox = "the quick brown fox jumps over the lazy dog"
    others = {"client 1": fox, "client 2": "something else"}
    alone = "one two three four five"
    assert whose_words(f"one two {fox}", alone, others) == "client 1"
    assert whose_words(f"one two {fox}", alone, others, own=fox) is None
    assert whose_words("one two nobody has said anything like this", alone, others) is None
    assert whose_words("one two the quick", alone, others) is None, "that may be chance"
