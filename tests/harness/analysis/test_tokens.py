"""Tokens as clients read them: their times, and tokens read beyond a plan."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis import tokens as token_times
from harness.analysis.tokens import (
    first_times,
    over_read_figures,
    read_by,
    taken_for,
    token_counting,
    token_gaps,
    tokens_read,
)
from harness.records import TokenCounting
from tests.harness.told import metric, remarks, warnings
from tests.made_up.run import RunBuilder

Lists = Sequence[Sequence[int]]


def frame(times: Lists, tokens: Lists | None = None) -> pd.DataFrame:
    tokens = [[1] * len(of_one) for of_one in times] if tokens is None else tokens
    columns = {"token_times_ns": times, "event_tokens": tokens}
    rows = pd.DataFrame(
        {
            name: pd.Series(pd.arrays.ArrowExtensionArray(pa.array(lists, pa.list_(pa.int64()))))
            for name, lists in columns.items()
        }
    )
    return rows.assign(n=1)


def test_gaps_are_of_one_of_several_answers() -> None:
    requests = frame([[5, 9], [10, 11, 30, 32, 60], [7], [1, 2, 4]]).assign(n=[1, 2, 2, 3])
    gaps, of_each = token_gaps(requests)
    assert gaps.tolist() == pytest.approx([4e-9, 20e-9, 21e-9, 30e-9])
    assert of_each.tolist() == [1, 3, 0, 0]
    gaps, of_each = token_gaps(requests, np.array([False, True, True, False]))
    assert gaps.tolist() == pytest.approx([20e-9, 21e-9, 30e-9])
    assert of_each.tolist() == [3, 0]


@settings(deadline=None)  # what a busy machine takes for it says nothing
@given(st.lists(st.lists(st.integers(0, 50), max_size=6).map(sorted), max_size=20))
def test_parts_do_not_show(times: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_times, "_ROWS_AT_ONCE", 3)
        gaps, of_each = token_gaps(frame(times))
        counted = read_by(frame(times, [[1 + t % 3 for t in of] for of in times]), np.arange(52))
        found = first_times(frame(times), every_ns=8)
    assert np.round(gaps * 1e9).tolist() == [b - a for t in times for a, b in pairwise(t)]
    assert of_each.tolist() == [max(len(t) - 1, 0) for t in times]
    flat = [t for of_one in times for t in of_one]
    assert counted.tolist() == [sum(1 + t % 3 for t in flat if t <= now) for now in range(52)]
    firsts = {t // 8: t for t in sorted(flat, reverse=True)}
    assert set(firsts.values()) <= set(found.tolist()) <= set(flat)


def test_lists_may_be_python_objects_too() -> None:
    plain = pd.DataFrame(
        {"token_times_ns": [[1, 3], [5]], "event_tokens": [[1, 1], [1]], "n": [1, 1]}
    )
    assert token_gaps(plain)[0].tolist() == [2e-9]


MS = 1_000_000


@pytest.mark.parametrize(
    ("tokens", "more", "expected"),
    [
        # As planned: after the second, at once.
        ([10, 20], {"planned_abandon": 2, "think_ns": 0}, 0),
        # Three in one receive: nobody could have left after the first.
        ([10, 10, 10], {"planned_abandon": 1, "think_ns": 0}, 2),
        ([10, 20], {"planned_abandon": 2, "think_ns": 0, "event_tokens": [1, 4]}, 3),
        # So could nobody while it thinks: what came with the planned token is beyond it.
        ([10, 20], {"planned_abandon": 2, "think_ns": 15 * MS, "event_tokens": [1, 4]}, 3),
        ([10, 20, 30], {"planned_abandon": 5, "think_ns": 15 * MS, "event_tokens": [4, 4, 4]}, 3),
        ([10, 20, 36], {"planned_abandon": 5, "think_ns": 15 * MS, "event_tokens": [4, 4, 4]}, 7),
        # A user that thinks reads on; a token after that is one too many.
        ([10, 20, 29], {"planned_abandon": 1, "think_ns": 20 * MS}, 0),
        ([10, 20, 30, 31], {"planned_abandon": 1, "think_ns": 20 * MS}, 2),
        # A user that waits for no token thinks from the sending on, here at 0.
        ([10, 20], {"planned_abandon": 0, "think_ns": 15 * MS}, 1),
        ([], {"planned_abandon": 0, "think_ns": 15 * MS}, 0),
    ],
)
def test_it_is_what_came_after_the_planned_moment(
    run: RunBuilder, tokens: list[float], more: dict[str, Any], expected: int
) -> None:
    run.abandon("before", t0=40, tokens=[5, 6, 7], planned_abandon=2, think_ns=0)
    run.abandon("a", t0=40, tokens=tokens, **more)
    run.request("stays", sent=0, tokens=[5, 6, 7], outcome="completed", end=40)
    figure = metric(over_read_figures(run.frames().requests)["over_read_tokens"])
    assert (figure.n, figure.unit) == (2, "tokens")
    assert figure.mean == (1 + expected) / 2
    assert figure.max == max(1, expected)


def test_events_that_were_counted_are_turned_into_tokens(run: RunBuilder) -> None:
    by_events: dict[str, Any] = {"token_counting": TokenCounting.EVENTS}
    whole: dict[str, Any] = {
        "tokens": [5, 6],
        "outcome": "completed",
        "end": 40,
        "completion_tokens": 8,
    }
    run.request("stays", sent=0, **whole, **by_events)
    run.abandon("a", t0=40, tokens=[5, 6, 7, 8, 9], planned_abandon=5, think_ns=0, **by_events)
    requests = run.frames().requests
    assert tokens_read(requests).tolist() == [8, 20]
    figure = metric(over_read_figures(requests)["over_read_tokens"])
    assert figure.mean == 15
    assert (token_counting(requests), taken_for(requests)) == ("events_calibrated", None)


def test_calibrated_events_are_tokens_already(run: RunBuilder) -> None:
    scaled: dict[str, Any] = {"token_counting": TokenCounting.CALIBRATED, "event_tokens": [4, 4]}
    scaled |= {"tokens_read": 8}
    known: dict[str, Any] = {"tokens_per_event": 4.0, "tokens_error": 0.1}
    whole: dict[str, Any] = {
        "tokens": [5, 6],
        "outcome": "completed",
        "end": 40,
        "completion_tokens": 7,
    }
    run.request("stays", sent=0, **whole, **scaled, **known)
    run.abandon("a", t0=40, tokens=[5, 6], planned_abandon=5, think_ns=0, **scaled, **known)
    run.abandon("first", t0=40, tokens=[5], planned_abandon=1, think_ns=0)
    requests = run.frames().requests
    assert tokens_read(requests).tolist() == [7, 8, 1]
    assert token_counting(requests) == "mixed"
    assert token_counting(requests[:2]) == "events_calibrated"
    assert taken_for(requests) == (4.0, 0.1)
    run.requests.pop()
    assert remarks(
        run, ": 4 tokens an event; what the users who left had read is known within", "info"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (0.0, ": 1 token an event, as the server's own counts confirm"),
        (0.25, "; what the users who left had read is known within 25 % (median)"),
        (1.0, "; how many tokens the users who left had read is not known"),
    ],
)
def test_it_is_said_how_sure_the_count_of_a_user_that_left_is(
    run: RunBuilder, error: float, said: str
) -> None:
    for name, missed in (("a", error), ("stays", 9.0)):
        known = {"tokens_per_event": 1.0, "tokens_error": missed, "token_counting": "calibrated"}
        outcome = "completed" if name == "stays" else "abandoned"
        run.request(name, sent=0, tokens=[5, 6], outcome=outcome, end=40, **known)
    assert remarks(run, said, "info")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([5], "; each answer came in one event, so that the tokens of a p"),
        ([5, 6], ": 4 tokens an"),
    ],
)
def test_whole_answers_in_one_event_say_nothing_of_a_part(
    run: RunBuilder, tokens: list[float], said: str
) -> None:
    counts: dict[str, Any] = {"completion_tokens": 4 * len(tokens), "token_counting": "events"}
    run.request("a", sent=0, tokens=tokens, outcome="completed", end=40, **counts)
    assert remarks(run, said, "info")


@pytest.mark.parametrize(("key", "level"), [(None, "warning"), ("none", None)])
def test_where_no_length_is_asked_for_no_answer_is_too_long(
    run: RunBuilder, key: str | None, level: str | None
) -> None:
    assert run.manifest.target is not None
    run.manifest.target.spec["limit_key"] = key
    long = {"max_tokens": 1, "completion_tokens": 2}
    run.request("a", sent=0, tokens=[5, 6], outcome="completed", end=40, **long)
    said = remarks(run, "longer than their `max_tokens` (up to 1 token more)")
    assert bool(said) is (level is not None)


def test_data_that_could_not_be_read_is_told(run: RunBuilder) -> None:
    for name in ("a", "b"):
        run.request(name, sent=0, tokens=[5], outcome="completed", end=9, unread="'{' is no JSON")
    run.request("c", sent=0, tokens=[5], outcome="completed", end=9)
    assert warnings(run, "2 of 3 answers held data that could not be read, and was left out: '{'")
