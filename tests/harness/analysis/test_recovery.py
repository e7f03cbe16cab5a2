"""Slot refill from inside, slot recovery by probe: small runs, paired by hand."""

import pytest

from harness.analysis.cancellations import cancellations
from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.probe_train import probe_figures
from harness.analysis.recovery import (
    Refill,
    StepSchedule,
    pair_refills,
    refill_figures,
    refills_after_abandons,
)
from harness.analysis.run_facts import run_facts
from harness.records import Role
from tests.harness.told import metric, ms, reason
from tests.made_up.run import RunBuilder


def refills_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    cancels, facts = cancellations(frames), run_facts(frames)
    return refill_figures(refills_after_abandons(frames, cancels, facts), cancels, facts)


def leave(run: RunBuilder, name: str, *, freed: float, t0: float = 33) -> None:
    run.abandon(name, t0=t0, tokens=[21])
    run.events(name, arrived=1, admitted=10.1, first_token=20, disconnected=t0 + 1)
    run.events(name, abort_received=t0 + 2, removed=freed - 0.1, blocks_freed=freed)
    run.events(name, finished=freed + 0.1)


@pytest.mark.parametrize(
    ("admitted", "steps", "refill_ms", "share"),
    [
        (40.5, [(1, "a"), (0, "w")], 0.3, 1.0),
        (50.5, [(1, "a"), (1, "b"), (0, "w")], 10.3, 0.0),  # one schedule late
        (40.5, [(0, "ab"), (0, "wb")], 0.3, 1.0),  # it came while all slots were taken
        (40.5, [(0, "a"), (0, "w")], None, None),  # one of two slots was free all the time
        (60.5, [(0, "a"), (0, "b"), (0, "b"), (0, "w")], None, None),  # it came later
    ],
)
def test_a_wanted_slot_is_refilled_by_the_next_request(
    run: RunBuilder,
    admitted: float,
    steps: list[tuple[int, str]],
    refill_ms: float | None,
    share: float | None,
) -> None:
    """`steps`: how many wait after each schedule from 30 on, and the requests that run."""
    leave(run, "a", freed=40.2)
    run.events("w", arrived=2, admitted=admitted)
    for number, (waiting, names) in enumerate(steps, start=3):
        run.step(
            10 * number, 10 * number + 10, waiting=waiting, sampled=(), **dict.fromkeys(names, 1)
        )
    figures = refills_of(run)
    if refill_ms is None:
        why = "no request waited for a slot when an abandoned one was freed"
        assert set(figures.values()) == {NotMeasurable(why)}
        return
    refill = metric(figures["slot_refill_s"])
    assert (refill.n, refill.n_censored, refill.p50) == (1, 0, ms(refill_ms))
    assert metric(figures["refilled_next_schedule"]).mean == share


def test_nothing_was_freed_although_everybody_waited(run: RunBuilder) -> None:
    run.abandon("ghost", t0=33, tokens=[21])
    run.events("ghost", arrived=1, admitted=10.1, first_token=20, disconnected=34)
    run.steps(1, 9, "ghost")
    for step in run.step_log:
        step.num_waiting = 5
    why = "no abandoned request gave a slot back while the server was watched"
    assert set(refills_of(run).values()) == {NotMeasurable(why)}


def test_one_who_was_only_queued_gave_no_slot_back(run: RunBuilder) -> None:
    run.abandon("q", t0=33, tokens=[])
    run.events("q", arrived=1, disconnected=34, abort_received=35, removed=40.1)
    run.events("q", blocks_freed=40.2, finished=40.3)
    run.events("w", arrived=2, admitted=40.5)
    run.step(30, 40, waiting=2, b=1)
    run.step(40, 50, b=1, w=5)
    assert "gave a slot back" in reason(refills_of(run)["slot_refill_s"])


