"""Who left, and which of them a counter of aborts may never count."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from harness.analysis.audit import audit
from harness.analysis.facts import run_facts
from harness.analysis.figure import NotMeasurable
from harness.analysis.littles_law import delay_of_aborts
from harness.analysis.open_requests import open_requests
from tests.made_up.rows import at

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]

RACER, QUEUED, USERS = 5, 9, 20


def aborts_counted_late(run: RunBuilder) -> None:
    """Twenty leave, 40 ms apart, and are counted 10 ms later; but one races for its last token and
    finds it made. Another leaves the queue, and is counted like the others."""
    counted = []
    for i in range(USERS):
        begun, left = 40.0 * i, 40.0 * i + 20
        plan = "last_token" if i == RACER else "tokens:1"
        tokens = [] if i == QUEUED else [begun + 10]
        run.request(
            f"u{i}", sent=begun, tokens=tokens, outcome="abandoned", end=left,
            plan=plan, planned_abandon=len(tokens),
        )  # fmt: skip
        counted += [] if i == RACER else [left + 10]
    run.metrics(aborted="exact")
    run.idle({"aborted": 0.0}, {"aborted": float(len(counted))})
    for t in range(0, 1000, 2):
        run.scrape(t, "its_aborted", sum(moment <= t for moment in counted))


def test_who_may_not_be_counted(make_run: MakeRun) -> None:
    run = make_run()
    aborts_counted_late(run)
    held = open_requests(run.frames().requests)
    assert held.n_left == USERS
    assert held.unanswered_ns.tolist() == [at(40 * QUEUED + 20)]
    assert held.uncounted_ns.tolist() == [at(40 * RACER + 20), at(40 * QUEUED + 20)]


def test_a_race_that_the_server_won_takes_nothing_from_the_delay_of_the_others(
    make_run: MakeRun,
) -> None:
    run = make_run()
    aborts_counted_late(run)
    frames = run.frames()
    found = delay_of_aborts(frames, run_facts(frames))
    assert not isinstance(found, NotMeasurable), found
    assert found.counts.sum() == USERS - 1
    assert found.mean == pytest.approx(0.010, abs=0.001)
    facts = run_facts(frames)
    entries = {one.role: one for one in audit(frames, facts, NotMeasurable("no")).counters}
    assert entries["aborted"].verdict == "exact"
    assert entries["aborted"].due == (USERS - 2, USERS)
