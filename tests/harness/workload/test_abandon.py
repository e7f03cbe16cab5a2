"""Plans draw their moment of leaving; the rules that follow say when and after what pause.

`test_drawn_plans` holds what each plan draws, to the last digit.
"""

import random
from statistics import median as middle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from harness.records import Delivery, Outcome, Way
from harness.workload.abandon import (
    AbandonPlan,
    FilePlan,
    LastTokenPlan,
    PrefillPlan,
    RequestSpec,
    SharePlan,
    Storm,
    TimePlan,
    geometric,
    lognormal,
    never,
    think_ns,
)
from harness.workload.observed_latency import ObservedLatency, StepEstimate
from tests.harness.workload.mixes import STAY, load_of, tokens
from tests.made_up.rows import request_row

MS = 1_000_000
STEP_NS = 20 * MS  # of an estimate that has seen nothing
LOAD = load_of(tokens(0, 4, 64), stay_share=0.25)


def seen(*rows: dict[str, Any]) -> ObservedLatency:
    latency = ObservedLatency()
    for more in rows:
        values = {"outcome": Outcome.COMPLETED, "ended_ns": 9, **more}
        latency.observe(request_row("r", sent_ns=0, **values))
    return latency


SEEN = seen({"first_token_ns": 100 * MS})


def specs(
    *mix: AbandonPlan, number: int = 500, latency: ObservedLatency = SEEN, **changes: Any
) -> list[RequestSpec]:
    load = load_of(*mix, **changes)
    return [load.draw_request(seed=7, user=0, n=n, seen=latency) for n in range(number)]


def test_a_request_is_a_function_of_seed_user_and_number() -> None:
    def of(seed: int, user: int, n: int) -> RequestSpec:
        return LOAD.draw_request(seed=seed, user=user, n=n, seen=SEEN)

    pairs = [(user, n) for user in range(5) for n in range(5)]
    forwards = [of(1, user, n) for user, n in pairs]
    assert forwards == [of(1, user, n) for user, n in reversed(pairs)][::-1]
    assert forwards != [of(2, user, n) for user, n in pairs]
    assert len(set(forwards)) == len(pairs)


def test_requests_have_their_shares_weights_and_ranges() -> None:
    mix = (tokens(3, weight=6, way=Way.VANISH, n=2), tokens(0, 4, 4), tokens(5, weight=0))
    found = specs(*mix, number=2000, stay_share=0.25)
    stayers = [spec for spec in found if spec.planned_abandon is None]
    assert 400 < len(stayers) < 600
    assert {(spec.plan, spec.way, spec.max_tokens) for spec in stayers} == {("never", None, 50)}
    left = [(spec.plan, spec.way, spec.n) for spec in found if spec.planned_abandon is not None]
    three = ("tokens:3", Way.VANISH, 2)
    assert set(left) == {three, ("tokens:0", Way.FIN, 1), ("tokens:4", Way.FIN, 1)}
    assert 0.82 < left.count(three) / len(left) < 0.90
    assert 1.4 < left.count(("tokens:4", Way.FIN, 1)) / left.count(("tokens:0", Way.FIN, 1)) < 2.8
    assert {spec.prompt_tokens for spec in found} == set(range(10, 21))
    fractions = [spec.think_fraction for spec in found]
    assert 0 <= min(fractions) < 0.01
    assert 0.99 < max(fractions) < 1


def test_a_share_is_of_answers_that_end_by_themselves() -> None:
    plan = SharePlan(plan="answer_share", share=[0.5, 0.5])
    (spec,) = specs(plan, number=1, latency=seen({"finish_reason": "stop", "tokens_read": 40}))
    assert spec.planned_abandon == 20


def test_a_file_that_was_read_keeps_the_rest_of_its_entry() -> None:
    plan = FilePlan(plan="tokens_from_file", file="f", weight=3, way=Way.RST, n=2)
    assert plan.with_counts([3, 5]) == tokens(3, 5, weight=3, way=Way.RST, n=2)


def test_a_prefill_of_unknown_length_is_read_to_the_end() -> None:
    plan = PrefillPlan(plan="prefill", share=[0.5, 0.5], way=Way.RST)
    (known,) = specs(plan, number=1)
    assert (known.planned_abandon, known.pause, known.counts_from_start) == (0, 50 * MS, True)
    (unknown,) = specs(plan, number=1, latency=ObservedLatency())
    assert (unknown.plan, unknown.way, unknown.max_tokens) == ("never", None, 50)