def test_never_refilled_is_censored_not_missing(run: RunBuilder) -> None:
    leave(run, "a", freed=40.2)
    run.step(30, 40, waiting=1, a=1)
    run.steps(4, 6, "b")
    run.step_log[1].num_waiting = run.step_log[2].num_waiting = run.step_log[3].num_waiting = 1
    refill = metric(refills_of(run)["slot_refill_s"])
    assert (refill.n, refill.n_censored, refill.p50) == (1, 1, None)
    assert refill.lower_bounds["p50"] == ms(4000 - 40.2)


def test_a_preempting_schedule_wants_no_slot_for_its_victim(run: RunBuilder) -> None:
    leave(run, "a", freed=40.2)
    run.events("victim", admitted=10.3, preempted=40.3, resumed=50.2)
    run.step(10, 20, a=1, victim=1, b=1)
    run.step(30, 40, a=1, victim=1, b=1)
    run.step(40, 50, waiting=1, b=1)  # the victim waits after this schedule, not before it
    run.step(50, 60, victim=2, b=1)
    assert isinstance(refills_of(run)["slot_refill_s"], NotMeasurable)


def test_pairing_is_first_come_first_served() -> None:
    schedules = [
        StepSchedule(step=0, freed=[0, 1, 2], taken_ns=[5], num_wanting=2),  # the third: unwanted
        StepSchedule(step=1, freed=[3], taken_ns=[15, 16], num_wanting=2),
        StepSchedule(step=2, freed=[], taken_ns=[25], num_wanting=1),  # into a slot long idle
        StepSchedule(step=3, freed=[4], taken_ns=[], num_wanting=1),
        StepSchedule(step=4, freed=[5], taken_ns=[], num_wanting=0),  # the one that waited has left
    ]
    assert pair_refills(schedules, [0, 10, 20, 30, 40], 99) == [
        Refill(freed=0, freed_before=0, until_ns=5, taken_in=0),
        Refill(freed=1, freed_before=0, until_ns=15, taken_in=1),
        Refill(freed=3, freed_before=1, until_ns=16, taken_in=1),
        Refill(freed=4, freed_before=3, until_ns=40),
    ]


def test_the_first_to_come_takes_the_slot_that_was_idle_before() -> None:
    two_come = StepSchedule(step=0, freed=[0], taken_ns=[5, 7], num_wanting=2, num_free=2)
    assert pair_refills([two_come], [0], 99) == [
        Refill(freed=0, freed_before=0, until_ns=7, taken_in=0)
    ]


def probe(run: RunBuilder, arm: str, number: int, *, sent: float, first: float | None) -> None:
    tokens = [] if first is None else [first, first + 10]
    outcome, end = ("completed", first + 11) if first is not None else ("timed_out", 9000)
    more = {"arm": arm, "role": Role.PROBE, "trial": number}
    name = f"probe-{arm}-{number}"
    run.request(name, sent=sent, tokens=tokens, outcome=outcome, end=end, **more)


def at_reference(run: RunBuilder, t: float) -> None:
    run.requests[-1].reference_ns = run.requests[0].sent_ns + round((t - 100) * 1e6)


def test_cycles_without_a_leaver_and_probes_never_served(run: RunBuilder) -> None:
    none = NotMeasurable("the workload has no probes")
    assert probe_figures(run.frames().requests) == {"slot_recovery_s": none}
    probe(run, "unloaded", 0, sent=100, first=125)
    probe(run, "abandon", 0, sent=200, first=300)
    at_reference(run, 310)  # served before anybody left: a slot was free
    probe(run, "abandon", 1, sent=200, first=300)  # nobody left
    probe(run, "abandon", 2, sent=200, first=None)
    at_reference(run, 310)
    probe(run, "abandon", 3, sent=200, first=330)
    at_reference(run, 310)
    recovery = metric(probe_figures(run.frames().requests)["slot_recovery_s"])
    assert (recovery.n, recovery.n_censored, recovery.p50) == (2, 1, ms(20))
    assert recovery.lower_bounds["p99"] == ms(9000 - 310)
