"""Ghosts by the exact log, and as they are seen from outside."""

from collections.abc import Callable
from dataclasses import replace

import pandas as pd
import pytest

from harness.analysis.black_box import figures_from_outside
from harness.analysis.cancel import latency_by
from harness.analysis.cancellation import cancellations
from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.ghosts import Ghosts
from harness.analysis.stats import rate_upper95
from harness.records import Metric
from tests.harness.analysis.few_steps import figures_of, four_steps, leave_in_decode, only_row
from tests.harness.analysis.from_outside import lonely_run, seen
from tests.harness.told import metric, ms, reason, summary_of
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder
from tests.made_up.servers import alone_one_by_one

MakeRun = Callable[[], RunBuilder]


def test_an_ignored_disconnect_is_a_censored_latency(run: RunBuilder) -> None:
    run.manifest.settle_s = 0.05
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events(
        "g", reason="length", removed=130.1, blocks_freed=130.2, finished=130.3, generated=12
    )
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 12, "g")
    row = only_row(run)
    assert (row["ghost"], row["censored"]) == (True, True)
    assert row["cancel_latency_s"] == ms(50)
    assert row["cancel_latency_steps"] == 5  # those that ended at 40 to 80
    assert (row["wasted_tokens"], row["wasted_after_close_tokens"]) == (10, 10)
    assert row["slot_seconds"] == ms(130.1 - 33)
    figures = figures_of(run)
    latency = metric(figures["cancel_latency_s"])
    assert (latency.n, latency.n_censored, latency.p50) == (1, 1, None)
    assert latency.lower_bounds["p50"] == ms(50)
    detect = metric(figures["detect_s"])
    assert (detect.n, detect.n_censored, detect.p50) == (1, 1, None)
    assert figures["signal_s"] == NotMeasurable("no request got as far as this stage")
    assert metric(figures["ghost_rate"]).mean == 1.0


def test_a_lost_abort_waits_for_ever(run: RunBuilder) -> None:
    run.manifest.settle_s = 0.05
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", arrived=1, admitted=10.1, first_token=20, disconnected=34, abort_received=36)
    run.events("g", reason="length", removed=60.1, blocks_freed=60.2, finished=60.3, generated=5)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 5, "g")
    row = only_row(run)
    assert row["ghost"]  # although it was gone within the settle time: nobody stopped it
    (in_decode,) = latency_by("phase", cancellations(run.frames()))
    assert (in_decode["phase"], in_decode["ghosts"]) == ("decode", 1)
    assert row["cancel_latency_s"] == ms(50)
    assert not row["removed_at_first_boundary"]
    figures = figures_of(run)
    assert metric(figures["signal_s"]).p50 == ms(2)
    wait = metric(figures["wait_s"])
    assert (wait.n_censored, wait.lower_bounds["p50"]) == (1, ms(50 - 3))
    assert isinstance(figures["free_s"], NotMeasurable)


def test_an_abort_after_the_settle_time_is_a_ghost_with_known_stages(run: RunBuilder) -> None:
    run.manifest.settle_s = 0.005
    leave_in_decode(run)
    four_steps(run, "a")
    row = only_row(run)
    assert (row["ghost"], row["cancel_latency_s"]) == (True, ms(5))
    assert metric(figures_of(run)["wait_s"]).p50 == ms(4.6)


def test_one_that_never_finished_counts_until_the_observation_ended(run: RunBuilder) -> None:
    run.manifest.settle_s = 0.05
    run.manifest.window.settled_ns = run.manifest.window.load_started_ns + 100_000_000  # type: ignore[operator]
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 9, "g")
    row = only_row(run)
    assert row["ghost"]
    assert (row["generated_tokens"], row["wasted_tokens"]) == (9, 7)
    assert row["slot_seconds"] == ms(100 - 33)
    figures = figures_of(run)
    assert (metric(figures["wasted_tokens"]).bound, metric(figures["wasted_tokens"]).mean) == (
        "lower",
        7,
    )
    assert metric(figures["wasted_in_flight_tokens"]).bound == "point"


def test_one_not_watched_for_the_settle_time_is_no_ghost_yet(run: RunBuilder) -> None:
    run.manifest.status = "target_failed"  # so what was heard last ends the observation: 50 ms
    run.abandon("g", t0=33, tokens=[21])
    run.events("g", arrived=1, admitted=10.1, first_token=20, disconnected=34, generated=1)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 4, "g")
    row = only_row(run)
    assert row["ghost"] is pd.NA
    assert (row["censored"], row["cancel_latency_s"]) == (True, ms(50 - 33))
    assert isinstance(figures_of(run)["ghost_rate"], NotMeasurable)


