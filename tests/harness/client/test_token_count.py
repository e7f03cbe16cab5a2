"""Tokens of events: by the server's count where it says something, else by the text."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.client.chunk import Choice, UsageCounts
from harness.client.token_count import TokenCount
from harness.records import TokenCounting
from harness.workload.event_scale import Calibration, calibrate
from harness.workload.workload import load_target

END = Choice(text="", finish_reason="length")


def counter(
    scale: float | None = None, *, asked: int = 24, counts: bool = True, error: float = 0.0
) -> TokenCount:
    calibration = None if scale is None else Calibration(scale, error)
    return TokenCount(
        continuous_usage=counts, usage_per_choice=False, calibration=calibration, asked=asked
    )


def read(count: TokenCount, usages: Sequence[int | None]) -> list[int]:
    """Tokens after each event with text and this count so far."""
    so_far, found = 0, []
    for usage in usages:
        so_far += count.of(Choice(text="a"), None if usage is None else UsageCounts(0, usage))
        found.append(so_far)
    return found


ONES = list(range(1, 25))


@pytest.mark.parametrize(
    ("usages", "tokens", "by"),
    [
        (ONES, ONES, "usage"),
        ([2, 4, 4, 8], [2, 4, 4, 8], "usage"),
        ([0] * 24, ONES, "events"),
        ([24] * 24, ONES, "events"),  # the whole answer's length, from the start
        ([17] * 17, [17] * 17, "events"),  # less than was asked for: read as it is said, once
        ([None] * 24, ONES, "events"),
        ([None] * 9 + [10] + [None] * 9 + [20], list(range(1, 21)), "events"),
        ([1] * 9 + [10] * 9 + [20], None, "events"),
        ([1, None, 9], [1, 2, 9], "events"),
        ([None, None, 1, 2, 3, 4], [1, 2, 2, 2, 3, 4], "events"),  # it had not begun to count
        ([4, 8, None, None, 16], [4, 8, 9, 10, 16], "events"),
        ([4, 8, 12, None, None], [4, 8, 12, 13, 14], "events"),
        ([3, 2, 1, 5], [3, 3, 3, 5], "events"),  # a count that falls is none
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 4, 5, 6], "events"),  # it began again
    ],
)
def test_a_count_is_believed_while_it_says_something(
    usages: list[int | None], tokens: list[int] | None, by: str
) -> None:
    count = counter()
    found = read(count, usages)
    assert found == sorted(found)
    assert found == tokens or (tokens is None and found[-1] == usages[-1])
    assert count.by == by


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_two_answers_that_grow_in_step_are_each_counted(engine: str) -> None:
    target = load_target(engine)
    count = TokenCount(
        continuous_usage=target.continuous_usage,
        usage_per_choice=target.usage_per_choice,
        calibration=None,
        asked=8,
    )
    events = [(Choice(index=at % 2, text="a"), UsageCounts(9, at // 2 + 1)) for at in range(8)]
    assert [count.of(*event) for event in events] == [1] * 8
    assert count.by is TokenCounting.USAGE


@pytest.mark.parametrize(
    ("usages", "tokens"),
    [
        ([17] * 4, [1, 2, 3, 4]),  # far more than such an event brings
        ([6] * 4, [6] * 4),
        ([17, 18, 19], [1, 18, 19]),  # it was a count after all
    ],
)
def test_what_an_event_brings_says_which_first_count_is_none(
    usages: list[int], tokens: list[int]
) -> None:
    assert read(counter(1.0), usages) == tokens


def test_a_whole_answer_in_one_event_is_counted_when_it_ends() -> None:
    count = counter()
    assert read(count, [24]) == [1]
    assert count.of(Choice(text="", finish_reason="null"), UsageCounts(0, 24)) == 0  # no end
    assert count.of(END, UsageCounts(0, 24)) == 23
    assert count.of(END, UsageCounts(0, 24)) == 0
    whole = counter()
    assert whole.of(Choice(text="a", finish_reason="stop"), UsageCounts(0, 24)) == 24
    assert whole.by is TokenCounting.USAGE


@pytest.mark.parametrize(
    ("scale", "events", "tokens"),
    [
        (0.5, 6, [1, 1, 2, 2, 3, 3]),
        (0.25, 9, [1, 1, 1, 1, 1, 2, 2, 2, 2]),
        (0.5, 50, None),
    ],
)
def test_a_token_may_take_several_events(
    scale: float, events: int, tokens: list[int] | None
) -> None:
    count = counter(scale, counts=False, error=0.05)
    found = read(count, [None] * events)
    assert tokens is None or found == tokens
    assert found[-1] <= 24, "more than were asked for, by an estimate that does not show it"
    assert count.by is TokenCounting.CALIBRATED


def test_an_answer_that_surely_is_longer_than_asked_is_counted_so() -> None:
    assert read(counter(0.5, counts=False, error=0.05), [None] * 96)[-1] == 45


@given(
    answers=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=4),
    usages=st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=60),
    counts=st.booleans(),
)
def test_counts_are_whole_and_never_fall(answers: Any, usages: Any, counts: bool) -> None:
    count = TokenCount(
        continuous_usage=counts, usage_per_choice=False, calibration=calibrate(answers), asked=24
    )
    found = read(count, usages)
    assert found == sorted(found)
    assert all(isinstance(one, int) for one in found)
    if not counts or not any(usages):
        assert found[0] >= 1
