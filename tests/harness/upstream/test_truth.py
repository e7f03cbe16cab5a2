"""The log in memory: bounded, found by id and by time; its file; and what fails."""

import errno
import io
import json
from itertools import count
from typing import Any

from harness.upstream.truth import TIMES_KEPT, Record, Truth


def arrive(truth: Truth, name: str | None) -> Record:
    facts: dict[str, Any] = dict.fromkeys(("connection", "nth", "prompt_tokens", "max_tokens"), 1)
    facts |= dict.fromkeys(("route", "dialect", "model", "act"), "x")
    return truth.arrived(id=name, is_stream=True, **facts)


def truth(**more: Any) -> Truth:
    return Truth(count(1).__next__, **more)


def test_only_the_newest_records_are_kept_and_counted() -> None:
    one = truth(kept=3)
    records = [arrive(one, name) for name in ("a", "b", "a", None, "a")]
    assert records[-1].asked_before == 1, "the first of its id is forgotten"
    assert [record.number for record in one.find()] == [3, 4, 5]
    assert (one.num_asked, one.num_forgotten) == (5, 2)
    assert one.find("b") == []
    assert [record.number for record in one.find("a")] == [3, 5]


def test_what_has_changed_since_a_time_comes_in_the_order_of_its_changes() -> None:
    one = truth()
    first, second, third = (arrive(one, "a") for _ in range(3))
    one.note(first, "slot")
    assert one.find("a", since_ns=second.changed_ns) == [second, third, first]
    assert one.find("a", since_ns=first.changed_ns) == [first]
    assert one.find(limit=1) == [second]


def test_the_first_way_of_closing_counts_and_the_second_is_kept() -> None:
    record = arrive(truth(), "a")
    assert (record.closed, record.shown()["has_left"]) == (None, False)
    record.fin_ns, record.rst_ns, record.tokens, record.tokens_at_close = 5, 9, 7, 4
    shown = record.shown()
    assert (shown["closed"], shown["closed_ns"], shown["rst_ns"]) == ("fin", 5, 9)
    assert (shown["tokens_after_close"], shown["has_left"]) == (3, True)
    record.ended_ns = 4
    assert not record.shown()["has_left"]


def test_times_of_tokens_are_bounded_and_their_count_is_not() -> None:
    record = arrive(truth(), "a")
    for t_ns in range(TIMES_KEPT + 5):
        record.token(t_ns)
    assert len(record.token_times_ns) == TIMES_KEPT
    assert (record.tokens, record.last_token_ns) == (TIMES_KEPT + 5, TIMES_KEPT + 4)


def test_each_event_is_a_line_and_the_last_one_holds_the_record() -> None:
    file = io.BytesIO()
    one = truth(file=file)
    record = arrive(one, "a")
    one.note(record, "stopped", why="left")
    one.note(record, "over")
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["arrived", "stopped", "over"]
    assert all((line["request"], line["id"]) == (1, "a") for line in lines)
    assert lines[1]["why"] == "left"
    assert lines[2].items() >= record.shown().items()
    assert one.stops == {"left": 1}


class Full(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, "no room")


def test_a_file_that_cannot_be_written_is_said_once() -> None:
    said: list[int] = []
    one = truth(file=Full())
    one.on_failure = lambda: said.append(1)
    record = arrive(one, "a")
    one.note(record, "slot")
    assert said == [1]
    assert one.failure is not None
    assert record.slot_ns is not None, "the log in memory goes on"
