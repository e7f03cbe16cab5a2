"""Plans and think times follow from the seed, whatever the order of asking."""

import msgspec
import pytest

from harness.load.stream import StreamMachine
from harness.records import Delivery, Outcome, RequestRow, Role, TokenCounting, Way
from harness.workload.abandon import (
    Expectation,
    RequestPlan,
    StepEstimate,
    Ticket,
    leave_rule,
    leaving_share,
    never,
    plan_request,
    think_ns,
)
from harness.workload.plan import (
    AbandonLoad,
    AfterAnswerShare,
    AfterGeometricTokens,
    AfterLognormalTokens,
    AfterTime,
    AfterTokens,
    AfterUniformTokens,
    AtLastToken,
    DuringPrefill,
    LeavePlan,
    Never,
    WhileQueued,
)
from tests.harness.load.mixes import load_of, slice_of

MS = 1_000_000
STEP_NS = 20 * MS  # of an estimate that has seen nothing
LOAD = load_of(
    slice_of(AfterTokens(tokens=[0, 4, 64]), weight=0.75),
    slice_of(Never(), weight=0.25),
)
NOTHING_SEEN = Expectation()


def plan(load: AbandonLoad, n: int, seen: Expectation = NOTHING_SEEN) -> RequestPlan:
    return plan_request(load, seed=7, user=0, n=n, seen=seen)


def plans(leave: LeavePlan, *, number: int = 500, answers: int = 1) -> list[RequestPlan]:
    load = load_of(slice_of(leave, way=Way.RST, n=answers))
    return [plan(load, n, seen(first_token_ms=100)) for n in range(number)]


def seen(*, first_token_ms: int, answer_tokens: int | None = None) -> Expectation:
    """What one answer told: cut off, or ended by itself after so many tokens."""
    ticket = Ticket(
        request_id="r",
        arm="main",
        role=Role.USER,
        trial=None,
        user=0,
        max_tokens=1000,
        intended_start_ns=0,
        intent=plan(load_of(slice_of(Never())), 0).intent,
    )
    stream = StreamMachine(ticket, sent_ns=0, continuous_usage=True)
    stream.headers(200)
    usage = b'"usage":{"prompt_tokens":1,"completion_tokens":%d}' % (answer_tokens or 1)
    end = b'"finish_reason":"stop"' if answer_tokens else b'"finish_reason":null'
    stream.event(b'{"choices":[{"text":"a",%b}],%b}' % (end, usage), first_token_ms * MS)
    stream.cut(first_token_ms * MS)
    expectation = Expectation()
    expectation.observe(stream.row())
    return expectation


def tokens_of(found: list[RequestPlan]) -> set[int]:
    """After how many tokens they leave; each says the same in words."""
    for one in found:
        assert one.intent.plan == f"tokens:{one.intent.planned_abandon}"
        assert one.pause == "think"
    return {one.intent.planned_abandon for one in found if one.intent.planned_abandon is not None}


def test_a_plan_is_a_function_of_seed_user_and_number() -> None:
    def of(seed: int, user: int, n: int) -> RequestPlan:
        return plan_request(LOAD, seed=seed, user=user, n=n, seen=NOTHING_SEEN)

    pairs = [(user, n) for user in range(5) for n in range(5)]
    forwards = [of(1, user, n) for user, n in pairs]
    backwards = [of(1, user, n) for user, n in reversed(pairs)]
    assert forwards == backwards[::-1]
    assert forwards != [of(2, user, n) for user, n in pairs]
    assert len(set(forwards)) == len(pairs)


def test_shares_and_ranges() -> None:
    found = [plan(LOAD, n) for n in range(2000)]
    stayers = [one for one in found if one.intent.planned_abandon is None]
    assert 400 < len(stayers) < 600
    assert {one.max_tokens for one in stayers} == {50}
    assert {(one.intent.plan, one.intent.way) for one in stayers} == {("never", None)}
    leavers = [one for one in found if one.intent.planned_abandon is not None]
    assert {one.max_tokens for one in leavers} == {1000}
    assert tokens_of(leavers) == {0, 4, 64}
    assert {one.intent.way for one in leavers} == {Way.FIN}
    assert {one.prompt_tokens for one in found} == set(range(10, 21))
    fractions = [one.think_fraction for one in found]
    assert 0 <= min(fractions) < 0.01
    assert 0.99 < max(fractions) < 1


