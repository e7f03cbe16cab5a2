"""Two methods for one quantity: each pair is of the same requests, and may disagree."""

from typing import Any

import pytest

from harness.analysis.agreement import agreement, of_the_rest
from harness.analysis.summary import figures_of, observe
from harness.records import Agreement, Metric, Role
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


@pytest.mark.parametrize(("off", "agrees"), [(3, True), (15, False)])
def test_a_train_is_held_against_the_log_of_those_that_left(
    run: RunBuilder, off: float, agrees: bool
) -> None:
    """Steps of 10 ms; the slot is free `off` before the boundary that the probe shows. A request of
    another phase, which is let go later, is not compared."""
    for i in range(6):
        t0 = 1000.0 * (i + 1) + 3 * i / 2
        free = 1000.0 * (i + 1) + 50
        more: dict[str, Any] = {"arm": "abandon", "trial": i}
        run.request(f"l{i}", sent=0, tokens=[20], outcome="abandoned", end=t0, role=Role.FILLER)
        run.events(f"l{i}", arrived=1, admitted=10, first_token=20, disconnected=t0 + 1)
        run.events(f"l{i}", abort_received=t0 + 2, removed=free - off, blocks_freed=free - off)
        tokens = [free + 10, free + 20]
        more |= {"role": Role.PROBE, "end": free + 20}
        run.request(f"p{i}", sent=500, tokens=tokens, outcome="completed", **more)
        run.requests[-1].reference_ns = run.requests[-2].abandoned_ns
        run.events(f"p{i}", arrived=501, admitted=free, first_token=free + 10)
        more |= {"arm": "control", "role": Role.FILLER, "end": 8000}
        run.request(f"f{i}", sent=500, tokens=[free + 30], outcome="cut_off", **more)
        run.requests[-1].reference_ns = run.requests[-2].last_token_ns
    ticks = [10.0 * step for step in range(1, 800)]
    run.request("m", sent=0, tokens=ticks, outcome="cut_off", end=8000, role=Role.METRONOME)
    run.abandon("other", t0=6500, tokens=[21])
    run.events("other", arrived=1, admitted=10, first_token=20, disconnected=6501)
    run.events("other", abort_received=6502, removed=6900, blocks_freed=6900)
    run.lag(100, 1)
    found = agreed(run)[("cancel_latency_s", "probe")]
    assert found.n == 6
    assert found.bias == pytest.approx((0.0, 0.011))
    assert found.difference == pytest.approx(off / 1e3)
    assert found.agrees is agrees


def test_the_rate_of_a_part_may_be_higher_than_that_of_all() -> None:
    """One ghost among 38 that left: it may be among the 24 that were counted."""
    figure = Metric(unit="ratio", n=38, mean=1 / 38, method="exact")
    for hits, agrees in ((0, True), (1, True), (2, False)):
        figure.others["probe"] = Metric(unit="ratio", n=24, mean=hits / 24, method="probe")
        (found,) = of_the_rest({"ghost_rate": figure})
        assert found.agrees is agrees
