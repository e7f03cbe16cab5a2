"""Waste and leaks seen from outside: sums of rounds are added up, and nothing is below zero."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from harness.analysis.black_box import figures_from_outside
from harness.analysis.counters import leak_figures
from harness.analysis.facts import run_facts
from tests.harness.from_outside import lonely_run, seen
from tests.harness.told import metric, reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def test_waste_of_rounds_is_added_up(make_run: MakeRun) -> None:
    one = seen(lonely_run(make_run))
    waste = metric(one.waste)
    assert (waste.mean, waste.n, waste.bound) == (4.0, 1, "point")
    others = {"total_tokens": 2.0, "generated_tokens": 20.0, "cut_off": 1}
    more = structs.replace(waste, mean=0.5, n=4, bound="lower", others=others)
    found = metric(
        figures_from_outside([one, replace(one, waste=more)])["wasted_tokens"]["counter"]
    )
    assert (found.mean, found.n, found.bound) == ((4.0 + 2.0) / 5, 5, "lower")
    assert found.others["cut_off"] == 1


def test_a_counter_below_what_was_read_tells_of_no_waste(make_run: MakeRun) -> None:
    run = lonely_run(make_run)
    run.manifest.idle.after |= {"generated_tokens": 1.0}
    waste = figures_from_outside([seen(run)])["wasted_tokens"]["counter"]
    assert (
        reason(waste) == "its_generated_tokens moved by 1, less than the 2 tokens that clients read"
    )


def test_while_somebody_is_still_served_there_will_be_more_waste(make_run: MakeRun) -> None:
    run = lonely_run(make_run)
    run.manifest.idle.later = {"running": 0, "waiting": 0, "generated_tokens": 7.0}
    waste = figures_from_outside([seen(run)])["wasted_tokens"]["counter"]
    assert (metric(waste).mean, metric(waste).bound) == (4.0, "lower")


def test_of_a_request_for_several_answers_all_may_be_wasted(make_run: MakeRun) -> None:
    """Its answers are generated side by side."""
    limits = []
    for answers in (1, 3):
        run = lonely_run(make_run)
        row = run.requests[0]
        row.n, row.token_times_ns = answers, sorted(row.token_times_ns * answers)
        row.event_tokens = [1] * len(row.token_times_ns)
        waste = metric(figures_from_outside([seen(run)])["wasted_tokens"]["counter"])
        assert waste.n == 1
        upper = waste.others["upper"]
        latency = metric(figures_from_outside([seen(run)])["cancel_latency_s"]["gauge"])
        assert latency.upper95 is not None
        limits.append(upper.mean / (latency.upper95 / 0.030 + 2))
    assert limits == pytest.approx([1, 3])


def test_fewer_than_before_are_no_leak(make_run: MakeRun) -> None:
    run = lonely_run(make_run)
    run.idle({"running": 2.0}, {"running": 0.0})
    found = leak_figures(run_facts(run.frames()))["leaked_slots"]
    assert reason(found).startswith("its_running was 2 before the load and 0 after it")
