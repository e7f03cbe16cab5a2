"""The train of probes and occupancy: rows made by hand, or by a server of known steps and delay."""

import random
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis.figure import NotMeasurable
from harness.analysis.occupancy import (
    NO_ROUNDS,
    RoundTotals,
    ghost_rate_of,
    occupancy_figures,
    rounds_of,
)
from harness.analysis.probe_train import TrainLatencies, cancel_latency, probe_figures, train_of
from harness.records import Role
from harness.stats import turnbull_median
from tests.harness.told import MakeRun, metric, reason
from tests.made_up.run import RunBuilder

STEP, DELAY, WAY = 20.0, 7.0, 0.3  # ms


def ride(
    run: RunBuilder, cycles: int, *, seed: int = 0, controls: bool = True, slow: float = 1.0
) -> list[float]:
    """A stream leaves in each cycle of ten steps; the server is ready DELAY later and gives the
    slot at the end of that step. Every fifth cycle has a step `slow` times as long after it. The
    cancel latencies, in ms."""
    rng, ends, known = random.Random(seed), [0.0], []
    for cycle in range(cycles):
        begins = ends[-1]
        t0 = begins + 2 * STEP + rng.random() * STEP
        lengths = [STEP] * 10
        if cycle % 5 == 0:
            lengths[4] *= slow
        ends += (begins + np.cumsum(lengths)).tolist()
        freed = min(end for end in ends if end >= t0 + DELAY)
        first, last = (
            min(end for end in ends if end > after + 1) for after in (freed, freed + STEP)
        )
        known.append(freed - t0)
        leaver = {"role": Role.FILLER, "plan": "tokens:1", "trial": cycle}
        run.request(
            f"l{cycle}", sent=begins, tokens=[begins + 1], outcome="abandoned", end=t0, **leaver
        )
        more = {"role": Role.PROBE, "arm": "abandon", "trial": cycle}
        tokens = [first + WAY, last + WAY]
        run.request(
            f"p{cycle}", sent=begins, tokens=tokens, outcome="completed", end=last + 1, **more
        )
        run.requests[-1].reference_ns = run.requests[-2].abandoned_ns
        if controls:
            follows = min(end for end in ends if end > last + 1) + WAY
            more = {"role": Role.FILLER, "arm": "control", "trial": cycle}
            run.request(
                f"f{cycle}", sent=begins, tokens=[follows], outcome="cut_off", end=1e6, **more
            )
            run.requests[-1].reference_ns = run.requests[-2].last_token_ns
    tokens = [end + WAY for end in ends[1:]]
    run.request("m", sent=0, tokens=tokens, outcome="cut_off", end=1e6, role=Role.METRONOME)
    return known


def train(run: RunBuilder, late_s: float = 0.0) -> TrainLatencies:
    found = train_of(run.frames().requests, late_s)
    assert isinstance(found, TrainLatencies), found
    return found


@pytest.mark.parametrize("slow", [1.0, 1.9])
def test_a_train_reads_each_cancel_off_the_steps_about_it(run: RunBuilder, slow: float) -> None:
    known = ride(run, 60, slow=slow)
    found = train(run)
    assert found.latency_s == pytest.approx(np.array(known) / 1e3, abs=(WAY + 0.1) / 1e3)
    assert found.dropped == (0, 60)
    figure = metric(cancel_latency([found], "probe"))
    assert (figure.n, figure.n_censored, figure.bound) == (60, 0, "point")
    if slow == 1.0:  # else it may be ready in the slow step
        assert figure.others["ready_p50"] == pytest.approx(DELAY / 1e3, abs=0.1 * STEP / 1e3)


def test_the_way_to_the_client_widens_the_interval_downwards(run: RunBuilder) -> None:
    ride(run, 60)
    plain, wide = (metric(cancel_latency([train(run, late)], "probe")) for late in (0.0, 0.002))
    for key in ("mean_ci95", "p50_ci95"):
        low, high = getattr(plain, key)
        assert getattr(wide, key) == pytest.approx((low - 0.002, high))