class TestRule:
    @staticmethod
    def rule(plan: AbandonPlan, *, number: int = 0, think: str = "step") -> list[int | None]:
        """Its answers after 0, 1, ... tokens."""
        ask = specs(plan, number=number + 1)[number].leave_rule(think, StepEstimate())
        return [ask(count) for count in range(6)]

    def test_the_pause_begins_with_the_last_wanted_token(self) -> None:
        assert self.rule(tokens(3), think="none") == [None, None, None, 0, 0, 0]
        for number in range(20):
            (*_, pause_ns) = self.rule(tokens(3), number=number)
            assert pause_ns is not None
            assert 0 <= pause_ns < STEP_NS

    def test_a_time_ignores_the_think_time(self) -> None:
        plan = TimePlan(plan="time", seconds=[0.5, 0.5], since="first_token")
        assert self.rule(plan)[:2] == [None, 500 * MS]

    def test_the_last_token_is_a_race(self) -> None:
        found = specs(LastTokenPlan(plan="last_token", n=2))
        assert {spec.planned_abandon for spec in found} == {96}  # 48 of each answer's 50
        assert {(spec.plan, spec.max_tokens) for spec in found} == {("last_token", 50)}
        pauses = [spec.leave_rule("none", StepEstimate())(96) or 0 for spec in found]
        steps = [pause / STEP_NS for pause in pauses]
        assert 0.5 <= min(steps) < 0.55
        assert 2.45 < max(steps) < 2.5
        assert 100 < sum(step < 1 for step in steps) < 150  # before the last step begins
        assert 100 < sum(step > 2 for step in steps) < 150  # after it has ended

    def test_a_user_that_stays_never_leaves(self) -> None:
        (spec,) = specs(STAY, number=1)
        assert spec.leave_rule("step", StepEstimate()) is never


@pytest.mark.parametrize(
    ("think", "expected"), [("step", 5_000_000), ("none", 0), (2.0, 500_000_000), (0.0, 0)]
)
def test_think_time(think: str | float, expected: int) -> None:
    assert think_ns(think, fraction=0.25, step_ns=20_000_000) == expected


class TestDraws:
    @given(
        seed=st.integers(0, 2**63),
        middle=st.floats(1, 1e7),
        sigma=st.floats(0, 10),
        limit=st.integers(2, 10_000_000),
    )
    def test_each_leaves_before_the_limit(
        self, seed: int, middle: float, sigma: float, limit: int
    ) -> None:
        rng = random.Random(seed)
        assert 1 <= geometric(rng, mean=middle, limit=limit) < limit
        assert 1 <= lognormal(rng, median=middle, sigma=sigma, limit=limit) < limit

    @pytest.mark.parametrize(("mean", "limit"), [(5, 10**6), (100, 11)])
    def test_a_geometric_draw_spreads_the_rest_evenly_below_the_limit(
        self, mean: float, limit: int
    ) -> None:
        rng = random.Random(1)
        found = [geometric(rng, mean=mean, limit=limit) for _ in range(5000)]
        truth = stats.geom(1 / mean)
        last = min(limit - 1, 11)
        weights = [truth.pmf(n) for n in range(1, last)]
        weights.append(truth.cdf(limit - 1) - truth.cdf(last - 1))
        counts = [found.count(n) for n in range(1, last)] + [sum(n >= last for n in found)]
        expected = [5000 * weight / sum(weights) for weight in weights]
        assert stats.chisquare(counts, expected).pvalue > 0.001

    def test_lognormal_is_what_its_name_says(self) -> None:
        rng = random.Random(3)
        found = [lognormal(rng, median=200, sigma=0.5, limit=10**6) for _ in range(5000)]
        assert 190 < middle(found) < 210
        assert stats.kstest(found, stats.lognorm(s=0.5, scale=200).cdf).pvalue > 0.001
        assert {lognormal(random.Random(n), median=7, sigma=0, limit=99) for n in range(9)} == {7}
        assert lognormal(random.Random(1), median=70, sigma=0, limit=9) == 8


class TestObserved:
    def test_the_step_is_the_median_of_the_latest_gaps(self) -> None:
        step = StepEstimate()
        assert step.median_ns() == STEP_NS
        for gap in (10, 0, 0, 0, 0, 30, 1_000_000):
            step.observe(gap)
        assert step.median_ns() == 30  # zero: two tokens in one receive
        for _ in range(101):
            step.observe(7)
        assert step.median_ns() == 7

    def test_the_first_token_is_the_median_of_the_latest_streams(self) -> None:
        rows = [{"first_token_ns": 1000}] * 200 + [{"first_token_ns": 10}] * 101
        assert seen(*rows).ttft_ns() == 10
        assert seen({"first_token_ns": 5, "delivery": Delivery.UNARY}).ttft_ns() is None

    def test_an_answer_s_length_is_known_where_it_ended_by_itself(self) -> None:
        latency = seen(
            {"finish_reason": "length", "tokens_read": 8},
            {"finish_reason": "stop", "tokens_read": 8, "outcome": Outcome.CUT_OFF},
        )
        assert latency.answer_tokens(100) == 100
        latency = seen({"finish_reason": "stop", "tokens_read": 8, "n": 2})
        assert (latency.answer_tokens(100), latency.answer_tokens(3)) == (4, 3)


class TestStorm:
    def test_all_leave_at_the_moment_that_the_last_one_is_ready(self) -> None:
        storm = Storm(streams=2, tokens=3)
        for tokens_read in (3, 4, 5):  # one that has read a lot is not several
            assert storm.pause_ns(0, tokens_read, now_ns=100, step_ns=10) is None
        assert storm.pause_ns(1, 2, now_ns=110, step_ns=10) is None
        assert storm.pause_ns(1, 3, now_ns=120, step_ns=10) == 30
        assert storm.pause_ns(0, 5, now_ns=125, step_ns=10) == 25
        assert storm.pause_ns(0, 9, now_ns=900, step_ns=10) == 0
