"""Ghosts by the exact log, and as they are seen from outside; storms and races for the end."""

from collections.abc import Collection
from dataclasses import replace

import pandas as pd
import pytest

from harness.analysis.black_box import Ghosts, figures_from_outside
from harness.analysis.cancel_figures import latency_by, storm_figures
from harness.analysis.cancellations import cancellations
from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.run_facts import run_facts
from tests.harness.analysis.scenes import figures_of, four_steps, leave_in_decode, only_row, seen
from tests.harness.told import metric, ms, reason
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder
from tests.made_up.servers import alone_one_by_one, lonely


def goes_on(
    run: RunBuilder,
    *,
    last_step: int,
    end: float | None = None,
    generated: int = 1,
    **stamps: float,
) -> None:
    """Left at 33 after two tokens, noticed at the stamps if at all, and computed all the same."""
    run.manifest.settle_s = 0.05
    run.abandon("g", t0=33, tokens=[21, 31])
    run.events("g", "abort", 1, arrived=1, admitted=10.1, first_token=20, **stamps)
    if end is not None:
        run.events("g", "length", generated, removed=end, blocks_freed=end + 0.1)
        run.events("g", "length", generated, finished=end + 0.2)
    run.step(10, 20, sampled=("g",), g=5)
    run.steps(2, last_step, "g")


def test_a_lost_abort_waits_for_ever(run: RunBuilder) -> None:
    goes_on(run, last_step=5, end=60.1, generated=5, disconnected=34, abort_received=36)
    row = only_row(run)
    assert row["ghost"]  # although it was gone within the settle time: nobody stopped it
    (in_decode,) = latency_by("phase", cancellations(run.frames()))
    assert (in_decode["phase"], in_decode["ghosts"]) == ("decode", 1)
    assert (row["cancel_latency_s"], row["cancel_latency_steps"]) == (ms(50), 3)
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
    goes_on(run, last_step=9)
    run.manifest.window.settled_ns = at(100)
    row = only_row(run)
    assert row["ghost"]
    assert (row["generated_tokens"], row["wasted_tokens"]) == (9, 7)
    assert row["slot_seconds"] == ms(100 - 33)
    figures = figures_of(run)
    wasted = metric(figures["wasted_tokens"])
    assert (wasted.bound, wasted.mean) == ("lower", 7)
    assert metric(figures["wasted_in_flight_tokens"]).bound == "point"


def test_one_not_watched_for_the_settle_time_is_no_ghost_yet(run: RunBuilder) -> None:
    goes_on(run, last_step=4, disconnected=34)
    run.manifest.settle_s = 2.0
    run.manifest.status = "target_failed"  # so what was heard last ends the observation: 50 ms
    row = only_row(run)
    assert row["ghost"] is pd.NA
    assert (row["censored"], row["cancel_latency_s"]) == (True, ms(50 - 33))
    assert isinstance(figures_of(run)["ghost_rate"], NotMeasurable)


def test_a_natural_end_makes_a_ghost_however_short_the_watch(run: RunBuilder) -> None:
    run.abandon("a", t0=3900, tokens=[20])
    run.events("a", arrived=0, admitted=0, first_token=10, disconnected=3901)
    run.events("a", reason="length", removed=3950, blocks_freed=3950, finished=3950)
    assert only_row(run)["ghost"]


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


@pytest.mark.parametrize(
    ("seen", "is_ghost"),
    [
        (41, False),  # in its last step: a cancel would have been applied at its end
        (39, True),  # a whole step before the end
        (55, True),  # too late: judged by its leaving
    ],
)
def test_a_request_seen_leaving_in_its_last_step_is_no_ghost(
    run: RunBuilder, seen: float, is_ghost: bool
) -> None:
    goes_on(run, last_step=4, end=50.1, disconnected=seen)
    run.steps(5, 9, "other")
    (row,) = cancellations(run.frames()).to_dict("records")
    assert row["phase"] == ("decode" if is_ghost else "ended")
    assert row["ghost"] is (True if is_ghost else None)


