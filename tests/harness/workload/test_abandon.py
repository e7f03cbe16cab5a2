"""Plans draw their moment of leaving; the rules that follow say when and after what pause."""

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
    GeometricPlan,
    LastTokenPlan,
    LognormalPlan,
    PrefillPlan,
    QueuedPlan,
    RequestSpec,
    SharePlan,
    TimePlan,
    UniformPlan,
    geometric,
    lognormal,
    never,
    think_ns,
)
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency, StepEstimate
from harness.workload.storm import Storm, leaving_share
from tests.harness.workload.mixes import STAY, load_of, tokens
from tests.made_up.rows import request_row

MS = 1_000_000
STEP_NS = 20 * MS  # of an estimate that has seen nothing
LOAD = load_of(tokens(0, 4, 64), stay_share=0.25)
RNGS = st.integers(0, 2**63).map(random.Random)
LIMITS = st.integers(2, 10_000_000)


def seen(*rows: dict[str, Any]) -> ObservedLatency:
    latency = ObservedLatency()
    for more in rows:
        values = {"outcome": Outcome.COMPLETED, "ended_ns": 9, **more}
        latency.observe(request_row("r", sent_ns=0, **values))
    return latency


SEEN = seen({"first_token_ns": 100 * MS})


def drawn(load: AbandonLoad, n: int, latency: ObservedLatency = SEEN) -> RequestSpec:
    return load.draw_request(seed=7, user=0, n=n, seen=latency)


def specs(plan: AbandonPlan, *, number: int = 500) -> list[RequestSpec]:
    load = load_of(plan)
    return [drawn(load, n) for n in range(number)]


def tokens_of(found: list[RequestSpec]) -> set[int]:
    """After how many tokens they leave; each says the same in words."""
    for spec in found:
        assert (spec.plan, spec.pause) == (f"tokens:{spec.planned_abandon}", "think")
    return {spec.planned_abandon for spec in found if spec.planned_abandon is not None}


class TestRequests:
    def test_a_request_is_a_function_of_seed_user_and_number(self) -> None:
        def of(seed: int, user: int, n: int) -> RequestSpec:
            return LOAD.draw_request(seed=seed, user=user, n=n, seen=SEEN)

        pairs = [(user, n) for user in range(5) for n in range(5)]
        forwards = [of(1, user, n) for user, n in pairs]
        assert forwards == [of(1, user, n) for user, n in reversed(pairs)][::-1]
        assert forwards != [of(2, user, n) for user, n in pairs]
        assert len(set(forwards)) == len(pairs)

    def test_shares_and_ranges(self) -> None:
        found = [drawn(LOAD, n) for n in range(2000)]
        stayers = [spec for spec in found if spec.planned_abandon is None]
        assert 400 < len(stayers) < 600
        assert {(spec.plan, spec.way, spec.max_tokens) for spec in stayers} == {("never", None, 50)}
        leavers = [spec for spec in found if spec.planned_abandon is not None]
        assert {(spec.way, spec.max_tokens) for spec in leavers} == {(Way.FIN, 1000)}
        assert tokens_of(leavers) == {0, 4, 64}
        assert {spec.prompt_tokens for spec in found} == set(range(10, 21))
        fractions = [spec.think_fraction for spec in found]
        assert 0 <= min(fractions) < 0.01
        assert 0.99 < max(fractions) < 1

    def test_a_mix_is_drawn_by_weight_with_all_that_belongs_to_an_entry(self) -> None:
        load = load_of(
            tokens(3, weight=6, way=Way.VANISH, n=2),
            QueuedPlan(plan="queued", weight=2, delivery=Delivery.UNARY),
            tokens(5, weight=0),
        )
        found = [drawn(load, n) for n in range(2000)]
        assert {(spec.plan, spec.way, spec.delivery, spec.n) for spec in found} == {
            ("tokens:3", Way.VANISH, Delivery.STREAM, 2),
            ("queued", Way.FIN, Delivery.UNARY, 1),
        }
        assert 0.70 < sum(spec.plan == "tokens:3" for spec in found) / 2000 < 0.80