def test_a_natural_end_makes_a_ghost_however_short_the_watch(
    run: RunBuilder,
) -> None:
    run.abandon("a", t0=3900, tokens=[20])
    run.events("a", arrived=0, admitted=0, first_token=10, disconnected=3901)
    run.events("a", reason="length", removed=3950, blocks_freed=3950, finished=3950)
    assert only_row(run)["ghost"]


def test_one_that_had_ended_before_its_user_left(run: RunBuilder) -> None:
    run.abandon("a", t0=33, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events("a", reason="stop", removed=30.1, blocks_freed=30.2, finished=30.3, generated=2)
    run.step(10, 20, sampled=("a",), a=5)
    run.steps(2, 3, "a")
    row = only_row(run)
    assert (row["phase"], row["ghost"], row["censored"]) == ("ended", pd.NA, False)
    assert pd.isna(row["cancel_latency_s"])
    assert row["wasted_tokens"] == 1


def test_an_abort_on_its_way_when_the_last_step_began_is_no_ghost(run: RunBuilder) -> None:
    """Seen leaving at 39.5, and aborts take up to 1.5 ms to the worker here: the step from 40 to 50
    began without it. One that ran on for another step was lost."""
    leave_in_decode(run, "heard")
    run.events("heard", abort_sent=34)
    for name, end in (("raced", 50.1), ("lost", 60.1)):
        run.abandon(name, t0=39, tokens=[21, 31])
        run.events(name, arrived=1, admitted=10.1, first_token=20, generated=1)
        run.events(name, disconnected=39.5, abort_sent=39.5, generated=3)
        run.events(name, "length", removed=end, blocks_freed=end, finished=end, generated=4)
    four_steps(run, "heard", "raced", "lost")
    run.steps(6, 7, "other")
    cancels = cancellations(run.frames()).set_index("request_id")
    assert cancels["phase"].to_dict() == {"heard": "decode", "raced": "ended", "lost": "decode"}
    assert not cancels.loc["heard", "ghost"]
    assert cancels.loc["raced", "ghost"] is pd.NA
    assert cancels.loc["lost", "ghost"]


def test_a_connection_that_ends_after_the_answer_is_no_cancel_and_no_ghost(
    run: RunBuilder,
) -> None:
    run.abandon("a", t0=33, tokens=[21])
    run.events("a", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events("a", reason="length", removed=30.1, blocks_freed=30.2, finished=30.3, generated=2)
    run.events("a", disconnected=34, generated=2)
    four_steps(run, "a")
    row = only_row(run)
    assert (row["phase"], row["ghost"], row["censored"]) == ("ended", pd.NA, False)
    figures = figures_of(run)
    for name in ("cancel_latency_s", "detect_s", "signal_s", "wait_s", "free_s", "ghost_rate"):
        assert isinstance(figures[name], NotMeasurable), name


def test_a_ghost_that_ended_before_its_disconnect_was_never_noticed(
    run: RunBuilder,
) -> None:
    """Its connection stalled: noticed long after the answer was over, with nothing to cancel."""
    run.manifest.settle_s = 0.05
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", arrived=1, admitted=10.1, first_token=20, generated=1)
    run.events("g", reason="length", removed=60.1, blocks_freed=60.2, finished=60.3, generated=5)
    run.events("g", disconnected=90, generated=5)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, 9, "g")
    assert only_row(run)["ghost"]
    figures = figures_of(run)
    detect = metric(figures["detect_s"])
    assert (detect.n, detect.n_censored) == (1, 1)
    assert isinstance(figures["signal_s"], NotMeasurable)


def test_a_share_that_ought_to_be_all_is_bounded_from_below(run: RunBuilder) -> None:
    names = [f"a{i}" for i in range(10)]
    for name in names:
        leave_in_decode(run, name)
    four_steps(run, *names)
    at_once = metric(figures_of(run)["removed_at_first_boundary"])
    assert (at_once.mean, at_once.upper95) == (1.0, None)
    assert at_once.lower95 == pytest.approx(0.05 ** (1 / 10))  # all ten of ten, had it been this
    ghosts = metric(figures_of(run)["ghost_rate"])
    assert (ghosts.mean, ghosts.lower95) == (0.0, None)
    assert ghosts.upper95 == pytest.approx(1 - 0.05 ** (1 / 10))


def ghost_rate(make_run: MakeRun, *found: Ghosts) -> Metric:
    one = seen(lonely_run(make_run))
    runs = [replace(one, ghosts={"counter": ghosts}) for ghosts in found]
    return metric(figures_from_outside(runs)["ghost_rate"]["counter"])


def test_ghosts_of_rounds_are_added_up(make_run: MakeRun) -> None:
    """Three rounds of none in ten are none in thirty."""
    found = ghost_rate(make_run, *[Ghosts(n=10, low=0, high=0)] * 3)
    assert (found.n, found.mean, found.bound) == (30, 0.0, "point")
    assert found.upper95 == pytest.approx(rate_upper95(0, 30))


def test_a_lower_bound_of_ghosts_has_no_upper_limit(make_run: MakeRun) -> None:
    found = ghost_rate(make_run, Ghosts(n=10, low=2, high=None), Ghosts(n=10, low=0, high=0))
    assert (found.mean, found.bound, found.upper95) == (0.1, "lower", None)


def test_ghosts_that_may_be_none_are_only_limited(make_run: MakeRun) -> None:
    found = ghost_rate(make_run, Ghosts(n=10, low=0, high=3))
    assert (found.mean, found.bound) == (None, "upper")
    assert found.upper95 == pytest.approx(rate_upper95(3, 10))


def counting(run: RunBuilder, *, left: int, aborted: float, max_tokens: int) -> RunBuilder:
    """Requests that were left, one a second, and a counter of aborts that moved so far."""
    alone_one_by_one(run, left)
    run.metrics(running="exact", waiting="exact", aborted="exact")
    run.manifest.window.load_ended_ns, run.manifest.window.settled_ns = at(9_000), at(12_000)
    for i, row in enumerate(run.requests):
        row.max_tokens = max_tokens
        assert row.request_id == str(i)
    run.idle(
        {"running": 0, "waiting": 0, "aborted": 0},
        {"running": 0, "waiting": 0, "aborted": aborted},
    )
    return run


def ghosts_of(run: RunBuilder) -> dict[str, Figure]:
    return figures_from_outside([seen(run)])["ghost_rate"]


def test_a_request_that_ended_without_an_abort_is_a_ghost_by_the_counter(
    run: RunBuilder,
) -> None:
    """Twenty tokens of 30 ms are over long before the settle time is: the gauge sees nothing."""
    run = counting(run, left=8, aborted=0.0, max_tokens=20)
    found = ghosts_of(run)
    assert reason(found["gauge"]).startswith(
        "no ghost was there after the settle time, but only 0 of 8 requests left had twice that"
    )
    assert (metric(found["counter"]).mean, metric(found["counter"]).bound) == (1.0, "point")
    assert summary_of(run.frames())["metrics"]["ghost_rate"]["mean"] == 1.0


def test_a_counter_that_stands_still_makes_no_ghosts(run: RunBuilder) -> None:
    """All would still be there, and nobody is."""
    found = ghosts_of(counting(run, left=8, aborted=0.0, max_tokens=100_000))
    assert "which no other reading explains" in reason(found["counter"])
    gauge = metric(found["gauge"])
    assert (gauge.mean, gauge.bound, gauge.upper95) == (0.0, "lower", None)


@pytest.mark.parametrize("aborted", [16.0, 9.0])
def test_a_counter_that_counts_too_much_tells_of_no_ghosts(run: RunBuilder, aborted: float) -> None:
    found = ghosts_of(counting(run, left=8, aborted=aborted, max_tokens=100_000))
    assert isinstance(found["counter"], NotMeasurable)


def test_a_counter_that_still_moves_tells_of_no_ghosts(run: RunBuilder) -> None:
    run = counting(run, left=8, aborted=7.0, max_tokens=20)
    assert metric(ghosts_of(run)["counter"]).mean == 1 / 8
    run.manifest.idle.later = {"running": 0, "waiting": 0, "aborted": 8.0}
    assert reason(ghosts_of(run)["counter"]) == "its_aborted still moved after the settle time"


def test_all_aborted_is_known_to_be_none(run: RunBuilder) -> None:
    found = ghosts_of(counting(run, left=8, aborted=8.0, max_tokens=100_000))
    assert list(found) == ["counter", "gauge"]
    assert metric(found["counter"]).upper95 == pytest.approx(rate_upper95(0, 8))


def test_who_left_before_an_answer_or_at_its_end_may_be_no_ghost(run: RunBuilder) -> None:
    run = counting(run, left=8, aborted=6.0, max_tokens=20)
    run.requests[0].first_token_ns = None
    run.requests[1].max_tokens = 6
    found = ghosts_of(run)
    assert list(found) == ["counter", "gauge"] or isinstance(found["gauge"], NotMeasurable)
    assert (metric(found["counter"]).mean, metric(found["counter"]).bound) == (None, "upper")
