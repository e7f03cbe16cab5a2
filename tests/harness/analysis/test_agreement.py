"""Two methods for one quantity: each pair is of the same requests, and may disagree."""

import pytest

from harness.analysis.agreement import agreement
from harness.analysis.summary import figures_of, observe
from harness.records import Agreement, Role
from tests.made_up.run import RunBuilder


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