def test_a_mix_is_drawn_by_weight_with_all_that_belongs_to_an_entry() -> None:
    load = load_of(
        slice_of(AfterTokens(tokens=[3]), weight=6, way=Way.VANISH, n=2),
        slice_of(WhileQueued(), weight=2, delivery=Delivery.UNARY),
        slice_of(AfterTokens(tokens=[5]), weight=0),
    )
    found = [plan(load, n).intent for n in range(2000)]
    told = {(i.plan, i.way, i.delivery, i.n) for i in found}
    assert told == {
        ("tokens:3", Way.VANISH, Delivery.STREAM, 2),
        ("queued", Way.FIN, Delivery.UNARY, 1),
    }
    assert 0.70 < sum(intent.plan == "tokens:3" for intent in found) / 2000 < 0.80


class TestTokens:
    def test_exactly_so_many(self) -> None:
        assert tokens_of(plans(AfterTokens(tokens=[16]))) == {16}

    def test_numbers_that_stand_twice_come_twice_as_often(self) -> None:
        found = [one.intent.planned_abandon for one in plans(AfterTokens(tokens=[1, 1, 9]))]
        assert 270 < found.count(1) < 390

    def test_uniform_reaches_both_ends(self) -> None:
        assert tokens_of(plans(AfterUniformTokens(lowest=3, highest=6))) == {3, 4, 5, 6}

    @pytest.mark.parametrize(
        "leave", [AfterGeometricTokens(mean=900), AfterLognormalTokens(median=900, sigma=2)]
    )
    def test_open_ended_ones_stay_within_all_answers(self, leave: LeavePlan) -> None:
        found = tokens_of(plans(leave, answers=2))
        assert min(found) >= 1
        assert 1500 < max(found) < 2000

    def test_a_share_of_the_answer_that_is_expected(self) -> None:
        for one in plans(AfterAnswerShare(share=(0.0, 1.0)), answers=2):
            word, _, share = one.intent.plan.partition(":")
            assert word == "share"
            assert one.intent.planned_abandon is not None
            assert 1 <= one.intent.planned_abandon < 2000
            assert one.intent.planned_abandon == pytest.approx(float(share) * 2000, abs=12)

    def test_where_answers_end_by_themselves_the_share_is_of_those(self) -> None:
        load = load_of(slice_of(AfterAnswerShare(share=(0.5, 0.5))))
        told = seen(first_token_ms=1, answer_tokens=40)
        assert plan(load, 0, told).intent.planned_abandon == 20


class TestBeforeTheFirstToken:
    def test_queued_thinks_from_the_sending_on(self) -> None:
        (one,) = plans(WhileQueued(), number=1)
        assert (one.intent.plan, one.intent.planned_abandon, one.pause) == ("queued", 0, "think")
        assert not one.intent.counts_from_start

    def test_a_share_of_what_a_first_token_takes_here(self) -> None:
        for one in plans(DuringPrefill(share=(0.2, 0.6))):
            share = float(one.intent.plan.removeprefix("prefill:"))
            assert 0.2 <= share <= 0.6
            assert one.intent.planned_abandon == 0
            assert one.intent.counts_from_start
            assert isinstance(one.pause, int)
            assert one.pause == pytest.approx(share * 100 * MS, abs=MS)

    def test_before_anything_is_known_it_is_read_to_the_end(self) -> None:
        one = plan(load_of(slice_of(DuringPrefill(share=(0.5, 0.5)), way=Way.RST)), 0)
        assert (one.intent.plan, one.intent.way, one.max_tokens) == ("never", None, 50)

    def test_a_time_since_the_sending(self) -> None:
        (one,) = plans(AfterTime(seconds=(2.0, 2.0), since="sent"), number=1)
        assert (one.intent.plan, one.intent.planned_abandon) == ("time:2", 0)
        assert one.intent.counts_from_start
        assert one.pause == 2_000 * MS


