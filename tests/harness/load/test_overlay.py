"""Who leaves a replayed request: drawn by the load's mix, within what the trace tells."""

from harness.workload.abandon import Expectation, RequestPlan
from harness.workload.plan import AfterAnswerShare, AfterTokens, AtLastToken, LeavePlan, Never
from harness.workload.schedule import plan_replayed
from harness.workload.traces import Asked
from tests.harness.load.mixes import load_of, slice_of

SEEN = Expectation()


def replayed(leave: LeavePlan, *, answer: int, number: int = 0, answers: int = 1) -> RequestPlan:
    asked = Asked(prompt_tokens=77, answer_tokens=answer)
    load = load_of(slice_of(leave, n=answers))
    return plan_replayed(load, asked, seed=7, number=number, seen=SEEN)


def test_who_stays_asks_for_what_was_recorded() -> None:
    plan = replayed(Never(), answer=33)
    assert (plan.prompt_tokens, plan.max_tokens, plan.intent.plan) == (77, 33, "never")


def test_who_leaves_asks_for_more_than_was_recorded_so_that_a_ghost_shows() -> None:
    plan = replayed(AfterTokens(tokens=[8]), answer=33)
    assert (plan.max_tokens, plan.intent.planned_abandon) == (1000, 8)


def test_who_would_leave_after_the_recorded_end_reads_to_it() -> None:
    assert replayed(AfterTokens(tokens=[33]), answer=33).intent.planned_abandon is None
    assert replayed(AfterTokens(tokens=[33]), answer=33).max_tokens == 33
    assert replayed(AfterTokens(tokens=[33]), answer=33, answers=2).intent.planned_abandon == 33


def test_a_share_is_of_the_recorded_answer() -> None:
    plans = [replayed(AfterAnswerShare(share=(0.5, 0.5)), answer=30, number=n) for n in range(5)]
    assert [plan.intent.planned_abandon for plan in plans] == [15] * 5
    assert {plan.max_tokens for plan in plans} == {1000}
    assert replayed(AfterAnswerShare(share=(0.5, 0.5)), answer=1).intent.planned_abandon is None


def test_no_race_for_the_last_of_one_token() -> None:
    assert replayed(AtLastToken(), answer=1).intent.planned_abandon is None
    race = replayed(AtLastToken(), answer=9)
    assert (race.pause, race.max_tokens) == ("race", 9)


def test_the_mix_is_drawn_anew_for_each_request_and_the_same_again() -> None:
    asked = Asked(prompt_tokens=77, answer_tokens=100)
    load = load_of(slice_of(Never(), weight=0.3), slice_of(AfterTokens(tokens=[5]), weight=0.7))

    def leavers(seed: int) -> list[int]:
        plans = [plan_replayed(load, asked, seed=seed, number=n, seen=SEEN) for n in range(2000)]
        return [n for n, plan in enumerate(plans) if plan.intent.planned_abandon is not None]

    assert abs(len(leavers(1)) / 2000 - 0.7) < 0.03
    assert leavers(1) == leavers(1) != leavers(2)
