"""Connections left open: what ends with the load's own reset is censored there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from harness.analysis.cancellation import cancellations
from harness.store.manifest import IdleReading
from tests.harness.told import summary_of
from tests.made_up.rows import at

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def leave(run: RunBuilder, name: str, *, noticed: float, **more: Any) -> None:
    """Left open at 33, aborted when the server noticed."""
    run.abandon(name, t0=33, tokens=[21, 31], **{"way": "stop_reading", **more})
    run.events(name, arrived=1, admitted=10.1, first_token=20, disconnected=noticed)
    run.events(name, abort_received=noticed + 1, removed=noticed + 3, generated=2)
    run.events(name, blocks_freed=noticed + 4, finished=noticed + 4, generated=3)
    run.steps(0, 60, name, "other")


def last_of_the_load(run: RunBuilder, end: float) -> None:
    run.request("last", sent=1, tokens=[20], outcome="cut_off", end=end)


def row_of(run: RunBuilder) -> pd.Series[Any]:
    cancels = cancellations(run.frames())
    return cancels[cancels["request_id"] == "a"].iloc[0]


def warnings(run: RunBuilder) -> list[str]:
    said = [one["text"] for one in summary_of(run.frames())["validity"]]
    return [text for text in said if "left their connections open" in text]


def test_what_ends_with_the_reset_is_censored_at_it(make_run: MakeRun) -> None:
    run = make_run()
    leave(run, "a", noticed=401)
    last_of_the_load(run, 400)
    row = row_of(run)
    assert (row["censored"], row["ghost"]) == (True, pd.NA)
    assert row["cancel_latency_s"] == pytest.approx((400 - 33) / 1e3)
    assert pd.isna(row["detect_s"])
    (text,) = warnings(run)
    assert text.startswith("1 users left their connections open (stop_reading, vanish), of which")
    assert "had not noticed 1 when the run ended" in text


def test_one_that_lived_through_the_settle_time_until_the_reset_is_a_ghost(
    make_run: MakeRun,
) -> None:
    run = make_run()
    run.manifest.settle_s = 0.2
    leave(run, "a", noticed=401)
    last_of_the_load(run, 400)
    row = row_of(run)
    assert (row["ghost"], row["cancel_latency_s"]) == (True, 0.2)


def test_what_the_server_noticed_by_itself_is_known(make_run: MakeRun) -> None:
    run = make_run()
    leave(run, "a", noticed=301)
    last_of_the_load(run, 400)
    row = row_of(run)
    assert (row["censored"], row["ghost"]) == (False, False)
    assert row["cancel_latency_s"] == pytest.approx((305 - 33) / 1e3)
    assert warnings(run) == []


def test_an_orderly_end_is_nobody_elses(make_run: MakeRun) -> None:
    run = make_run()
    leave(run, "a", noticed=401, way="fin")
    last_of_the_load(run, 400)
    assert not row_of(run)["censored"]
    assert warnings(run) == []


def test_of_several_loads_each_has_its_own_reset(make_run: MakeRun) -> None:
    run = make_run()
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


def test_a_server_that_tells_nothing_is_warned_of(make_run: MakeRun) -> None:
    run = make_run()
    leave(run, "a", noticed=401)
    run.another_engine()
    (text,) = warnings(run)
    assert "latencies by gauge and counter are of that reset" in text


def test_connections_held_beyond_the_load_are_known_beyond_it(make_run: MakeRun) -> None:
    run = make_run()
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


def test_each_way_to_leave_is_told_by_itself(make_run: MakeRun) -> None:
    run = make_run()
    leave(run, "a", noticed=301)
    leave(run, "b", noticed=35, way="fin")
    last_of_the_load(run, 400)
    told = summary_of(run.frames())["breakdown"]["cancel_latency_by_way"]
    assert [(one["way"], one["cancel_latency_s"]["n"], one["ghosts"]) for one in told] == [
        ("fin", 1, 0),
        ("stop_reading", 1, 0),
    ]
