"""Open loops: latency from the intended start, requests that came late, and those never sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from harness.analysis.facts import run_facts
from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.latency import latency_figures
from harness.analysis.load_side import most_open
from harness.records import Metric
from harness.store.manifest import LoadProcess, MissedArrivals, ScheduledArrivals
from tests.harness.told import ms, summary_of, warnings
from tests.made_up.rows import at

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]

MS = 1_000_000


def scheduled(run: RunBuilder, *, planned: int, max_streams: int = 100) -> RunBuilder:
    run.manifest.arrivals = ScheduledArrivals(planned=planned, max_streams=max_streams)
    return run


def late(run: RunBuilder, name: str, *, by: float, **request: Any) -> None:
    """A request that was sent so many milliseconds after it should have been."""
    run.request(name, **request)
    run.requests[-1].intended_start_ns -= round(by * MS)


def latencies(run: RunBuilder) -> Figures:
    frames = run.frames()
    return latency_figures(frames.requests, run_facts(frames))


def test_what_was_sent_late_is_as_slow_as_its_user_felt_it(make_run: MakeRun) -> None:
    run = scheduled(make_run(), planned=2)
    late(run, "a", by=40, sent=100, tokens=[120, 130], outcome="completed", end=131)
    late(run, "b", by=0, sent=100, tokens=[120, 130], outcome="completed", end=131)
    figures = latencies(run)
    for name, (low, high) in {
        "ttft_s": (20, 20),
        "ttft_from_intended_s": (20, 60),
        "e2e_s": (30, 30),
        "e2e_from_intended_s": (30, 70),
        "start_delay_s": (0, 40),
    }.items():
        figure = figures[name]
        assert isinstance(figure, Metric)
        assert (figure.mean, figure.max) == (ms((low + high) / 2), ms(high)), name


def test_who_had_no_token_had_waited_since_the_intended_start(make_run: MakeRun) -> None:
    run = scheduled(make_run(), planned=1)
    late(run, "cut", by=40, sent=100, tokens=[], outcome="cut_off", end=150)
    figure = latencies(run)["ttft_from_intended_s"]
    assert isinstance(figure, Metric)
    assert (figure.n_censored, figure.lower_bounds["p50"]) == (1, ms(90))


def test_a_closed_loop_has_no_intended_start_of_its_own(make_run: MakeRun) -> None:
    run = make_run()
    late(run, "a", by=40, sent=100, tokens=[120], outcome="completed", end=131)
    assert "ttft_from_intended_s" not in latencies(run)
    assert not [text for text in warnings(run) if "schedule" in text]
    run = scheduled(make_run(), planned=3)
    assert isinstance(latencies(run)["ttft_from_intended_s"], NotMeasurable)


def test_what_was_not_sent_is_counted(make_run: MakeRun) -> None:
    run = scheduled(make_run(), planned=3)
    late(run, "a", by=0, sent=100, tokens=[120], outcome="completed", end=131)
    (text,) = [text for text in warnings(run) if "schedule" in text]
    assert text.startswith("2 of 3 requests of the schedule were not sent")


def with_missed(run: RunBuilder, *, to_stay: list[float], to_leave: list[float]) -> RunBuilder:
    assert run.manifest.arrivals is not None
    run.manifest.arrivals.missed = MissedArrivals(to_stay_s=to_stay, to_leave_s=to_leave)
    return run


def test_what_was_due_and_never_sent_had_waited_until_the_end(make_run: MakeRun) -> None:
    """One of four was served at once: no median of what they all felt is known, but a bound is."""
    run = with_missed(scheduled(make_run(), planned=4), to_stay=[3.0, 5.0], to_leave=[4.0])
    late(run, "a", by=0, sent=100, tokens=[120, 130], outcome="completed", end=131)
    figures = latencies(run)
    for name, n in {
        "ttft_from_intended_s": 3,
        "e2e_from_intended_s": 3,
        "start_delay_s": 4,
    }.items():
        figure = figures[name]
        assert isinstance(figure, Metric)
        assert (figure.n, figure.n_censored, figure.p50) == (n, n - 1, None), name
        assert figure.lower_bounds["p50"] == 5.0, name
    intended, sending = figures["ttft_from_intended_s"], figures["ttft_s"]
    assert isinstance(intended, Metric)
    assert isinstance(sending, Metric)
    assert intended.others["all_users"].n == 4
    assert (sending.n, sending.n_censored) == (1, 0)
    assert summary_of(run.frames())["arrivals"] == {"planned": 4, "sent": 1}


@pytest.mark.parametrize(("unsent", "is_invalid"), [(1, False), (2, True)])
def test_a_run_that_left_much_unsent_is_invalid(
    make_run: MakeRun, unsent: int, is_invalid: bool
) -> None:
    """Of 20 that were due; that two more were not due yet says nothing."""
    run = with_missed(scheduled(make_run(), planned=22), to_stay=[1.0] * unsent, to_leave=[])
    for number in range(20 - unsent):
        late(run, f"r{number}", by=0, sent=100, tokens=[120], outcome="completed", end=131)
    said = summary_of(run.frames())["validity"]
    texts = [one["text"] for one in said if one["level"] == "invalid" and "due" in one["text"]]
    assert bool(texts) is is_invalid


def test_of_a_schedule_that_was_left_unsent_one_thing_is_said_of_what_to_believe(
    make_run: MakeRun,
) -> None:
    run = with_missed(scheduled(make_run(), planned=2, max_streams=1), to_stay=[9.0], to_leave=[])
    late(run, "a", by=0, sent=100, tokens=[120], outcome="completed", end=131)
    texts = [text for text in warnings(run) if "from the intended start" in text]
    assert len(texts) == 2
    assert not [text for text in texts if "better than the truth" in text]
    assert any("start_delay_s has a p99 of more than 9 s" in text for text in texts)


@pytest.mark.parametrize(
    ("max_streams", "cause"), [(2, "`arrivals.max_streams`, 2"), (3, "the load generator could")]
)
def test_a_late_schedule_names_its_bottleneck(
    make_run: MakeRun, max_streams: int, cause: str
) -> None:
    run = scheduled(make_run(), planned=3, max_streams=max_streams)
    late(run, "a", by=0, sent=100, tokens=[120], outcome="completed", end=150)
    late(run, "b", by=0, sent=110, tokens=[130], outcome="completed", end=150)
    late(run, "c", by=30, sent=150, tokens=[170], outcome="completed", end=180)
    (text,) = [text for text in warnings(run) if "sent late" in text]
    assert text.startswith("requests were sent late: start_delay_s has a p99 of 30 ms; ")
    assert cause in text


def test_what_a_dead_process_did_not_send_is_not_laid_to_slowness(make_run: MakeRun) -> None:
    run = with_missed(scheduled(make_run(), planned=2), to_stay=[9.0], to_leave=[])
    late(run, "a", by=0, sent=100, tokens=[120], outcome="completed", end=131)
    run.manifest.load_processes = [
        LoadProcess(
            worker=1,
            host="here",
            pid=8,
            clock="boot",
            began_ns=at(0),
            ended_ns=None,
            last_seen_ns=at(100),
            requests=0,
            open_streams=0,
        )
    ]
    said = [one["text"] for one in summary_of(run.frames())["validity"]]
    for what in ("this load is not the schedule's; ", "sent late: "):
        (text,) = [text for text in said if what in text]
        assert "load process 1 (pid 8 on here) died, and its part of the schedule" in text
        assert "could not keep up" not in text


def test_what_was_not_collected_is_not_laid_to_slowness(make_run: MakeRun) -> None:
    run = with_missed(scheduled(make_run(), planned=2), to_stay=[9.0], to_leave=[])
    late(run, "a", by=0, sent=100, tokens=[120], outcome="completed", end=131)
    run.manifest.absent_workers = ["there_2"]
    said = [one["text"] for one in summary_of(run.frames())["validity"]]
    assert any("in a folder that was not collected (there_2)" in text for text in said)
    assert not [text for text in said if "could not keep up" in text]


def test_small_delays_are_no_warning(make_run: MakeRun) -> None:
    run = scheduled(make_run(), planned=2)
    late(run, "a", by=9, sent=100, tokens=[120], outcome="completed", end=131)  # a timer's
    assert not [text for text in warnings(run) if "sent late" in text]
    run = scheduled(make_run(), planned=2)
    late(run, "a", by=90, sent=0, tokens=[1000], outcome="completed", end=1001)  # against a second
    assert not [text for text in warnings(run) if "sent late" in text]


def test_how_many_were_open_at_once(make_run: MakeRun) -> None:
    run = make_run()
    assert most_open(run.frames().requests) == 0
    for name, sent, end in (("a", 0, 10), ("b", 10, 20), ("c", 15, 30), ("d", 16, 17)):
        run.request(name, sent=sent, tokens=[], outcome="cut_off", end=end)
    assert most_open(run.frames().requests) == 3