def test_a_time_since_the_first_token() -> None:
    found = plans(AfterTime(seconds=(0.1, 0.3), since="first_token"))
    pauses = [one.pause for one in found if isinstance(one.pause, int)]
    assert {one.intent.planned_abandon for one in found} == {1}
    assert 100 * MS <= min(pauses) < 105 * MS
    assert 295 * MS < max(pauses) <= 300 * MS


class TestRule:
    @staticmethod
    def rule(leave: LeavePlan, *, number: int = 0, think: str = "step") -> list[int | None]:
        """What it says after 0, 1, ... tokens."""
        one = plans(leave, number=number + 1)[number]
        ask = leave_rule(one, think, StepEstimate())
        return [ask(tokens) for tokens in range(6)]

    def test_nobody_thinks_of_leaving_before_the_tokens(self) -> None:
        answers = self.rule(AfterTokens(tokens=[3]), think="none")
        assert answers == [None, None, None, 0, 0, 0]

    def test_the_pause_is_a_part_of_a_step(self) -> None:
        for number in range(20):
            (*_, pause_ns) = self.rule(AfterTokens(tokens=[3]), number=number)
            assert pause_ns is not None
            assert 0 <= pause_ns < STEP_NS

    def test_a_time_is_kept_whatever_the_think_time(self) -> None:
        leave = AfterTime(seconds=(0.5, 0.5), since="first_token")
        assert self.rule(leave)[:2] == [None, 500 * MS]

    def test_the_last_token_is_a_race(self) -> None:
        found = plans(AtLastToken(), answers=2)
        assert {one.intent.planned_abandon for one in found} == {96}  # 48 of each answer's 50
        assert {(one.intent.plan, one.max_tokens) for one in found} == {("last_token", 50)}
        steps = [(leave_rule(one, "none", StepEstimate())(96) or 0) / STEP_NS for one in found]
        assert 0.5 <= min(steps) < 0.55
        assert 2.45 < max(steps) < 2.5
        assert 100 < sum(step < 1 for step in steps) < 150  # before the last step begins
        assert 100 < sum(step > 2 for step in steps) < 150  # after it has ended

    def test_who_stays_never_leaves(self) -> None:
        (one,) = plans(Never(), number=1)
        assert leave_rule(one, "step", StepEstimate()) is never


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


def test_long_prompts_are_left_between_a_tenth_and_nine_tenths_of_the_first_token() -> None:
    shares = [leaving_share(seed=1, n=n) for n in range(1000)]
    assert 0.1 <= min(shares) < 0.11
    assert 0.89 < max(shares) <= 0.9
    assert shares[:5] == [leaving_share(seed=1, n=n) for n in range(5)]
    assert shares[:5] != [leaving_share(seed=2, n=n) for n in range(5)]


class TestExpectation:
    @staticmethod
    def row(**changes: object) -> RequestRow:
        one = RequestRow(
            request_id="r", arm="main", role=Role.USER, trial=None, user=0, stream=True,
            planned_abandon=None, think_ns=None, max_tokens=100, intended_start_ns=0,
            sent_ns=0, ended_ns=9, token_counting=TokenCounting.USAGE, outcome=Outcome.COMPLETED,
        )  # fmt: skip
        return msgspec.structs.replace(one, **changes)

    def test_only_the_latest_count(self) -> None:
        expectation = Expectation()
        for first_token_ns in [1000] * 200 + [10] * 101:
            expectation.observe(self.row(first_token_ns=first_token_ns))
        assert expectation.ttft_ns() == 10

    def test_a_body_in_one_piece_tells_no_first_token(self) -> None:
        expectation = Expectation()
        expectation.observe(self.row(first_token_ns=5, delivery=Delivery.UNARY))
        assert expectation.ttft_ns() is None

    def test_an_answer_that_was_cut_at_its_limit_tells_no_length(self) -> None:
        expectation = Expectation()
        expectation.observe(self.row(finish_reason="length", tokens_read=8))
        assert expectation.answer_tokens(100) == 100
        expectation.observe(self.row(finish_reason="stop", tokens_read=8, n=2))
        assert expectation.answer_tokens(100) == 4
        assert expectation.answer_tokens(3) == 3