def test_a_connection_that_ends_after_the_answer_is_no_cancel_and_no_ghost(run: RunBuilder) -> None:
    goes_on(run, last_step=5, end=30.1, generated=2, disconnected=34)
    row = only_row(run)
    assert (row["phase"], row["ghost"], row["censored"]) == ("ended", pd.NA, False)
    figures = figures_of(run)
    for name in ("cancel_latency_s", "detect_s", "signal_s", "wait_s", "free_s", "ghost_rate"):
        assert isinstance(figures[name], NotMeasurable), name


def test_a_ghost_that_ended_before_its_disconnect_was_never_noticed(run: RunBuilder) -> None:
    """Its connection stalled: noticed long after the answer was over, with nothing to cancel."""
    goes_on(run, last_step=9, end=60.1, generated=5, disconnected=90)
    assert only_row(run)["ghost"]
    figures = figures_of(run)
    detect = metric(figures["detect_s"])
    assert (detect.n, detect.n_censored) == (1, 1)
    assert isinstance(figures["signal_s"], NotMeasurable)


@pytest.mark.parametrize("ghosts", [{0}, {0, 1}])
def test_a_storm_with_a_ghost_is_censored(run: RunBuilder, ghosts: Collection[int]) -> None:
    """Two leave 2 ms apart; the blocks of the second are free 8 ms after the first left."""
    for number, start in enumerate((100, 300)):
        for i in range(2):
            name, gone = f"s{number}{i}", start + 6 + 2 * i
            run.abandon(name, t0=start + 2 * i, tokens=[start - 5], trial=number)
            run.events(name, arrived=start - 40, admitted=start - 30, first_token=start - 5)
            run.events(name, disconnected=start + 3, abort_received=start + 4)
            why = "length" if number and i in ghosts else "abort"
            run.events(name, reason=why, removed=gone, blocks_freed=gone, finished=gone)
    run.steps(300, 320, "x", length=1)  # whole steps: none of them was in its last one
    frames = run.frames()
    figures = storm_figures(cancellations(frames), run_facts(frames))
    clear = metric(figures["storm_clear_s"])
    assert (clear.n, clear.n_censored, clear.p50) == (2, 1, ms(8))
    assert metric(figures["storm_spread_s"]).p50 == ms(2)


def test_ghosts_of_rounds_are_added_up(run: RunBuilder) -> None:
    one = seen(lonely(run))
    rounds = [replace(one, ghosts=Ghosts(n=10, low=low)) for low in (2, 0)]
    rate = metric(figures_from_outside(rounds)["ghost_rate"]["gauge"])
    assert (rate.n, rate.mean, rate.bound, rate.upper95) == (20, 0.1, "lower", None)


def counting(run: RunBuilder, *, max_tokens: int) -> RunBuilder:
    """Eight requests that were left, one a second.

    Twenty tokens of 30 ms are over long before the settle time is; 100,000 are not.
    """
    alone_one_by_one(run, 8)
    run.metrics(running="exact", waiting="exact")
    run.manifest.window.load_ended_ns, run.manifest.window.settled_ns = at(9_000), at(12_000)
    for row in run.requests:
        row.max_tokens = max_tokens
    idle = {"running": 0.0, "waiting": 0.0}
    run.idle(idle, idle)
    return run


def ghosts_of(run: RunBuilder) -> dict[str, Figure]:
    return figures_from_outside([seen(run)])["ghost_rate"]


def test_a_gauge_shows_no_ghost_that_would_have_ended_by_itself(run: RunBuilder) -> None:
    run = counting(run, max_tokens=20)
    assert reason(ghosts_of(run)["gauge"]).startswith(
        "no ghost was there after the settle time, but only 0 of 8 requests left had twice that"
    )
    for row in run.requests:
        row.max_tokens = 100_000
    gauge = metric(ghosts_of(run)["gauge"])
    assert (gauge.mean, gauge.bound, gauge.upper95) == (0.0, "lower", None)
