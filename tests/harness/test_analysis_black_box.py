"""Cancellation seen from outside: made-up servers whose every delay is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from harness.analysis.attributed import Alone, alone_by_gauge, alone_by_rest, described
from harness.analysis.balance import delay_of_aborts, held_for_nobody, unread_tokens
from harness.analysis.black_box import (
    Methods,
    figures_from_outside,
    latency_methods,
    leak_slopes,
    seen_from_outside,
)
from harness.analysis.boundaries import mean_wait_s
from harness.analysis.facts import run_facts
from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.held_open import held_open
from harness.analysis.scraped import met_step_s, typical_step_s
from harness.analysis.summary import summarise
from harness.analysis.totals import Balance, as_figure
from harness.manifest import IdleReading, Probing
from harness.records import Metric, Outcome
from tests.harness.conftest import at
from tests.harness.made_up import lonely

if TYPE_CHECKING:
    from harness.analysis.frames import RunFrames
    from tests.harness.conftest import RunBuilder

    MakeRun = Callable[[], RunBuilder]

LOAD_MS = 60_000.0


def metric(figure: Figure) -> Metric:
    assert isinstance(figure, Metric), figure
    return figure


def alone(found: Alone | NotMeasurable) -> Metric:
    assert isinstance(found, Alone), found
    return described([found], "gauge")


def by_method(frames: RunFrames) -> Methods:
    return latency_methods([seen_from_outside(frames, run_facts(frames))])


def outside(*runs: RunFrames) -> dict[str, Methods]:
    return figures_from_outside([seen_from_outside(frames, run_facts(frames)) for frames in runs])


def busy_server(
    run: RunBuilder, *, delay: float, every: float, lag: float = 0.0, coming_late: float = 0.0
) -> None:
    """Ten users for a minute, each leaving every other request; the server lets go of it `delay` ms
    after; it is scraped every `every` ms and its page is `lag` ms old, and shows who comes
    `coming_late` ms later still."""
    rng = np.random.default_rng(11)
    run.another_engine()
    run.metrics(running="exact", waiting="exact", aborted="exact")
    window = run.manifest.window
    window.load_started_ns, window.load_ended_ns = at(0), at(LOAD_MS)
    window.settled_ns = at(LOAD_MS + 5000)
    spans, aborts = [], []
    for user in range(10):
        t = float(rng.uniform(0, 200))
        for n in range(1000):
            length = float(rng.uniform(50, 400))
            if t + length > LOAD_MS:
                break
            leaves = bool(rng.random() < 0.5)
            outcome = "abandoned" if leaves else "completed"
            extra: dict[str, Any] = {"planned_abandon": 1} if leaves else {}
            run.request(
                f"{user}-{n}", sent=t, tokens=[t + 20], outcome=outcome, end=t + length, **extra
            )
            until = t + length + (delay if leaves else 0.0)
            spans.append((min(t + coming_late, until), until))
            if leaves:
                aborts.append(until)
            t += length + float(rng.uniform(0, 30))
    starts, ends = (np.sort(np.array(side)) for side in zip(*spans, strict=True))
    gone = np.sort(np.array(aborts))
    for scraped in np.arange(7.0, LOAD_MS + 4900, every):
        seen = scraped - lag
        there = np.searchsorted(starts, seen, "right") - np.searchsorted(ends, seen, "right")
        run.scrape(scraped, "its_running", float(min(there, 4)))
        run.scrape(scraped, "its_waiting", float(max(there - 4, 0)))
        run.scrape(scraped, "its_aborted", float(np.searchsorted(gone, seen, "right")))
    idle = {"running": 0.0, "waiting": 0.0}
    run.idle({**idle, "aborted": 0.0}, {**idle, "aborted": float(len(aborts))})


@pytest.mark.parametrize("delay", [0.0, 30.0, 200.0])
@pytest.mark.parametrize("every", [20.0, 110.0])
def test_the_delay_of_a_busy_server_is_recovered(
    make_run: MakeRun, delay: float, every: float
) -> None:
    run = make_run()
    busy_server(run, delay=delay, every=every)
    frames = run.frames()
    facts = run_facts(frames)
    for balance, method in ((held_for_nobody, "gauge"), (delay_of_aborts, "counter")):
        found = metric(as_figure(balance(frames, facts), method))
        estimate = found.others["estimate"]
        assert estimate == pytest.approx(delay / 1e3, abs=0.005 + 0.1 * delay / 1e3)
        if delay:
            assert found.mean_ci95 is not None
            assert found.mean_ci95[0] <= delay / 1e3 <= found.mean_ci95[1]
        else:
            assert (found.mean, found.bound) == (None, "upper")
            assert found.upper95 == pytest.approx(0.0, abs=0.005)


def test_the_interval_is_right_as_often_as_it_says(make_run: MakeRun) -> None:
    """The same run, its scrapes in 40 other phases: 95 % of the intervals should hold the truth."""
    run = make_run()
    busy_server(run, delay=60.0, every=1.0)
    frames = run.frames()
    hits = 0
    for phase in range(40):
        times = np.sort(frames.server_metrics["t_ns"].unique())[phase * 7 :: 300]
        thin = frames.server_metrics[frames.server_metrics["t_ns"].isin(times)]
        facts = run_facts(frames)
        some = type(frames)(**{**vars_of(frames), "server_metrics": thin})
        limits = metric(as_figure(held_for_nobody(some, facts), "gauge")).mean_ci95
        assert limits is not None
        hits += limits[0] <= 0.060 <= limits[1]
    assert hits >= 34


def vars_of(frames: Any) -> dict[str, Any]:
    return {name: getattr(frames, name) for name in type(frames).__dataclass_fields__}


def test_an_old_page_biases_the_gauge_no_more_than_it_says(make_run: MakeRun) -> None:
    run = make_run()
    busy_server(run, delay=50.0, every=40.0, lag=25.0)
    assert run.manifest.target is not None
    for source in run.manifest.target.spec["metrics"].values():
        source["lag_s"] = 0.025
    frames = run.frames()
    facts = run_facts(frames)
    for balance, method in ((held_for_nobody, "gauge"), (delay_of_aborts, "counter")):
        found = metric(as_figure(balance(frames, facts), method))
        assert found.mean_ci95 is not None
        low, high = found.others["bias_low"], found.others["bias_high"]
        assert found.mean_ci95[0] - high <= 0.050 <= found.mean_ci95[1] - low


def test_a_counter_that_does_not_add_up_tells_no_delay(make_run: MakeRun) -> None:
    run = make_run()
    busy_server(run, delay=50.0, every=40.0)
    run.manifest.idle.after["aborted"] += 1
    frames = run.frames()
    found = delay_of_aborts(frames, run_facts(frames))
    assert isinstance(found, NotMeasurable)
    assert "which of them it means is not known" in found.reason


def test_scrapes_that_met_nothing_do_not_show_that_there_was_nothing(make_run: MakeRun) -> None:
    run = make_run()
    busy_server(run, delay=1.0, every=20_000.0)
    frames = run.frames()
    facts = run_facts(frames)
    found = metric(as_figure(held_for_nobody(frames, facts), "gauge"))
    assert found.mean is None
    assert found.upper95 is not None
    assert found.upper95 > 0.01  # ten times what it was


def stepping_server(run: RunBuilder, *, step: float, stays: float) -> float:
    """Eight users for two minutes; what comes and leaves is taken in when a step begins, and the
    page is written when it ends. Returns the true mean latency in seconds.

    Its page goes by steps, as it does where a step loop sends a report."""
    rng = np.random.default_rng(7)
    run.another_engine()
    run.metrics(running="exact", waiting="exact", aborted="exact")
    assert run.manifest.target is not None
    for role, late in (("running", (1.0, 0.0, 1.0)), ("aborted", (1.0, 0.0, 1.0))):
        names = ("coming", "ended", "left")
        more = {"lag_steps": 2.0, "late_steps": dict(zip(names, late, strict=True))}
        run.manifest.target.spec["metrics"][role] |= more
    window = run.manifest.window
    window.load_started_ns, window.load_ended_ns = at(0), at(2 * LOAD_MS)
    window.settled_ns = at(2 * LOAD_MS + 5000)
    shown_from, shown_until, aborts, latencies = [], [], [], []
    for user in range(8):
        t = float(rng.uniform(0, 200))
        for n in range(4000):
            taken = np.ceil(t / step) * step
            first = float(taken + step)
            stays_on = bool(rng.random() < stays)
            tokens = [first + step * i for i in range(int(rng.integers(4, 10)))]
            last = tokens[-1]
            until = last if stays_on else last + float(rng.uniform(0, step))
            if until > 2 * LOAD_MS:
                break
            outcome = "completed" if stays_on else "abandoned"
            extra: dict[str, Any] = {} if stays_on else {"planned_abandon": 1}
            run.request(f"{user}-{n}", sent=t, tokens=tokens, outcome=outcome, end=until, **extra)
            removed = until if stays_on else float(np.ceil(until / step) * step)
            shown_from.append(taken + step)
            shown_until.append(removed if stays_on else removed + step)
            if not stays_on:
                aborts.append(removed + step)
                latencies.append(removed - until)
            t = until + float(rng.uniform(0, 0.3 * step))
    begun, over, gone = (np.sort(np.array(one)) for one in (shown_from, shown_until, aborts))
    for scraped in np.arange(7.0, 2 * LOAD_MS + 4900, 31.7):
        there = np.searchsorted(begun, scraped, "right") - np.searchsorted(over, scraped, "right")
        run.scrape(scraped, "its_running", float(there))
        run.scrape(scraped, "its_waiting", 0.0)
        run.scrape(scraped, "its_aborted", float(np.searchsorted(gone, scraped, "right")))
    idle = {"running": 0.0, "waiting": 0.0}
    run.idle({**idle, "aborted": 0.0}, {**idle, "aborted": float(len(aborts))})
    return float(np.mean(latencies)) / 1e3


@pytest.mark.parametrize("step", [8.0, 20.0, 55.0])
@pytest.mark.parametrize("stays", [0.1, 0.6])
def test_the_mean_age_of_a_page_is_put_right(make_run: MakeRun, step: float, stays: float) -> None:
    """Half a step is what a cancel takes, and as long do those who come wait."""
    run = make_run()
    known = stepping_server(run, step=step, stays=stays)
    frames = run.frames()
    facts = run_facts(frames)
    for balance in (held_for_nobody, delay_of_aborts):
        found = balance(frames, facts)
        assert not isinstance(found, NotMeasurable)
        assert found.mean == pytest.approx(known, abs=0.25 * step / 1e3)
        assert found.bias[0] + found.mean - found.grain <= known + step / 1e3


def test_nobody_waits_for_a_step_as_long_as_a_prefill_of_many_takes(make_run: MakeRun) -> None:
    run = make_run()
    run.request("reads", sent=0, tokens=[10, 20, 30], outcome="completed", end=31)
    run.request("sees", sent=13, tokens=[200], outcome="completed", end=201)
    run.request("sees no step", sent=50, tokens=[200], outcome="completed", end=201)
    requests = run.frames().requests
    waited_s = mean_wait_s(requests, held_open(requests), step_s=0.010)
    assert waited_s == pytest.approx((0.007 + 0.010) / 3)


def test_the_page_of_an_empty_server_is_right_at_once(make_run: MakeRun) -> None:
    """Nobody is left to compute a step for, so nothing is to be put right."""
    found = []
    for late in (None, {"coming": 1.0, "ended": 0.0, "left": 1.0}):
        run = make_run()
        lonely(run)
        run.metrics(running="exact", waiting="exact", aborted="exact")
        assert run.manifest.target is not None
        if late is not None:
            run.manifest.target.spec["metrics"]["aborted"]["late_steps"] = late
        for t, aborts in ((90, 0), (110, 0), (130, 0), (150, 1), (170, 1)):
            run.scrape(t, "its_aborted", aborts)
        run.idle({"running": 0, "aborted": 0}, {"running": 0, "aborted": 1})
        frames = run.frames()
        balance = delay_of_aborts(frames, run_facts(frames))
        assert not isinstance(balance, NotMeasurable)
        found.append(balance.mean)
    assert found[0] == found[1] == pytest.approx(0.040)


def test_a_scrape_meets_long_steps_more_often_than_short_ones(make_run: MakeRun) -> None:
    run = make_run()
    run.request("a", sent=0, tokens=[10, 20, 30, 130], outcome="completed", end=130)
    frames = run.frames()
    assert typical_step_s(frames) == pytest.approx(0.010)
    assert met_step_s(frames) == pytest.approx((2 * 0.01**2 + 0.1**2) / 0.12)


def test_the_age_of_a_page_in_steps_is_not_known_where_no_step_was_seen(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.requests.clear()
    run.abandon("a", t0=100, tokens=[])
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["running"]["lag_steps"] = 2.0
    frames = run.frames()
    methods = by_method(frames)
    for name in ("gauge", "gauge_attributed"):
        found = methods[name]
        assert isinstance(found, NotMeasurable)
        assert "its_running can be 2 steps old, and how long a step takes was not seen" in (
            found.reason
        )


def test_why_no_method_could_tell_is_said_of_each(make_run: MakeRun) -> None:
    run = make_run()
    run.another_engine()
    run.metrics(running="exact", generated_tokens="exact")
    run.abandon("a", t0=100, tokens=[50, 80])
    reason = summarise(run.frames())["not_measurable"]["cancel_latency_s"]
    assert "gave no lifecycle log" in reason
    assert "running requests were not scraped during the load" in reason
    assert "its_generated_tokens was not scraped during the load" in reason
    assert reason.count("running requests were not scraped") == 1


def test_a_latency_below_zero_is_never_shown(make_run: MakeRun) -> None:
    """The page is 40 ms old, and nobody said so."""
    run = make_run()
    busy_server(run, delay=10.0, every=20.0, coming_late=60.0)
    frames = run.frames()
    facts = run_facts(frames)
    found = as_figure(held_for_nobody(frames, facts), "gauge")
    assert isinstance(found, NotMeasurable)
    assert found.reason.startswith("not enough data: by gauge")
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["running"]["lag_s"] = 0.060
    frames = run.frames()
    known = metric(as_figure(held_for_nobody(frames, run_facts(frames)), "gauge"))
    assert (known.mean, known.bound) == (None, "upper")
    assert known.upper95 is not None
    assert 0.010 < known.upper95 < 0.150
    said = [one["text"] for one in summarise(frames)["validity"]]
    assert any("not enough data for a mean by gauge (more would not do" in text for text in said)


def test_totals_too_far_below_zero_give_no_limit_however_wide_their_interval(
    make_run: MakeRun,
) -> None:
    def figure(grain: float) -> Figure:
        """The mean is -2 s, and its interval reaches far beyond 0."""
        edges, sums, counts = np.arange(2), np.array([-30.0, 10.0]), np.array([5, 5])
        span_s = grain * 10 / 3.689  # no request was met: Garwood's limit of Poisson's mean
        balance = Balance(edges_ns=edges, sums=sums, counts=counts, bias=(-0.1, 0.1), span_s=span_s)
        return as_figure(balance, "gauge")

    assert isinstance(figure(grain=1.0), NotMeasurable)
    assert metric(figure(grain=2.0)).upper95 is not None


def test_how_many_would_be_enough_is_said(make_run: MakeRun) -> None:
    run = make_run()
    busy_server(run, delay=4.0, every=900.0)
    frames = run.frames()
    found = metric(as_figure(held_for_nobody(frames, run_facts(frames)), "gauge"))
    if found.others["estimate"] > 0:
        assert found.needs["mean"] > found.n
    assert found.mean is None


@pytest.mark.parametrize("lag", [0.0, 0.015])
def test_one_that_stands_alone_is_known_between_two_limits(make_run: MakeRun, lag: float) -> None:
    run = make_run()
    lonely(run)
    assert run.manifest.target is not None
    for source in run.manifest.target.spec["metrics"].values():
        source["lag_s"] = lag
    frames = run.frames()
    for method in (alone_by_gauge, alone_by_rest):
        found = alone(method(frames, run_facts(frames)))
        assert (found.bound, found.n) == ("upper", 1)
        assert found.p50 == pytest.approx(0.050)
        assert found.others["at_least"].p50 == pytest.approx(0.030 - lag)


def test_a_counter_that_moves_when_a_request_ends_does_not_tell_by_its_rest(
    make_run: MakeRun,
) -> None:
    run = make_run()
    lonely(run)
    run.metrics(running="exact", waiting="exact", generated_tokens="exact_when_idle")
    frames = run.frames()
    assert isinstance(alone_by_rest(frames, run_facts(frames)), NotMeasurable)
    trust: dict[str, Any] = {"generated_tokens": "exact_when_idle", "decode_calls": "exact"}
    run.metrics(running="exact", waiting="exact", **trust)
    for t, calls in ((90, 3), (110, 4), (130, 5), (150, 5), (170, 5)):
        run.scrape(t, "its_decode_calls", calls)
    frames = run.frames()
    assert alone(alone_by_rest(frames, run_facts(frames))).p50 == pytest.approx(0.030)


def test_nobody_else_may_begin_or_end_before_the_scrape_that_shows_it(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.request("b", sent=120, tokens=[160], outcome="completed", end=400)
    frames = run.frames()
    found = alone(alone_by_gauge(frames, run_facts(frames)))
    # Of what came until 120 ms only one scrape is left, which still showed it.
    assert found.n_censored == 1
    assert found.lower_bounds["p50"] == pytest.approx(0.010)


def test_one_that_never_goes_is_censored(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    for sample in run.server_metrics:
        if sample.name == "its_running":
            sample.value = 1.0
    frames = run.frames()
    assert alone(alone_by_gauge(frames, run_facts(frames))).n_censored == 1


def test_unread_tokens_are_counted_by_blocks(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    frames = run.frames()
    found = unread_tokens(frames, run_facts(frames))
    assert not isinstance(found, NotMeasurable)
    assert found.mean == 4.0


def test_ghosts_are_those_who_are_still_there(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.manifest.idle.after |= {"running": 1.0}
    run.manifest.idle.later = {"running": 1.0, "waiting": 0.0, "generated_tokens": 31.0}
    frames = run.frames()
    found = metric(outside(frames)["ghost_rate"]["gauge"])
    assert (found.mean, found.bound) == (1.0, "lower")
    assert (found.others["still_generating"], found.of) == (25.0, "ghosts or lost slots")
    assert "lost_slots" not in found.others
    texts = [one["text"] for one in summarise(frames)["validity"]]
    assert any("ghosts: 25 tokens more were counted" in text for text in texts)


def test_a_lost_slot_is_no_ghost(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.manifest.idle.after |= {"running": 1.0}
    run.manifest.idle.later = {"running": 1.0, "waiting": 0.0, "generated_tokens": 6.0}
    summary = summarise(run.frames())
    texts = [one["text"] for one in summary["validity"]]
    assert any("no token was counted any more: lost slots" in text for text in texts)
    ghosts = summary["metrics"]["ghost_rate"]
    assert (ghosts["mean"], ghosts["others"]["lost_slots"], ghosts["of"]) == (0.0, 1.0, None)
    assert summary["metrics"]["leaked_slots"]["mean"] == 1.0


def test_a_counter_that_rests_until_a_release_proves_no_loss(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.metrics(running="exact", waiting="exact", generated_tokens="exact_when_idle")
    run.manifest.idle.after |= {"running": 1.0}
    run.manifest.idle.later = {"running": 1.0, "waiting": 0.0, "generated_tokens": 6.0}
    summary = summarise(run.frames())
    assert summary["breakdown"]["leaks_lost"] == []
    assert any("still generate is not known" in one["text"] for one in summary["validity"])
    assert summary["metrics"]["ghost_rate"]["of"] == "ghosts or lost slots"
    assert summary["metrics"]["wasted_tokens"]["mean_ci95"] is None


def test_calls_to_decode_tell_whether_anything_is_computed(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.metrics(running="exact", generated_tokens="exact_when_idle", decode_calls="exact")
    run.manifest.idle.after |= {"running": 1.0, "decode_calls": 10.0}
    for later, lost in ((10.0, ["slots", "blocks"]), (30.0, [])):
        run.manifest.idle.later = {"running": 1.0, "generated_tokens": 6.0, "decode_calls": later}
        summary = summarise(run.frames())
        assert summary["breakdown"]["leaks_lost"] == lost
        texts = [one["text"] for one in summary["validity"]]
        assert any("ghosts: the server still computed" in t for t in texts) is (not lost)


def loops(run: RunBuilder, free: list[float]) -> None:
    run.another_engine()
    run.metrics(free_blocks="exact")
    run.idle({"free_blocks": 100.0}, {"free_blocks": free[-1]})
    for number, value in enumerate(free, start=1):
        for i in range(3):
            run.abandon(f"{number}-{i}", t0=100 * number + i, tokens=[50])
        reading = IdleReading(t_ns=at(100 * number + 50), values={"free_blocks": value})
        run.manifest.idle.loops.append(reading)


def test_a_leak_is_a_slope_and_one_odd_reading_does_not_move_it(make_run: MakeRun) -> None:
    run = make_run()
    loops(run, [94.0, 88.0, 60.0, 76.0, 70.0, 64.0])
    found = metric(leak_slopes(f := run.frames(), run_facts(f))["leaked_blocks_per_abandon"])
    assert found.mean == pytest.approx(2.0)


def test_what_only_varies_does_not_leak(make_run: MakeRun) -> None:
    run = make_run()
    loops(run, [99.0, 100.0, 99.0, 100.0, 100.0])
    limits = metric(leak_slopes(f := run.frames(), run_facts(f))["leaked_blocks_per_abandon"])
    assert limits.mean_ci95 is not None
    assert limits.mean_ci95[0] <= 0.0 <= limits.mean_ci95[1]


def test_too_few_loops_are_said_to_be(make_run: MakeRun) -> None:
    run = make_run()
    loops(run, [94.0, 88.0])
    found = leak_slopes(f := run.frames(), run_facts(f))["leaked_blocks_per_abandon"]
    assert isinstance(found, NotMeasurable)
    assert found.reason.startswith("not enough data for a slope: 2 idle readings, and 4 are needed")


@pytest.mark.parametrize(
    ("healthy", "errors", "wedged"),
    [
        (True, ["ReadTimeout"], True),
        (False, ["ReadTimeout"], False),
        (None, ["ReadTimeout"], None),
        (True, [], False),
    ],
)
def test_wedged_is_healthy_without_answers(
    make_run: MakeRun, healthy: bool | None, errors: list[str], wedged: bool | None
) -> None:
    run = make_run()
    lonely(run)
    run.manifest.probing = Probing(sent=1, healthy=healthy, errors=errors, is_silent=bool(errors))
    summary = summarise(run.frames())
    assert summary["wedged"] is wedged
    warned = [one["text"] for one in summary["validity"] if one["level"] == "warning"]
    assert any("were not answered" in text for text in warned) is bool(errors)


def test_a_wrong_answer_is_an_answer(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    run.manifest.probing = Probing(sent=2, healthy=True, errors=["status 429"])
    summary = summarise(run.frames())
    assert summary["wedged"] is False
    texts = [one["text"] for one in summary["validity"]]
    assert (
        "after the settle time the server answers short requests with: status 429; "
        "it calls itself healthy"
    ) in texts


def test_who_was_cut_off_makes_no_figure_of_cancellation(make_run: MakeRun) -> None:
    run = make_run()
    lonely(run)
    for row in run.requests:
        row.outcome, row.abandoned_ns = Outcome.CUT_OFF, None
    summary = summarise(run.frames())
    for name in ("cancel_latency_s", "ghost_rate", "wasted_tokens"):
        assert "no request was abandoned" in summary["not_measurable"][name]
    assert summary["audit"]["client"]["cut_off"] == 1