class TestTokens:
    def test_numbers_that_stand_twice_come_twice_as_often(self) -> None:
        found = [spec.planned_abandon for spec in specs(tokens(1, 1, 9))]
        assert 270 < found.count(1) < 390

    def test_uniform_reaches_both_ends(self) -> None:
        plan = UniformPlan(plan="tokens_uniform", lowest=3, highest=6)
        assert tokens_of(specs(plan)) == {3, 4, 5, 6}

    @pytest.mark.parametrize(
        "plan",
        [
            GeometricPlan(plan="tokens_geometric", mean=900, n=2),
            LognormalPlan(plan="tokens_lognormal", median=900, sigma=2, n=2),
        ],
    )
    def test_open_ended_ones_stay_within_all_answers(self, plan: AbandonPlan) -> None:
        found = tokens_of(specs(plan))
        assert min(found) >= 1
        assert 1500 < max(found) < 2000

    def test_a_share_of_the_answer_that_is_expected(self) -> None:
        for spec in specs(SharePlan(plan="answer_share", share=[0.0, 1.0], n=2)):
            word, _, share = spec.plan.partition(":")
            assert word == "share"
            assert spec.planned_abandon is not None
            assert 1 <= spec.planned_abandon < 2000
            assert spec.planned_abandon == pytest.approx(float(share) * 2000, abs=12)

    def test_where_answers_end_by_themselves_the_share_is_of_those(self) -> None:
        load = load_of(SharePlan(plan="answer_share", share=[0.5, 0.5]))
        told = seen({"finish_reason": "stop", "tokens_read": 40})
        assert drawn(load, 0, told).planned_abandon == 20

    def test_a_file_that_was_read_keeps_all_else_of_its_entry(self) -> None:
        plan = FilePlan(plan="tokens_from_file", file="f", weight=3, way=Way.RST, n=2)
        assert plan.with_counts([3, 5]) == tokens(3, 5, weight=3, way=Way.RST, n=2)


class TestBeforeTheFirstToken:
    def test_queued_thinks_from_the_sending_on(self) -> None:
        (spec,) = specs(QueuedPlan(plan="queued"), number=1)
        assert (spec.plan, spec.planned_abandon, spec.pause) == ("queued", 0, "think")
        assert not spec.counts_from_start

    def test_a_share_of_what_a_first_token_takes_here(self) -> None:
        for spec in specs(PrefillPlan(plan="prefill", share=[0.2, 0.6])):
            share = float(spec.plan.removeprefix("prefill:"))
            assert 0.2 <= share <= 0.6
            assert spec.planned_abandon == 0
            assert spec.counts_from_start
            assert spec.pause == pytest.approx(share * 100 * MS, abs=MS)

    def test_before_anything_is_known_it_is_read_to_the_end(self) -> None:
        load = load_of(PrefillPlan(plan="prefill", share=[0.5, 0.5], way=Way.RST))
        spec = drawn(load, 0, ObservedLatency())
        assert (spec.plan, spec.way, spec.max_tokens) == ("never", None, 50)

    def test_a_time_since_the_sending(self) -> None:
        (spec,) = specs(TimePlan(plan="time", seconds=[2.0, 2.0]), number=1)
        assert (spec.plan, spec.planned_abandon, spec.pause) == ("time:2", 0, 2_000 * MS)
        assert spec.counts_from_start


def test_a_time_since_the_first_token() -> None:
    found = specs(TimePlan(plan="time", seconds=[0.1, 0.3], since="first_token"))
    pauses = [spec.pause for spec in found if isinstance(spec.pause, int)]
    assert {spec.planned_abandon for spec in found} == {1}
    assert 100 * MS <= min(pauses) < 105 * MS
    assert 295 * MS < max(pauses) <= 300 * MS


class TestRule:
    @staticmethod
    def rule(plan: AbandonPlan, *, number: int = 0, think: str = "step") -> list[int | None]:
        """What it says after 0, 1, ... tokens."""
        ask = specs(plan, number=number + 1)[number].leave_rule(think, StepEstimate())
        return [ask(count) for count in range(6)]

    def test_nobody_thinks_of_leaving_before_the_tokens(self) -> None:
        assert self.rule(tokens(3), think="none") == [None, None, None, 0, 0, 0]

    def test_the_pause_is_a_part_of_a_step(self) -> None:
        for number in range(20):
            (*_, pause_ns) = self.rule(tokens(3), number=number)
            assert pause_ns is not None
            assert 0 <= pause_ns < STEP_NS

    def test_a_time_is_kept_whatever_the_think_time(self) -> None:
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

    def test_a_user_who_stays_never_leaves(self) -> None:
        (spec,) = specs(STAY, number=1)
        assert spec.leave_rule("step", StepEstimate()) is never


@pytest.mark.parametrize(
    ("think", "expected"), [("step", 5_000_000), ("none", 0), (2.0, 500_000_000), (0.0, 0)]
)
def test_think_time(think: str | float, expected: int) -> None:
    assert think_ns(think, fraction=0.25, step_ns=20_000_000) == expected


