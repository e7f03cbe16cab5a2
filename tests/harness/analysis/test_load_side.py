"""Who was too busy to be believed, and who died: from ticks and marks, by the stated rule."""

from typing import Any

import pytest

from harness.analysis.facts import run_facts
from harness.analysis.load_side import load_sides
from harness.records import ClientSample
from harness.store.manifest import LoadProcess
from tests.harness.told import MakeRun, summary_of
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder

TICKS = 100  # one each 10 ms of the load window
LONG_S = 100


def watched(
    run: RunBuilder, *, pid: int = 8, busy: float, late_ms: float = 0.1, late: int = 0
) -> None:
    """A process that used this share of a core, and noticed so many ticks so late."""
    for tick in range(TICKS):
        _tick(run, 10 * tick, pid, busy * tick / 100, late_ms if tick < late else 0.1)


def watched_long(
    run: RunBuilder, *, busy: range = range(0), late: range = range(0), late_ms: float = 80
) -> None:
    """A load of 100 s, with ten ticks a second: in some of the seconds the process was busy all the
    time, in some each tick came late."""
    run.manifest.window.load_ended_ns = at(LONG_S * 1e3)
    cpu_s = 0.0
    for tick in range(LONG_S * 10):
        cpu_s += (1.0 if tick // 10 in busy else 0.1) / 10
        _tick(run, 100 * (tick + 1), 8, cpu_s, late_ms if tick // 10 in late else 0.1)


def _tick(run: RunBuilder, t_ms: float, pid: int, cpu_s: float, lag_ms: float) -> None:
    lag_ns = round(lag_ms * 1e6)
    one = ClientSample(t_ns=at(t_ms), pid=pid, host="here", lag_ns=lag_ns, cpu_s=cpu_s, streams=3)
    run.client.append(one)


def said(run: RunBuilder, level: str) -> list[str]:
    run.request("s", sent=0, tokens=[100, 110, 120], outcome="completed", end=121)
    summary = summary_of(run.frames())
    return [one["text"] for one in summary["validity"] if one["level"] == level]


@pytest.mark.parametrize(
    ("ticks", "reason"),
    [
        ({"busy": 0.89}, None),
        ({"busy": 0.95}, "it used 95% of a core"),
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
    invalid = said(run, "invalid")
    assert len(invalid) == (reason is not None)
    if reason is not None:
        assert reason in invalid[0]
        assert "pid 8" in invalid[0]
        assert ("more processes (--processes)" in invalid[0]) == (ticks["busy"] > 0.9)


@pytest.mark.parametrize(
    ("stretch", "reason"),
    [
        ({"busy": range(50)}, "at its busiest it used 100% of a core"),
        ({"busy": range(40, 51)}, "at its busiest it used 100% of a core"),
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
    invalid = said(run, "invalid")
    assert len(invalid) == (reason is not None)
    assert reason is None or reason in invalid[0]


def test_ticks_before_the_load_do_not_count_and_gaps_between_ticks_do(make_run: MakeRun) -> None:
    run = make_run()
    watched_long(run, busy=range(20))
    run.manifest.window.load_started_ns = at(20_000)
    run.request("s", sent=20_000, tokens=[20_100], outcome="completed", end=20_200)
    (side,) = load_sides(run.frames(), run_facts(run.frames()))
    assert side.cpu_share == pytest.approx(0.1)
    run.client.clear()
    watched_long(run, busy=range(90, 100))  # a stretch that ends with the last tick
    (side,) = load_sides(run.frames(), run_facts(run.frames()))
    assert side.cpu_share == pytest.approx(1.0)
    run = make_run()
    watched_long(run, busy=range(30, 60))
    run.client = [tick for tick in run.client if not at(35_000) < tick.t_ns < at(55_000)]
    (side,) = load_sides(run.frames(), run_facts(run.frames()))
    assert side.cpu_share == pytest.approx(1.0)


def test_late_is_later_than_a_step_and_few_ticks_are_not_judged(make_run: MakeRun) -> None:
    run = make_run()
    run.steps(1, 9, "s", length=100)
    watched(run, busy=0.2, late=10, late_ms=90)
    assert said(run, "invalid") == []
    run = make_run()
    run.lag(1, 900)
    assert load_sides(run.frames(), run_facts(run.frames())) == []


def test_a_process_that_died_is_named_with_its_rows(run: RunBuilder) -> None:
    run.manifest.load_processes = [
        LoadProcess(
            worker=worker,
            host="here",
            pid=7 + worker,
            clock="boot",
            began_ns=at(-50),
            ended_ns=ended_ns,
            last_seen_ns=at(400),
            requests=5,
            open_streams=3,
        )
        for worker, ended_ns in ((0, at(1100)), (1, None))
    ]
    (text,) = [text for text in said(run, "warning") if "died" in text]
    assert "load process 1 (pid 8 on here) died 0.4 s into the load" in text
    assert "the 5 requests that it had written are kept" in text
    assert "the 3 that it had in flight are in no figure" in text