def test_a_mean_is_covered_as_often_as_its_interval_says(make_run: MakeRun) -> None:
    covers = 0
    for seed in range(60):
        run = make_run()
        ride(run, 40, seed=seed)
        low, high = metric(cancel_latency([train(run)], "probe")).mean_ci95 or (0.0, 0.0)
        covers += low <= (DELAY + STEP / 2 + WAY) / 1e3 <= high
    assert covers >= 53  # of 60; by chance one in 200 runs of this test has fewer


def test_without_a_control_there_is_no_cancel_latency(run: RunBuilder) -> None:
    ride(run, 5, controls=False)
    found = train_of(run.frames().requests, 0.0)
    assert isinstance(found, NotMeasurable)
    assert "the hand-over cannot be taken out" in found.reason
    assert metric(probe_figures(run.frames().requests)["slot_recovery_s"]).n == 5


def test_hand_overs_of_now_one_now_three_steps_have_a_typical_one_that_occurs(
    run: RunBuilder,
) -> None:
    """No control took the two steps that are the median."""
    known = ride(run, 60)
    for row in run.requests:
        if row.arm == "control" and (row.trial or 0) % 2:
            later = [t_ns + round(2 * STEP * 1e6) for t_ns in row.token_times_ns]
            row.token_times_ns, row.first_token_ns, row.last_token_ns = later, later[0], later[0]
    found = train(run)
    assert found.latency_s == pytest.approx(np.array(known) / 1e3, abs=(WAY + 0.1) / 1e3)


def test_a_stream_that_is_never_let_go_is_censored(run: RunBuilder) -> None:
    ride(run, 9)
    more = {"role": Role.PROBE, "arm": "abandon", "trial": 9}
    run.request("never", sent=1900, tokens=[], outcome="abandoned", end=4000, **more)
    run.requests[-1].reference_ns = run.requests[0].sent_ns + 2_000_000_000
    figure = metric(cancel_latency([train(run)], "probe"))
    assert (figure.n, figure.n_censored, figure.mean) == (10, 1, None)
    assert figure.lower_bounds["p99"] == pytest.approx(2.0)


def test_another_streams_own_end_is_not_the_cancel(run: RunBuilder) -> None:
    """A filler of cycle 3 ends in the step in which the probe's slot seems to come free; one of
    cycle 5 ends with the probe's first token."""
    known = ride(run, 9)
    rows = {row.request_id: row for row in run.requests}
    for cycle, steps in ((3, 1), (5, 0)):
        ms = ((rows[f"p{cycle}"].first_token_ns or 0) - rows["l0"].sent_ns) / 1e6 - steps * STEP
        run.request(f"o{cycle}", sent=0, tokens=[ms], outcome="completed", end=ms, role=Role.FILLER)
    found = train(run)
    assert [i for i in range(9) if found.censored[i]] == [3]
    assert found.latency_s == pytest.approx(np.array(known) / 1e3, abs=(WAY + 0.1) / 1e3)
    assert metric(probe_figures(run.frames().requests)["slot_recovery_s"]).n_censored == 2


def test_a_leaver_in_the_queue_has_no_cancel_latency(run: RunBuilder) -> None:
    ride(run, 5)
    for row in run.requests:
        row.plan = "queued" if row.plan else row.plan
    found = train_of(run.frames().requests, 0.0)
    assert isinstance(found, NotMeasurable)
    assert "see `slot_recovery_s`" in found.reason


@pytest.mark.parametrize("beside", [-1, 1])
def test_readings_in_a_burst_are_dropped_and_counted(run: RunBuilder, beside: int) -> None:
    """The client stood still: the token of the probe's step was read with the one before, or it was
    read as late as the one after."""
    ride(run, 30)
    probe = next(row for row in run.requests if row.request_id == "p7")
    metronome = run.requests[-1]
    near = np.abs(np.array(metronome.token_times_ns) - (probe.first_token_ns or 0)).argmin()
    metronome.token_times_ns[near + beside] = metronome.token_times_ns[near] + beside * 100_000
    found = train(run)
    assert (found.dropped, found.dropped_controls) == ((1, 30), (0, 30))
    assert len(found.latency_s) == 29
    assert not found.drops_differ()
    assert TrainLatencies.drops_differ(replace(found, dropped=(15, 30), dropped_controls=(1, 30)))


