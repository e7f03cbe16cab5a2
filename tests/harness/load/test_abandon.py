"""Plans and think times follow from the seed, whatever the order of asking."""

import pytest

from harness.load.abandon import StepEstimate, plan_request, think_ns
from harness.load.plan import AbandonLoad

LOAD = AbandonLoad(
    abandon_after_tokens=[0, 4, 64],
    stay_share=0.25,
    think="step",
    prompt_tokens=(10, 20),
    answer_tokens=1000,
    stay_tokens=50,
    stop_after_abandons=None,
)


def test_a_plan_is_a_function_of_seed_user_and_number() -> None:
    pairs = [(user, n) for user in range(5) for n in range(5)]
    forwards = [plan_request(LOAD, seed=1, user=u, n=n) for u, n in pairs]
    backwards = [plan_request(LOAD, seed=1, user=u, n=n) for u, n in reversed(pairs)]
    assert forwards == backwards[::-1]
    assert forwards != [plan_request(LOAD, seed=2, user=u, n=n) for u, n in pairs]
    assert len(set(forwards)) == len(pairs)


def test_shares_and_ranges() -> None:
    plans = [plan_request(LOAD, seed=7, user=0, n=n) for n in range(2000)]
    stayers = [plan for plan in plans if plan.planned_abandon is None]
    assert 400 < len(stayers) < 600
    assert {plan.max_tokens for plan in stayers} == {50}
    leavers = [plan for plan in plans if plan.planned_abandon is not None]
    assert {plan.max_tokens for plan in leavers} == {1000}
    assert {plan.planned_abandon for plan in leavers} == {0, 4, 64}
    assert {plan.prompt_bytes for plan in plans} == set(range(10, 21))
    fractions = [plan.think_fraction for plan in plans]
    assert 0 <= min(fractions) < 0.01
    assert 0.99 < max(fractions) < 1


@pytest.mark.parametrize(
    ("think", "expected"), [("step", 5_000_000), ("none", 0), (2.0, 500_000_000), (0.0, 0)]
)
def test_think_time(think: str | float, expected: int) -> None:
    assert think_ns(think, fraction=0.25, step_ns=20_000_000) == expected


def test_the_step_is_the_median_of_the_latest_gaps() -> None:
    step = StepEstimate()
    assert step.median_ns() == 20_000_000  # nothing was seen yet
    for gap in (10, 0, 0, 0, 0, 30, 1_000_000):
        step.observe(gap)
    assert step.median_ns() == 30  # zero: two tokens in one receive
    for _ in range(101):
        step.observe(7)
    assert step.median_ns() == 7
