"""Processes of the load that were too busy to be believed, or died: from ticks and marks."""

from typing import Any

import pytest

from harness.analysis.load_side import load_sides
from harness.analysis.run_facts import run_facts
from harness.records import ClientSample
from harness.store.manifest import LoadProcessRecord
from tests.harness.told import remarks, warnings
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder

TICKS = 100  # one each 10 ms of the load window
LONG_S = 100


def watched(
    run: RunBuilder, *, pid: int = 8, busy: float, late_ms: float = 0.1, late: int = 0
) -> None:
    """A process that used `busy` of a core; its first `late` ticks came `late_ms` late."""
    for number in range(TICKS):
        tick(run, 10 * number, pid, busy * number / 100, late_ms if number < late else 0.1)


def watched_long(
    run: RunBuilder, *, busy: range = range(0), late: range = range(0), late_ms: float = 80
) -> None:
    """A load of 100 s, with ten ticks a second: in some of the seconds the process was busy all the
    time, in some each tick came late."""
    run.client.clear()
    run.manifest.window.load_ended_ns = at(LONG_S * 1e3)
    cpu_s = 0.0
    for number in range(LONG_S * 10):
        cpu_s += (1.0 if number // 10 in busy else 0.1) / 10
        tick(run, 100 * (number + 1), 8, cpu_s, late_ms if number // 10 in late else 0.1)


def tick(run: RunBuilder, t_ms: float, pid: int, cpu_s: float, lag_ms: float) -> None:
    lag_ns = round(lag_ms * 1e6)
    one = ClientSample(t_ns=at(t_ms), pid=pid, host="here", lag_ns=lag_ns, cpu_s=cpu_s, streams=3)
    run.client.append(one)


def invalid(run: RunBuilder) -> list[str]:
    run.request("s", sent=0, tokens=[100, 110, 120], outcome="completed", end=121)
    return remarks(run, level="invalid")


def share_of_a_core(run: RunBuilder) -> float | None:
    (side,) = load_sides(run.frames(), run_facts(run.frames()))
    return side.cpu_share


@pytest.mark.parametrize(
    ("ticks", "reason"),
    [
        ({"busy": 0.89}, None),
        ({"busy": 0.95}, "it used 95 % of a core"),
        ({"busy": 0.2, "late": 4, "late_ms": 500}, None),
        ({"busy": 0.2, "late": 10, "late_ms": 49}, None),
        ({"busy": 0.2, "late": 10, "late_ms": 60}, "over 60 ms late, and the most is 50 ms"),
    ],
)
def test_a_saturated_client_makes_the_run_invalid(
    run: RunBuilder, ticks: dict[str, Any], reason: str | None
) -> None:
    watched(run, pid=7, busy=0.1)
    watched(run, pid=8, **ticks)
    said = invalid(run)
    assert len(said) == (reason is not None)
    if reason is not None:
        assert reason in said[0]
        assert "pid 8" in said[0]
        assert ("more processes (--processes)" in said[0]) == (ticks["busy"] > 0.9)


@pytest.mark.parametrize(
    ("stretch", "reason"),
    [
        ({"busy": range(50)}, "at its busiest it used 100 % of a core"),
        ({"busy": range(40, 51)}, "at its busiest it used 100 % of a core"),
        ({"busy": range(0, 100, 2)}, None),
        ({"busy": range(40, 48)}, None),
        ({"late": range(96, 100)}, "at its latest, 5 % of its ticks were noticed over 80 ms late"),
        ({"late": range(97, 100), "late_ms": 49}, None),
    ],
)
def test_one_bad_stretch_is_enough_however_good_the_rest_was(
    run: RunBuilder, stretch: dict[str, Any], reason: str | None
) -> None:
    watched_long(run, **stretch)
    said = invalid(run)
    assert len(said) == (reason is not None)
    assert reason is None or reason in said[0]


def test_ticks_before_the_load_do_not_count_and_gaps_between_ticks_do(run: RunBuilder) -> None:
    watched_long(run, busy=range(30, 60))
    run.client = [one for one in run.client if not at(35_000) < one.t_ns < at(55_000)]
    assert share_of_a_core(run) == pytest.approx(1.0)
    run.manifest.window.load_started_ns = at(20_000)
    watched_long(run, busy=range(20))
    assert share_of_a_core(run) == pytest.approx(0.1)
    watched_long(run, busy=range(90, 100))  # a stretch that ends with the last tick
    assert share_of_a_core(run) == pytest.approx(1.0)


def test_late_is_later_than_a_step_and_few_ticks_are_not_judged(run: RunBuilder) -> None:
    run.steps(1, 9, "s", length=100)
    watched(run, busy=0.2, late=10, late_ms=90)
    assert invalid(run) == []
    run.client.clear()
    run.lag(1, 900)
    assert load_sides(run.frames(), run_facts(run.frames())) == []


def test_a_process_that_died_is_named_with_its_rows(run: RunBuilder) -> None:
    watched(run, busy=0.1)
    left: dict[str, Any] = {"requests": 5, "open_streams": 3, "last_seen_ns": at(400)}
    run.manifest.load_processes = [
        LoadProcessRecord(
            worker=worker,
            host="here",
            pid=7 + worker,
            clock="boot",
            began_ns=at(-50),
            ended_ns=end,
            **left,
        )
        for worker, end in ((0, at(1100)), (1, None))
    ]
    (text,) = warnings(run, "died")
    assert "load process 1 (pid 8 on here) died 0.4 s into the load" in text
    assert "the 5 requests that it had written are kept" in text
    assert "the 3 that it had in flight are in no figure" in text
