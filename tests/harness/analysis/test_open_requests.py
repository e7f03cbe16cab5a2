"""Requests that clients hold open, and connections that their users never closed."""

from typing import Any

import pandas as pd
import pytest

from harness.analysis.audit import audit
from harness.analysis.cancellation import cancellations
from harness.analysis.facts import run_facts
from harness.analysis.figure import NotMeasurable
from harness.analysis.littles_law import delay_of_aborts
from harness.analysis.open_requests import open_requests
from harness.store.manifest import IdleReading
from tests.harness.told import summary_of
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder

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


def test_who_may_not_be_counted(run: RunBuilder) -> None:
    aborts_counted_late(run)
    held = open_requests(run.frames().requests)
    assert held.n_left == USERS
    assert held.unanswered_ns.tolist() == [at(40 * QUEUED + 20)]
    assert held.uncounted_ns.tolist() == [at(40 * RACER + 20), at(40 * QUEUED + 20)]


def test_a_race_that_the_server_won_takes_nothing_from_the_delay_of_the_others(
    run: RunBuilder,
) -> None:
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


def leave(run: RunBuilder, name: str, *, noticed: float, **more: Any) -> None:
    """Left open at 33, aborted when the server noticed."""
    run.abandon(name, t0=33, tokens=[21, 31], **{"way": "stop_reading", **more})
    run.events(name, arrived=1, admitted=10.1, first_token=20, disconnected=noticed)
    run.events(name, abort_received=noticed + 1, removed=noticed + 3, generated=2)
    run.events(name, blocks_freed=noticed + 4, finished=noticed + 4, generated=3)
    run.steps(0, 60, name, "other")


def last_of_the_load(run: RunBuilder, end: float) -> None:
    run.request("last", sent=1, tokens=[20], outcome="cut_off", end=end)


def row_of(run: RunBuilder) -> "pd.Series[Any]":
    cancels = cancellations(run.frames())
    return cancels[cancels["request_id"] == "a"].iloc[0]


def warnings(run: RunBuilder) -> list[str]:
    said = [one["text"] for one in summary_of(run.frames())["validity"]]
    return [text for text in said if "left their connections open" in text]


@pytest.mark.parametrize(
    ("noticed", "more", "found"),
    [
        (401, {}, (True, pd.NA, 400 - 33, True)),
        (301, {}, (False, False, 305 - 33, False)),  # the server noticed by itself
        (401, {"way": "fin"}, (False, False, 405 - 33, False)),  # an orderly end
    ],
)
def test_a_connection_that_the_load_reset_is_censored_there(
    run: RunBuilder, noticed: float, more: dict[str, str], found: tuple[Any, ...]
) -> None:
    leave(run, "a", noticed=noticed, **more)
    last_of_the_load(run, 400)
    row = row_of(run)
    censored, ghost, latency_ms, is_reset = found
    assert (row["censored"], row["ghost"], pd.isna(row["detect_s"])) == (censored, ghost, is_reset)
    assert row["cancel_latency_s"] == pytest.approx(latency_ms / 1e3)
    said = warnings(run)
    assert len(said) == is_reset
    if said:
        assert said[0].startswith("1 users left their connections open (stop_reading, vanish), of")
        assert "had not noticed 1 when the run ended" in said[0]


def test_one_that_lived_through_the_settle_time_until_the_reset_is_a_ghost(
    run: RunBuilder,
) -> None:
    run.manifest.settle_s = 0.2
    leave(run, "a", noticed=401)
    last_of_the_load(run, 400)
    row = row_of(run)
    assert (row["ghost"], row["cancel_latency_s"]) == (True, 0.2)


def test_of_several_loads_each_has_its_own_reset(run: RunBuilder) -> None:
    leave(run, "a", noticed=101)
    last_of_the_load(run, 100)
    run.request("later", sent=300, tokens=[310], outcome="completed", end=400)
    assert not row_of(run)["censored"]  # in one load, noticed long before its end
    run.manifest.idle.loops = [
        IdleReading(t_ns=at(200), values={}),
        IdleReading(t_ns=at(500), values={}),
    ]
    assert row_of(run)["cancel_latency_s"] == pytest.approx((100 - 33) / 1e3)
    assert row_of(run)["censored"]


def test_a_server_that_tells_nothing_is_warned_of(run: RunBuilder) -> None:
    leave(run, "a", noticed=401)
    run.another_engine()
    (text,) = warnings(run)
    assert "latencies by gauge and counter are of that reset" in text


def test_connections_held_beyond_the_load_are_known_beyond_it(run: RunBuilder) -> None:
    leave(run, "a", noticed=501)
    last_of_the_load(run, 400)
    run.manifest.window.held_until_ns = [at(600)]
    row = row_of(run)
    assert (row["censored"], row["was_reset_by_us"]) == (False, False)
    assert row["cancel_latency_s"] == pytest.approx((505 - 33) / 1e3)
    run.manifest.window.held_until_ns = [at(450)]
    row = row_of(run)
    assert (row["censored"], row["was_reset_by_us"]) == (True, True)
    assert row["cancel_latency_s"] == pytest.approx((450 - 33) / 1e3)
