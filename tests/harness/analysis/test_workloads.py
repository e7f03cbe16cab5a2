"""The figures that single questions need: asking again, canaries, storms, races. By hand."""

from collections.abc import Collection

import pytest

from harness.analysis.audit import audit
from harness.analysis.cancel import storm_figures
from harness.analysis.cancellation import cancellations
from harness.analysis.facts import run_facts
from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.latency import (
    asking_again_figures,
    cached_again_figures,
    canary_figures,
    canary_remarks,
    known_answers,
)
from harness.records import Role
from harness.store.frames import RunFrames
from tests.harness.told import metric
from tests.made_up.run import RunBuilder

# Asking again.


def ask_twice(run: RunBuilder) -> None:
    """ "a" has a prompt of 12, left after its token; "b" repeats it, and 8 of the 12 are found."""
    run.abandon("a", t0=25, tokens=[20], prompt_tokens=12)
    run.request(
        "b", sent=40, tokens=[55, 65], outcome="completed", end=70, repeats="a", prompt_tokens=12
    )
    run.events("a", arrived=1, admitted=2, first_token=20)
    run.events("b", arrived=41, admitted=42, first_token=55)
    run.step(2, 20, sampled=("a",), a=12)
    run.step(42, 48, b=3)
    run.step(48, 55, sampled=("b",), b=1)
    run.step(55, 65, sampled=("b",), b=1)


def test_a_repetition_has_its_own_latency_and_cached_prompt(
    run: RunBuilder,
) -> None:
    ask_twice(run)
    frames = run.frames()
    found = asking_again_figures(frames.requests)
    again = metric(found["ttft_again_s"])
    assert again.n == 1
    assert again.p50 == pytest.approx(0.015)
    assert again.others["asked_first"].p50 == pytest.approx(0.020)
    assert metric(found["attempts_per_answer"]).mean == 2.0
    cached = metric(cached_again_figures(frames, run_facts(frames))["cached_again"])
    assert cached.n == 1
    assert cached.mean == pytest.approx(8 / 12)


def test_without_repetitions_canaries_or_storms_there_are_no_figures_of_them(
    run: RunBuilder,
) -> None:
    run.abandon("a", t0=25, tokens=[20])
    frames = run.frames()
    assert asking_again_figures(frames.requests) == canary_figures(frames.requests) == {}
    assert cached_again_figures(frames, run_facts(frames)) == of_storms(frames) == {}


def test_repetitions_without_an_answer_or_a_log_say_so(run: RunBuilder) -> None:
    run.abandon("a", t0=25, tokens=[20])
    run.abandon("b", t0=45, tokens=[40], repeats="a")
    frames = run.frames()
    found = asking_again_figures(frames.requests)
    assert found["attempts_per_answer"] == NotMeasurable("no answer was completed")
    cached = cached_again_figures(frames, run_facts(frames))["cached_again"]
    assert isinstance(cached, NotMeasurable)


# Canaries.


def sing(run: RunBuilder, name: str, answer: str, *, sent: float, user: int = 0) -> None:
    run.request(
        name,
        sent=sent,
        tokens=[sent + 10, sent + 15],
        outcome="completed",
        end=sent + 20,
        role=Role.CANARY,
        user=user,
        answer=answer,
    )


def test_an_answer_that_differs_from_the_known_one_is_counted(run: RunBuilder) -> None:
    sing(run, "late", "wrong", sent=300)  # the order of rows is not the order of asking
    sing(run, "alone", "right", sent=0)
    sing(run, "then", "right", sent=100)
    sing(run, "other", "its own", sent=50, user=1)
    sing(run, "other-then", "its own", sent=200, user=1)
    found = canary_figures(run.frames().requests)
    mismatch = metric(found["canary_mismatch_rate"])
    assert mismatch.n == 3
    assert mismatch.mean == pytest.approx(1 / 3)
    assert mismatch.upper95 is not None
    assert metric(found["canary_ttft_s"]).p50 == pytest.approx(0.010)
    assert metric(found["canary_itl_s"]).mean == pytest.approx(0.005)


def test_an_answer_that_was_cut_off_is_none(run: RunBuilder) -> None:
    sing(run, "alone", "right", sent=0)
    run.request("b", sent=50, tokens=[60], outcome="cut_off", end=70, role=Role.CANARY, answer="ri")
    found = canary_figures(run.frames().requests)
    assert found["canary_mismatch_rate"] == NotMeasurable("no canary had a second answer")


