"""The lives of branches: when each was in the batch; requests for several answers."""

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.run_facts import is_among
from harness.analysis.timeline import StepTimes, timeline
from tests.harness.analysis.scenes import only_row
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder


def lives(run: RunBuilder) -> list[tuple[object, ...]]:
    columns = ["client_request_id", "life", "in_ns", "out_ns", "reason", "freed_ns"]
    frame = timeline(run.frames())[columns].astype(object)
    return list(frame.where(frame.notna(), None).itertuples(index=False, name=None))


def test_a_preemption_ends_a_life_and_a_resumption_begins_the_next(run: RunBuilder) -> None:
    """The life that a preemption ended gave its blocks back then."""
    run.events("a", arrived=1, admitted=10, preempted=20, resumed=30, removed=40, blocks_freed=41)
    run.events("b", arrived=1, admitted=10, preempted=20, removed=40, blocks_freed=41)
    assert lives(run) == [
        ("a", 0, at(10), at(20), "preempted", None),
        ("b", 0, at(10), at(20), "preempted", None),
        ("a", 1, at(30), at(40), "removed", at(41)),
    ]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.integers(0, 9), st.integers(0, 9))
def test_steps_are_counted_by_their_ends(lengths: list[int], since: int, until: int) -> None:
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - np.array(lengths, dtype=np.int64)
    steps = StepTimes(started_ns=starts, ended_ns=ends)
    both = np.array([since]), np.array([until])
    pairs = list(zip(starts, ends, strict=True))
    if since <= until:
        assert steps.boundaries_passed(*both) == [sum(since < end <= until for _, end in pairs)]
    is_whole = any(since < start and end < until for start, end in pairs)
    assert steps.has_whole_step(*both) == [is_whole]


def test_a_life_may_be_open_or_never_begin(run: RunBuilder) -> None:
    empty = timeline(run.frames())
    assert empty.empty
    assert pd.api.types.is_integer_dtype(empty["out_ns"])
    run.events("queued", arrived=1, removed=20, blocks_freed=20)
    run.events("a", arrived=1, admitted=10)
    assert lives(run) == [("a", 0, at(10), None, None, None)]


def branch(
    run: RunBuilder, name: str, reason: str = "abort", generated: int = 0, **times: float
) -> None:
    """Events of a branch "cmpl-a-0" of request "a"."""
    first = len(run.lifecycle)
    run.events(name, reason, generated, **times)
    for event in run.lifecycle[first:]:
        event.client_request_id = name.split("-")[0]


def two_answers(run: RunBuilder) -> None:
    """5 tokens of both together read, left at 43: each has sampled 3 then, and a fourth after."""
    run.abandon("a", t0=43, tokens=[21, 22, 31, 32, 41], planned_abandon=5, n=2)
    run.events("a", arrived=1, disconnected=44)
    for name in ("a-0", "a-1"):
        branch(run, name, admitted=10.1, first_token=20, abort_received=45, generated=3)
    run.step(10, 20, sampled=("a-0", "a-1"), **{"a-0": 5, "a-1": 5})
    run.steps(2, 4, "a-0", "a-1")
    run.steps(5, 6, "other")


def test_a_branch_that_nobody_stops_makes_a_ghost_of_the_request(run: RunBuilder) -> None:
    two_answers(run)
    branch(run, "a-0", removed=50.1, blocks_freed=50.2, finished=50.3, generated=4)
    row = only_row(run)
    assert (row["ghost"], row["censored"]) == (True, True)
    assert row["generated_tokens"] == 8  # by the step log, as far as it goes
    branch(run, "a-1", "length", removed=70.1, blocks_freed=70.2, finished=70.3, generated=6)
    row = only_row(run)
    assert (row["finish_reason"], row["ghost"]) == ("length", True)


def test_an_answer_that_was_over_does_not_hide_the_cancel_of_the_other(run: RunBuilder) -> None:
    two_answers(run)
    branch(run, "a-0", "stop", removed=40.1, blocks_freed=40.2, finished=40.3, generated=3)
    branch(run, "a-1", removed=50.1, blocks_freed=50.2, finished=50.3, generated=4)
    row = only_row(run)
    assert (row["phase"], row["finish_reason"], row["ghost"]) == ("decode", "abort", False)
    assert row["wasted_tokens"] == 2


def test_left_in_the_queue_before_the_worker_knew_it(run: RunBuilder) -> None:
    run.abandon("a", t0=5, tokens=[], n=2)
    run.events("a", arrived=1, disconnected=6)
    run.steps(0, 3, "other")
    row = only_row(run)
    assert row["phase"] == "waiting"
    assert (row["wasted_tokens"], row["slot_seconds"]) == (0, 0)


def test_ids_are_found_whatever_they_are_kept_in() -> None:
    asked = ["a", "c", None, "b"]
    for dtype in (object, "string", "string[pyarrow]"):
        known = pd.Series(["b", "a", None], dtype=dtype)
        assert is_among(pd.Series(asked, dtype=dtype), known).tolist() == [True, False, False, True]
    assert is_among(pd.Series(asked), pd.Index(["c"])).tolist() == [False, True, False, False]
    nothing = pd.Series([], dtype=object)
    assert is_among(nothing, nothing).tolist() == []
    assert is_among(pd.Series(["a"]), nothing).tolist() == [False]
