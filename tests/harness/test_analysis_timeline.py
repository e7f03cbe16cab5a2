"""The lives of branches: when each was in the batch, and what ended its stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from harness.analysis.timeline import timeline
from tests.made_up.rows import at

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def lives(run: RunBuilder) -> list[tuple[object, ...]]:
    columns = ["client_request_id", "life", "in_ns", "out_ns", "reason", "freed_ns"]
    frame = timeline(run.frames())[columns].astype(object)
    return list(frame.where(frame.notna(), None).itertuples(index=False, name=None))


def test_a_preemption_ends_a_life_and_a_resumption_begins_the_next(make_run: MakeRun) -> None:
    run = make_run()
    run.events("a", arrived=1, admitted=10, preempted=20, resumed=30, removed=40, blocks_freed=41)
    assert lives(run) == [
        ("a", 0, at(10), at(20), "preempted", None),
        ("a", 1, at(30), at(40), "removed", at(41)),
    ]


def test_a_life_that_the_log_does_not_end_is_open(make_run: MakeRun) -> None:
    run = make_run()
    run.events("a", arrived=1, admitted=10)
    assert lives(run) == [("a", 0, at(10), None, None, None)]


def test_a_request_that_left_the_queue_had_no_life(make_run: MakeRun) -> None:
    run = make_run()
    run.events("a", arrived=1, removed=20, blocks_freed=20)
    assert timeline(run.frames()).empty


def test_an_empty_log_has_the_columns(make_run: MakeRun) -> None:
    frame = timeline(make_run().frames())
    assert frame.empty
    assert pd.api.types.is_integer_dtype(frame["out_ns"])
