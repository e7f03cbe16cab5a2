"""Two methods for one quantity: each pair is of the same requests, and may disagree."""

import pytest

from harness.analysis.agreement import agreement
from harness.analysis.summary import figures_of, observe
from harness.records import Agreement, Outcome, Role
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder
from tests.made_up.servers import alone_one_by_one


def agreed(run: RunBuilder) -> dict[tuple[str, str], Agreement]:
    frames = run.frames()
    observed = observe(frames)
    figures = figures_of(frames, observed)
    found = agreement(frames, figures, observed.facts, observed.outside)
    return {(one.metric, one.method): one for one in found}


@pytest.mark.parametrize(("way", "agrees"), [(4, True), (80, False)])
def test_a_probe_is_as_late_as_a_token_may_be_under_way(
    run: RunBuilder, way: float, agrees: bool
) -> None:
    for i in range(4):
        more = {"role": Role.PROBE, "arm": "abandon", "trial": i, "reference_ns": None}
        run.request(f"p{i}", sent=0, tokens=[200 + way], outcome="completed", end=400, **more)
        run.requests[-1].reference_ns = run.requests[-1].sent_ns
        run.events(f"p{i}", arrived=1, admitted=150, first_token=200)
    run.lag(100, 1)
    found = agreed(run)[("slot_recovery_s", "probe")]
    assert found.difference == pytest.approx(way / 1e3)
    assert found.bias == pytest.approx((0.0, 0.011))
    assert found.agrees is agrees


@pytest.mark.parametrize(("aborted", "value", "agrees"), [(4.0, 1 / 5, True), (2.0, 3 / 5, False)])
def test_a_share_from_outside_is_also_of_those_who_were_cut_off(
    run: RunBuilder, aborted: float, value: float, agrees: bool
) -> None:
    """One of four who left is a ghost that ended by itself; the fifth was cut off."""
    alone_one_by_one(run, 5)
    run.metrics(running="exact", waiting="exact", aborted="exact")
    run.manifest.clock.comparable = True
    run.manifest.window.load_ended_ns, run.manifest.window.settled_ns = at(9_000), at(12_000)
    for i, row in enumerate(run.requests):
        row.max_tokens = 20
        reason = "length" if i == 0 else "abort"
        start = 1000.0 * i
        run.events(str(i), arrived=start, admitted=start, first_token=start + 40)
        gone = start + 140
        run.events(str(i), reason=reason, removed=gone, blocks_freed=gone, finished=gone)
    run.requests[4].outcome, run.requests[4].abandoned_ns = Outcome.CUT_OFF, None
    idle = {"running": 0.0, "waiting": 0.0}
    run.idle({**idle, "aborted": 0.0}, {**idle, "aborted": aborted})
    found = agreed(run)[("ghost_rate", "counter")]
    assert (found.exact, found.n) == (0.25, 5)
    assert found.value == pytest.approx(value)
    assert found.agrees is agrees
