"""Requests that clients hold open, and connections that their users never closed."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from harness.analysis.audit import audit
from harness.analysis.cancellations import cancellations
from harness.analysis.figure import NotMeasurable
from harness.analysis.open_requests import most_open, open_requests
from harness.analysis.run_facts import run_facts
from harness.store.manifest import IdleReading
from tests.harness.told import ms, remarks
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder

RACER, QUEUED, USERS = 5, 9, 20
OPEN = "left their connections open"


def row_of(run: RunBuilder) -> "pd.Series[Any]":
    cancels = cancellations(run.frames())
    return cancels[cancels["request_id"] == "a"].iloc[0]


def aborts_counted_late(run: RunBuilder) -> None:
    """Twenty leave, 40 ms apart, and are counted 10 ms later; but one races for its last token and
    finds it made. Another leaves the queue, and is counted like the others."""
    counted = []
    for i in range(USERS):
        begun, left = 40.0 * i, 40.0 * i + 20
        plan = "last_token" if i == RACER else "tokens:1"
        tokens = [] if i == QUEUED else [begun + 10]
        more: dict[str, Any] = {"plan": plan, "planned_abandon": len(tokens)}
        run.request(f"u{i}", sent=begun, tokens=tokens, outcome="abandoned", end=left, **more)
        counted += [] if i == RACER else [left + 10]
    run.metrics(aborted="exact")
    run.idle({"aborted": 0.0}, {"aborted": float(len(counted))})
    for t in range(0, 1000, 2):
        run.scrape(t, "its_aborted", sum(moment <= t for moment in counted))


def test_who_may_not_be_counted_is_known(run: RunBuilder) -> None:
    aborts_counted_late(run)
    frames = run.frames()
    held = open_requests(frames.requests)
    assert held.n_left == USERS
    assert held.unanswered_ns.tolist() == [at(40 * QUEUED + 20)]
    assert held.uncounted_ns.tolist() == [at(40 * RACER + 20), at(40 * QUEUED + 20)]
    facts = run_facts(frames)
    entries = {one.role: one for one in audit(frames, facts, NotMeasurable("no")).counters}
    assert entries["aborted"].verdict == "exact"
    assert entries["aborted"].due == (USERS - 2, USERS)


def left_open(run: RunBuilder, *, noticed: float, way: str = "stop_reading") -> None:
    """Left open at 33, aborted when the server noticed."""
    run.abandon("a", t0=33, tokens=[21, 31], way=way)
    run.events("a", arrived=1, admitted=10.1, first_token=20, disconnected=noticed)
    run.events("a", abort_received=noticed + 1, removed=noticed + 3, generated=2)
    run.events("a", blocks_freed=noticed + 4, finished=noticed + 4, generated=3)
    run.steps(0, 60, "a", "other")


def loads(run: RunBuilder, *ends: float, read: Sequence[float] = ()) -> None:
    """Loads that end when their last request does, and the idle readings between them."""
    for end in ends:
        run.request(f"to {end}", sent=end - 99, tokens=[end - 90], outcome="cut_off", end=end)
    run.manifest.idle.loops = [IdleReading(t_ns=at(t), values={}) for t in read]


@pytest.mark.parametrize(
    ("noticed", "way", "held_until", "is_reset", "known_ms"),
    [
        (401, "stop_reading", [], True, 400),
        (301, "stop_reading", [], False, 305),  # the server noticed by itself
        (401, "fin", [], False, 405),  # an orderly end
        (501, "stop_reading", [600], False, 505),  # connections are held beyond the load
        (501, "stop_reading", [450], True, 450),
    ],
)
def test_a_connection_that_the_load_reset_is_censored_there(
    run: RunBuilder, noticed: float, way: str, held_until: list[int], is_reset: bool, known_ms: int
) -> None:
    left_open(run, noticed=noticed, way=way)
    loads(run, 400)
    run.manifest.window.held_until_ns = [at(t) for t in held_until]
    row = row_of(run)
    assert (row["censored"], row["was_reset_by_us"]) == (is_reset, is_reset)
    assert pd.isna(row["ghost"]) == pd.isna(row["detect_s"]) == is_reset
    assert row["cancel_latency_s"] == ms(known_ms - 33)
    said = remarks(run, OPEN)
    assert len(said) == is_reset
    if said:
        assert said[0].startswith("1 users left their connections open (stop_reading, vanish), of")
        assert "had not noticed 1 when the run ended" in said[0]


def test_one_that_lived_through_the_settle_time_until_the_reset_is_a_ghost(run: RunBuilder) -> None:
    run.manifest.settle_s = 0.2
    left_open(run, noticed=401)
    loads(run, 400)
    row = row_of(run)
    assert (row["ghost"], row["cancel_latency_s"]) == (True, 0.2)


def test_of_several_loads_each_has_its_own_reset(run: RunBuilder) -> None:
    left_open(run, noticed=101)
    loads(run, 100, 400)
    assert not row_of(run)["censored"]  # in one load, noticed long before its end
    loads(run, read=(200, 500))
    assert row_of(run)["censored"]
    assert row_of(run)["cancel_latency_s"] == ms(100 - 33)


def test_a_server_that_tells_nothing_is_warned_of(run: RunBuilder) -> None:
    left_open(run, noticed=401)
    run.another_engine()
    (text,) = remarks(run, OPEN)
    assert "latencies by gauge and counter are of that reset" in text


def test_how_many_were_open_at_once() -> None:
    assert most_open([], []) == 0
    assert most_open([0, 10, 15, 16], [10, 20, 30, 17]) == 3
