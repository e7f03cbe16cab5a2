"""Open loops: latency from the intended start, late requests, and requests never sent."""

from typing import Any

import pytest

from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.latency import latency_figures
from harness.analysis.run_facts import run_facts
from harness.store.manifest import LoadProcessRecord, MissedArrivals, ScheduledArrivals
from tests.harness.told import MakeRun, metric, remarks, summary_of, warnings
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder

MS = 1_000_000


def scheduled(run: RunBuilder, *, planned: int, max_streams: int = 100) -> RunBuilder:
    run.manifest.arrivals = ScheduledArrivals(planned=planned, max_streams=max_streams)
    return run


def late(run: RunBuilder, name: str, *, by: float, **request: Any) -> None:
    """A request that was sent `by` milliseconds after it should have been."""
    run.request(name, **request)
    run.requests[-1].intended_start_ns -= round(by * MS)


def latencies(run: RunBuilder) -> Figures:
    frames = run.frames()
    return latency_figures(frames.requests, run_facts(frames))


def test_a_closed_loop_has_no_intended_start_of_its_own(make_run: MakeRun) -> None:
    run = make_run()
    late(run, "a", by=40, sent=100, tokens=[120], outcome="completed", end=131)
    assert "ttft_from_intended_s" not in latencies(run)
    assert not warnings(run, "schedule")
    run = scheduled(make_run(), planned=3)
    assert isinstance(latencies(run)["ttft_from_intended_s"], NotMeasurable)


def with_missed(run: RunBuilder, *, to_stay: list[float], to_leave: list[float]) -> RunBuilder:
    assert run.manifest.arrivals is not None
    run.manifest.arrivals.missed = MissedArrivals(to_stay_s=to_stay, to_leave_s=to_leave)
    return run


def test_what_was_due_and_never_sent_had_waited_until_the_end(run: RunBuilder) -> None:
    """One of four was served at once: no median of what they all felt is known, but a bound is."""
    run = with_missed(scheduled(run, planned=4), to_stay=[3.0, 5.0], to_leave=[4.0])
    late(run, "a", by=0, sent=100, tokens=[120, 130], outcome="completed", end=131)
    figures = latencies(run)
    for name, n in (("ttft_from_intended_s", 3), ("e2e_from_intended_s", 3), ("start_delay_s", 4)):
        figure = metric(figures[name])
        assert (figure.n, figure.n_censored, figure.p50) == (n, n - 1, None), name
        assert figure.lower_bounds["p50"] == 5.0, name
    assert metric(figures["ttft_from_intended_s"]).others["all_users"].n == 4
    assert (metric(figures["ttft_s"]).n, metric(figures["ttft_s"]).n_censored) == (1, 0)
    assert summary_of(run.frames())["arrivals"] == {"planned": 4, "sent": 1}


@pytest.mark.parametrize(("unsent", "is_invalid"), [(1, False), (2, True)])
def test_a_run_that_left_much_unsent_is_invalid(
    run: RunBuilder, unsent: int, is_invalid: bool
) -> None:
    """20 were due; that two more were not due yet says nothing."""
    run = with_missed(scheduled(run, planned=22), to_stay=[1.0] * unsent, to_leave=[])
    for number in range(20 - unsent):
        late(run, f"r{number}", by=0, sent=100, tokens=[120], outcome="completed", end=131)
    assert bool(remarks(run, "due", "invalid")) is is_invalid


@pytest.mark.parametrize(
    ("max_streams", "cause"), [(2, "`arrivals.max_streams`, 2"), (3, "the load generator could")]
)
def test_a_late_schedule_names_its_bottleneck(
    run: RunBuilder, max_streams: int, cause: str
) -> None:
    run = scheduled(run, planned=3, max_streams=max_streams)
    late(run, "a", by=0, sent=100, tokens=[120], outcome="completed", end=150)
    late(run, "b", by=0, sent=110, tokens=[130], outcome="completed", end=150)
    late(run, "c", by=30, sent=150, tokens=[170], outcome="completed", end=180)
    (text,) = warnings(run, "sent late")
    assert text.startswith("requests were sent late: start_delay_s has a p99 of 30 ms; ")
    assert cause in text


def unsent(run: RunBuilder) -> RunBuilder:
    """One of two was sent; the other was due nine seconds before the end."""
    run = with_missed(scheduled(run, planned=2, max_streams=1), to_stay=[9.0], to_leave=[])
    late(run, "a", by=0, sent=100, tokens=[120], outcome="completed", end=131)
    return run


def test_of_a_schedule_that_was_left_unsent_one_thing_is_said_of_what_to_believe(
    run: RunBuilder,
) -> None:
    texts = warnings(unsent(run), "from the intended start")
    assert len(texts) == 2
    assert texts[0].startswith("1 of 2 requests of the schedule were not sent")
    assert not [text for text in texts if "better than the truth" in text]
    assert any("start_delay_s has a p99 of more than 9 s" in text for text in texts)


def test_what_a_dead_process_did_not_send_is_not_laid_to_slowness(run: RunBuilder) -> None:
    times: dict[str, Any] = {"began_ns": at(0), "ended_ns": None, "last_seen_ns": at(100)}
    died = LoadProcessRecord(
        worker=1, host="here", pid=8, clock="boot", requests=0, open_streams=0, **times
    )
    unsent(run).manifest.load_processes = [died]
    for what in ("this load is not the schedule's; ", "sent late: "):
        (text,) = remarks(run, what)
        assert "load process 1 (pid 8 on here) died, and its part of the schedule" in text
        assert "could not keep up" not in text


def test_what_was_not_collected_is_not_laid_to_slowness(run: RunBuilder) -> None:
    unsent(run).manifest.absent_workers = ["there_2"]
    assert remarks(run, "in a folder that was not collected (there_2)")
    assert not remarks(run, "could not keep up")


def test_small_delays_are_no_warning(make_run: MakeRun) -> None:
    run = scheduled(make_run(), planned=2)
    late(run, "a", by=9, sent=100, tokens=[120], outcome="completed", end=131)  # a timer's
    assert not warnings(run, "sent late")
    run = scheduled(make_run(), planned=2)
    late(run, "a", by=90, sent=0, tokens=[1000], outcome="completed", end=1001)  # against a second
    assert not warnings(run, "sent late")