class TestDraws:
    @given(rng=RNGS, mean=st.floats(1, 1e7), limit=LIMITS)
    def test_geometric_leaves_before_the_limit(
        self, rng: random.Random, mean: float, limit: int
    ) -> None:
        assert 1 <= geometric(rng, mean=mean, limit=limit) < limit

    @given(rng=RNGS, median=st.floats(1, 1e7), sigma=st.floats(0, 10), limit=LIMITS)
    def test_lognormal_leaves_before_the_limit(
        self, rng: random.Random, median: float, sigma: float, limit: int
    ) -> None:
        assert 1 <= lognormal(rng, median=median, sigma=sigma, limit=limit) < limit

    def test_geometric_is_what_its_name_says(self) -> None:
        rng = random.Random(1)
        found = [geometric(rng, mean=5, limit=10**6) for _ in range(5000)]
        counts = [found.count(n) for n in range(1, 11)] + [sum(n > 10 for n in found)]
        truth = stats.geom(1 / 5)
        shares = [truth.pmf(n) for n in range(1, 11)] + [truth.sf(10)]
        assert stats.chisquare(counts, [5000 * share for share in shares]).pvalue > 0.001

    def test_what_lies_beyond_the_answer_is_spread_over_what_lies_before(self) -> None:
        """Not heaped up at the limit: those draws would all leave at the very end."""
        rng = random.Random(2)
        found = [geometric(rng, mean=100, limit=11) for _ in range(5000)]
        weights = [stats.geom(1 / 100).pmf(n) for n in range(1, 11)]
        expected = [5000 * weight / sum(weights) for weight in weights]
        assert stats.chisquare([found.count(n) for n in range(1, 11)], expected).pvalue > 0.001

    def test_lognormal_is_what_its_name_says(self) -> None:
        rng = random.Random(3)
        found = [lognormal(rng, median=200, sigma=0.5, limit=10**6) for _ in range(5000)]
        assert 190 < middle(found) < 210
        assert stats.kstest(found, stats.lognorm(s=0.5, scale=200).cdf).pvalue > 0.001

    def test_a_lognormal_of_no_width_is_its_median(self) -> None:
        assert {lognormal(random.Random(n), median=7, sigma=0, limit=99) for n in range(9)} == {7}
        assert lognormal(random.Random(1), median=70, sigma=0, limit=9) == 8


class TestObserved:
    def test_the_step_is_the_median_of_the_latest_gaps(self) -> None:
        step = StepEstimate()
        assert step.median_ns() == 20_000_000  # nothing was seen yet
        for gap in (10, 0, 0, 0, 0, 30, 1_000_000):
            step.observe(gap)
        assert step.median_ns() == 30  # zero: two tokens in one receive
        for _ in range(101):
            step.observe(7)
        assert step.median_ns() == 7

    def test_only_the_latest_first_tokens_count(self) -> None:
        rows = [{"first_token_ns": 1000}] * 200 + [{"first_token_ns": 10}] * 101
        assert seen(*rows).ttft_ns() == 10

    def test_a_body_in_one_piece_tells_no_first_token(self) -> None:
        assert seen({"first_token_ns": 5, "delivery": Delivery.UNARY}).ttft_ns() is None

    def test_only_an_answer_that_ended_by_itself_tells_a_length(self) -> None:
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
        assert storm.pause_ns(0, 3, now_ns=100, step_ns=10) is None
        assert storm.pause_ns(1, 2, now_ns=110, step_ns=10) is None
        assert storm.pause_ns(1, 3, now_ns=120, step_ns=10) == 30
        assert storm.pause_ns(0, 5, now_ns=125, step_ns=10) == 25
        assert storm.pause_ns(0, 9, now_ns=900, step_ns=10) == 0

    def test_one_that_has_read_a_lot_is_not_several(self) -> None:
        storm = Storm(streams=2, tokens=3)
        for tokens_read in (3, 4, 5):
            assert storm.pause_ns(0, tokens_read, now_ns=0, step_ns=10) is None

    def test_long_prompts_are_left_between_a_tenth_and_nine_tenths_of_the_first_token(self) -> None:
        shares = [leaving_share(seed=1, n=n) for n in range(1000)]
        assert 0.1 <= min(shares) < 0.11
        assert 0.89 < max(shares) <= 0.9
        assert shares[:5] == [leaving_share(seed=1, n=n) for n in range(5)]
        assert shares[:5] != [leaving_share(seed=2, n=n) for n in range(5)]