def test_the_known_answers_of_all_arms_must_be_alike(run: RunBuilder) -> None:
    sing(run, "alone", "right", sent=0)
    sing(run, "then", "wrong", sent=50)
    known = known_answers(run.frames().requests)
    assert known == {0: "right"}
    (alike,) = canary_remarks({"0": known, "50": known})
    assert alike.level == "info"
    (torn,) = canary_remarks({"0": known, "50": {0: "left"}})
    assert torn.level == "invalid"
    assert torn.text.endswith(": 0")
    assert canary_remarks({"0": {}, "50": {}}) == []


# Storms.


def storm(run: RunBuilder, number: int, start: float, *, ghosts: Collection[int] = ()) -> None:
    """Two leave 2 ms apart; the blocks of the second are free 8 ms after the first left."""
    for i in range(2):
        name = f"s{number}{i}"
        run.abandon(name, t0=start + 2 * i, tokens=[start - 5], trial=number)
        run.events(name, arrived=start - 40, admitted=start - 30, first_token=start - 5)
        run.events(name, disconnected=start + 3, abort_received=start + 4)
        gone, reason = start + 6 + 2 * i, "length" if i in ghosts else "abort"
        run.events(name, reason=reason, removed=gone, blocks_freed=gone, finished=gone)


def of_storms(frames: RunFrames) -> Figures:
    return storm_figures(cancellations(frames), run_facts(frames))


def test_a_storm_lasts_from_the_first_who_leaves_to_the_last_block(run: RunBuilder) -> None:
    storm(run, 0, 100)
    storm(run, 1, 300)
    found = of_storms(run.frames())
    clear = metric(found["storm_clear_s"])
    assert (clear.n, clear.n_censored) == (2, 0)
    assert clear.p50 == pytest.approx(0.008)
    assert metric(found["storm_spread_s"]).p50 == pytest.approx(0.002)


@pytest.mark.parametrize("ghosts", [{0}, {0, 1}])
def test_a_storm_with_a_ghost_is_censored(run: RunBuilder, ghosts: set[int]) -> None:
    storm(run, 0, 100)
    storm(run, 1, 300, ghosts=ghosts)
    run.steps(300, 320, "x", length=1)  # whole steps: none of them was in its last one
    clear = metric(of_storms(run.frames())["storm_clear_s"])
    assert (clear.n, clear.n_censored) == (2, 1)


# Who leaves as the last token comes.


def race(run: RunBuilder, *, seen: float) -> None:
    """Left at 33; its last step runs from 40 to 50, and it ends with it."""
    run.abandon("a", t0=33, tokens=[21, 31], max_tokens=5)
    run.events("a", arrived=1, admitted=2, first_token=20, disconnected=seen)
    run.events("a", reason="length", removed=50.1, blocks_freed=50.1, finished=50.1, generated=5)
    run.steps(1, 4, "a")
    run.steps(5, 9, "other")


@pytest.mark.parametrize(
    ("seen", "is_ghost"),
    [
        (41, False),  # in its last step: a cancel would have been applied at its end
        (39, True),  # a whole step before the end
        (55, True),  # too late: judged by its leaving
    ],
)
def test_a_request_seen_leaving_in_its_last_step_is_no_ghost(
    run: RunBuilder, seen: float, is_ghost: bool
) -> None:
    race(run, seen=seen)
    (row,) = cancellations(run.frames()).to_dict("records")
    assert row["phase"] == ("decode" if is_ghost else "ended")
    assert row["ghost"] is (True if is_ghost else None)


@pytest.mark.parametrize(("plan", "due"), [("last_token", (0, 1)), ("tokens:2", (1, 1))])
def test_an_abort_is_not_due_for_who_left_as_the_last_token_came(
    run: RunBuilder, plan: str, due: tuple[int, int]
) -> None:
    run.abandon("a", t0=33, tokens=[21, 31], max_tokens=3, plan=plan)
    run.metrics(aborted="exact")
    run.idle({"aborted": 0}, {"aborted": 0})
    frames = run.frames()
    told = audit(frames, run_facts(frames), NotMeasurable("-")).counters
    (entry,) = [one for one in told if one.role == "aborted"]
    assert entry.due == due