@pytest.mark.parametrize(
    ("intervals", "median"),
    [
        ([(0, 1), (0, 1), (1, 2)], 0.75),  # two thirds lie evenly up to 1
        ([(0, 3), (1, 2), (1, 4)], 1.5),  # all have (1, 2] in common
        ([(1, np.inf), (2, np.inf), (0, 1)], None),
        ([(0, 1), (0, 1), (5, np.inf)], 0.75),
        ([(2, 2), (1, 1), (1, 1)], 1),  # known times, one of them the longest
        ([(2, 2), (3, np.inf), (3, np.inf)], None),
    ],
)
def test_turnbulls_median(intervals: list[tuple[float, float]], median: float | None) -> None:
    low, high = (np.array(ends, dtype=float) for ends in zip(*intervals, strict=True))
    assert turnbull_median(low, high) == (
        None if median is None else pytest.approx(median, abs=0.02)
    )


def check(
    run: RunBuilder,
    number: int,
    waited: float | None,
    *,
    trial: int = 0,
    without: str = "abandoned",
) -> None:
    """Sent at 1 s; the deadline is 2 s later."""
    tokens = [] if waited is None else [1000 + waited]
    outcome = without if waited is None else "cut_off"
    more = {"role": Role.FILLER, "arm": "occupancy", "trial": trial}
    run.request(f"c{number}", sent=1000, tokens=tokens, outcome=outcome, end=9000, **more)
    run.requests[-1].reference_ns = run.requests[-1].sent_ns + (1 + trial) * 2_000_000_000


def test_requests_that_wait_count_ghosts_and_lost_slots(run: RunBuilder) -> None:
    for i in range(4):
        more = {"role": Role.FILLER, "arm": "occupancy"}
        run.request(f"l{i}", sent=0, tokens=[20], outcome="abandoned", end=990, **more)
    for i, waited in enumerate((30.0, 1900.0, 2100.0, None)):
        check(run, i, waited)
    requests = run.frames().requests
    found = rounds_of(requests)
    assert found == RoundTotals(rounds=1, left=4, ghosts=1, lost=1)
    rate = metric(ghost_rate_of([found, found], "probe"))
    assert (rate.n, rate.mean) == (8, 0.25)
    assert rate.mean_ci95 == pytest.approx((0.0319, 0.6509), abs=1e-4)  # R: binom.test(2, 8)
    assert metric(occupancy_figures(requests, found)["leaked_slots"]).mean == 1
    more = {"role": Role.FILLER, "arm": "occupancy"}
    run.request("later", sent=900, tokens=[1100], outcome="abandoned", end=1500, **more)
    check(run, 4, 2100.0, trial=1)
    check(run, 5, None, trial=1, without="cut_off")
    assert rounds_of(run.frames().requests) == found  # the second round did not end


def hold(run: RunBuilder, name: str, trial: int, tokens: list[float]) -> None:
    prompt = 1000 if tokens else None  # the server's own count
    more = {"role": Role.LONG_PROMPT, "arm": "capacity", "trial": trial, "prompt_tokens": prompt}
    run.request(name, sent=0, tokens=tokens, outcome="abandoned", end=500, **more)


def test_the_fall_of_what_can_be_held_is_the_leaked_share(run: RunBuilder) -> None:
    """Before, two prompts and four tokens; after, one loses its blocks when it has three."""
    hold(run, "a", 0, [10, 20, 30])
    hold(run, "b", 0, [15, 25])
    hold(run, "c", 1, [10, 20, 30])
    hold(run, "d", 1, [40])
    hold(run, "e", 0, [])
    found = occupancy_figures(run.frames().requests, NotMeasurable(""))["leaked_kv_share"]
    assert "the slots ran out first" in reason(found)  # none of the later prompts had to wait
    hold(run, "f", 1, [])
    requests = run.frames().requests
    share = metric(occupancy_figures(requests, NotMeasurable(""))["leaked_kv_share"])
    assert share.mean == pytest.approx(1 - 1003 / 2004)
    assert "leaked_slots" not in occupancy_figures(requests, NotMeasurable(""))
    assert rounds_of(requests) == NotMeasurable(NO_ROUNDS)
