"""What a schedule had and nobody sent: who they were, and how long they had waited."""

import pytest

from harness.run.shards import Sent, find_unsent
from harness.store.manifest import IdleReading, Manifest
from harness.workload.abandon import PrefillPlan
from harness.workload.arrivals import ConstantArrivals
from harness.workload.load import AbandonLoad
from harness.workload.plan import LoadPlan
from tests.harness.load.asking import plan_of as plan_for
from tests.harness.workload.mixes import STAY, load_of, tokens
from tests.made_up.rows import made_up_manifest

S = 1_000_000_000


def plan_of(load: AbandonLoad, *, seed: int = 7) -> LoadPlan:
    """Ten arrivals, one a second."""
    arrivals = ConstantArrivals(kind="constant", rate=1, seconds=10, max_streams=2)
    return plan_for("http://127.0.0.1:1", load=load, arrivals=arrivals, seed=seed)


def manifest_of(*loops_ended_s: float) -> Manifest:
    manifest = made_up_manifest(seed=7)
    manifest.idle.loops = [IdleReading(t_ns=int(t * S), values={}) for t in loops_ended_s]
    return manifest


def sent(number: int, *, begins_s: float, end_s: float) -> Sent:
    return Sent(number, int((begins_s + number) * S), int(end_s * S))


def test_who_was_due_had_waited_until_the_last_request_ended() -> None:
    seen = [sent(n, begins_s=100, end_s=107.5) for n in (0, 1, 3)]
    found = find_unsent(plan_of(load_of(STAY)), manifest_of(), seen)
    assert found.to_stay_s == pytest.approx([5.5, 3.5, 2.5, 1.5, 0.5])  # 8 and 9 were not due yet
    assert found.to_leave_s == []


def test_who_would_have_left_is_told_from_who_would_have_stayed() -> None:
    leaving = (tokens(1), PrefillPlan(plan="prefill", share=[0.1, 0.2]))
    for leave in leaving:
        found = find_unsent(
            plan_of(load_of(leave)), manifest_of(), [sent(0, begins_s=0, end_s=2.5)]
        )
        assert not found.to_stay_s
        assert found.to_leave_s == pytest.approx([1.5, 0.5])


def test_each_loop_has_a_schedule_of_its_own() -> None:
    seen = [sent(n, begins_s=100, end_s=109) for n in range(10)]
    seen += [sent(0, begins_s=200, end_s=201.5)]
    plan = plan_of(load_of(STAY), seed=8)  # the second loop's
    found = find_unsent(plan, manifest_of(150, 250), seen)
    assert found.to_stay_s == pytest.approx([0.5])


def test_where_nothing_was_sent_nobody_knows_when_it_began() -> None:
    found = find_unsent(plan_of(load_of(STAY)), manifest_of(), [])
    assert found.to_stay_s == found.to_leave_s == []
