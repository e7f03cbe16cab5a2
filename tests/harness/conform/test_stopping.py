"""Does the server stop? From figures in seconds, against controls."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.judgement import Bound, judge_holds, judge_recovery
from harness.conform.recoveries import Recoveries
from harness.conform.stopping import (
    MOST_FALSE_ALARM,
    false_alarm,
    is_suspicious,
    judge_stopping,
)
from harness.experiments.full_slots import SlotTry
from harness.experiments.holds import Holds
from harness.experiments.outcome import CannotDecideError
from harness.store.conform_result import Failure, JudgingWay
from harness.workload.abandon import RequestSpec
from tests.harness.conform.test_verdict import CALM

QUICK = [0.030, 0.031, 0.029, 0.033, 0.030]
LONG = [0.31, 0.30, 0.33, 0.32, 0.35]
HARM_S = 0.14
NEVER_S = 2.0


def holds(
    tries: Sequence[float | None],
    controls: Sequence[float],
    *,
    way: JudgingWay = "full_slots",
    **more: Any,
) -> Holds:
    return Holds(way, tries, controls, 0.001, waited_s=NEVER_S, **more)


@pytest.mark.parametrize("way", ["full_slots", "admission", "gauge", "pace", "quiet"])
@pytest.mark.parametrize(
    ("tries", "controls", "stops", "failure"),
    [
        (QUICK, QUICK, True, None),
        (LONG, LONG, True, None),  # a slow machine, and no slower after a leave
        (LONG, QUICK, False, Failure.LATE),
        ([*LONG[:4], 0.03], QUICK, None, None),
        ([*QUICK[:4], 0.9], QUICK, True, None),
        ([*QUICK[:4], 1.1], QUICK, None, None),  # as late as the answer's own end, once
        ([None], QUICK[:1], False, Failure.NEVER),
        ([*QUICK, None], QUICK, False, Failure.NEVER),
        ([None, None], [1.5, 0.03], None, None),  # a control waited, too
        ([None], [], None, None),
        ([0.31, 0.30, 0.33], QUICK[:3], None, None),  # too few to be more than chance
    ],
)
def test_tries_are_held_against_the_controls(
    way: JudgingWay,
    tries: list[float | None],
    controls: list[float],
    stops: bool | None,
    failure: Failure | None,
) -> None:
    found = judge_stopping(holds(tries, controls, way=way, natural_s=2.0), HARM_S)
    assert (found.stops, found.failure) == (stops, failure)


def test_a_try_as_late_as_the_answers_own_end_shows_nothing() -> None:
    found = judge_stopping(holds(QUICK, QUICK, natural_s=0.035), HARM_S)
    assert found.stops is None
    assert "a longer answer is needed" in found.said


def test_the_false_alarm_is_the_share_of_all_orders() -> None:
    orders = list(combinations(range(9), 5))  # the ranks of 5 tries among 4 controls
    for longer in range(1, 6):
        as_long = sum({*range(9 - longer, 9)} <= {*ranks} for ranks in orders)
        assert false_alarm(longer, 5, 4) == pytest.approx(as_long / len(orders))
    assert false_alarm(5, 5, 5) < false_alarm(5, 8, 8) < MOST_FALSE_ALARM < false_alarm(4, 5, 5)


@pytest.mark.parametrize(
    ("tries", "more", "suspects"),
    [
        (QUICK, {}, False),
        ([*QUICK[:4], 0.3], {}, True),
        ([*QUICK, None], {}, True),
        (QUICK, {"cuts": ["the connection was closed"]}, True),
        (QUICK, {"stalls_s": [0.02, 0.2], "control_stalls_s": [0.02]}, True),
        (QUICK, {"stalls_s": [0.02, 0.03], "control_stalls_s": [0.02]}, False),
    ],
)
def test_a_look_acquits_only_where_nothing_is_long(
    tries: list[float | None], more: dict[str, Any], *, suspects: bool
) -> None:
    assert is_suspicious(holds(tries, QUICK[:1], **more), HARM_S, 0.01, 0.01) is suspects


def test_what_a_look_acquits_no_test_would_call_late() -> None:
    """The look has the first of the test's controls."""
    rng = Random(0)
    acquitted = 0
    for _ in range(2000):
        tries, controls = ([rng.choice((0.03, 0.1, 0.3)) for _ in range(4)] for _ in range(2))
        if not is_suspicious(holds(tries, controls[:1]), HARM_S, 0.01, 0.01):
            acquitted += 1
            assert judge_stopping(holds(tries, controls), HARM_S).stops
    assert 500 < acquitted < 1500


def test_a_stall_in_the_tries_and_in_no_control_is_harm() -> None:
    """Each leave blocks the event loop, so that the other streams stand still as long."""
    stalls: dict[str, Any] = {"stalls_s": LONG, "control_stalls_s": QUICK}
    found = judge_holds(holds(LONG, QUICK, **stalls), 0.01, Bound())
    assert found.failure is Failure.HARM
    assert "320 ms" in found.reason
    slow: dict[str, Any] = {"stalls_s": LONG, "control_stalls_s": LONG}
    assert judge_holds(holds(LONG, LONG, **slow), 0.01, Bound()).failure is None


def test_a_slot_that_does_not_come_back_while_nothing_moves_is_harm() -> None:
    still: dict[str, Any] = {"stalls_s": [NEVER_S], "control_stalls_s": [0.02]}
    found = judge_holds(holds([None], [0.01], **still), 0.02, Bound())
    assert found.failure is Failure.HARM
    moving: dict[str, Any] = {"stalls_s": [0.02], "control_stalls_s": [0.02]}
    assert judge_holds(holds([None], [0.01], **moving), 0.02, Bound()).failure is Failure.NEVER


def test_a_slow_machine_does_not_acquit_a_server_that_stalls_its_streams() -> None:
    tries = [SlotTry(one, one, others=1, stall_s=one) for one in (0.12, 0.13, 0.12, 0.12, 0.14)]
    controls = [SlotTry(one, one, others=1, stall_s=0.012) for one in QUICK]
    found = judge_recovery(tries, CALM, Bound(), controls=controls)
    assert found.failure is Failure.HARM


def test_a_stream_that_is_cut_as_another_leaves_is_harm() -> None:
    tries = [SlotTry(0.01, 0.01, others=1, cut="the connection was closed")]
    found = judge_recovery(tries, CALM, Bound(), controls=[SlotTry(0.01, 0.01, 1)])
    assert (found.failure, found.stops) == (Failure.HARM, True)
    assert "the connection was closed" in found.reason


def test_streams_that_are_cut_where_answers_end_by_themselves_too_are_no_harm_of_leaving() -> None:
    """A limit on the length of a request, say."""
    cut = SlotTry(0.01, 0.01, others=1, cut="the connection was closed")
    with pytest.raises(CannotDecideError, match="a limit of the server's, or of one before it"):
        judge_recovery([cut], CALM, Bound(), controls=[cut])


def test_a_verdict_by_seconds_names_its_figures() -> None:
    found = judge_holds(holds(QUICK, QUICK, way="admission"), 0.0016, Bound())
    assert (found.stops, found.steps, found.way) == (True, None, "admission")
    assert "within 33 ms in each of 5 tries" in found.reason
    late = judge_holds(holds(LONG, QUICK), 0.0016, Bound())
    assert late.evidence["false_alarm"] == pytest.approx(1 / 252, abs=1e-5)
    assert "320 ms at the median" in late.reason
    with pytest.raises(CannotDecideError, match="no control"):
        judge_holds(holds(QUICK, []), 0.0016, Bound())


def test_a_time_before_the_leave_is_within_one_step() -> None:
    """The probe's idle time is subtracted, so that a figure may come out below nothing."""
    tries = [SlotTry(-0.0007, 0.01, 0) for _ in range(3)]
    found = judge_recovery(tries, CALM, Bound(), controls=tries)
    assert "-" not in found.reason
    assert "within one step" in found.reason
    assert found.evidence["median_steps"] == found.evidence["median_ms"] == 0


def test_slots_that_change_hands_together_are_one_try() -> None:
    """Probes of one wave share a moment: a hundred probes of two waves are no hundred tries."""
    late = [SlotTry(0.3, 0.3, 30, wave=one % 2) for one in range(100)]
    quick = [SlotTry(0.03, 0.03, 3, wave=one % 2) for one in range(100)]
    with pytest.raises(CannotDecideError):
        judge_recovery(late, CALM._replace(lag_s=1.0), Bound(), controls=quick)


@pytest.mark.parametrize(("is_heavy", "failure"), [(False, Failure.HARM), (True, None)])
def test_what_a_request_costs_the_others_whether_it_leaves_or_not_is_no_harm_of_leaving(
    failure: Failure | None, *, is_heavy: bool
) -> None:
    """A grammar is compiled in each try: the streams that stay stand still for 0.4 s."""
    step_s = 0.02
    slots = SimpleNamespace(
        can_judge=lambda _: None,
        begin=lambda: None,
        hand_over=lambda *, alone: None,
        leave_before_probe=lambda *_: [SlotTry(0.41, 0.45, 20, stall_s=0.4)],
        controls=[SlotTry(0.01, 0.03, 1, stall_s=step_s)] * 8,
        natural_s=5.0,
        before=[step_s] * 12,
        resets=0,
    )
    streams = SimpleNamespace(
        step_s=step_s,
        lag_s=0.0,
        ttft_s=step_s,
        facts=SimpleNamespace(flush_tokens=1),
        patience=SimpleNamespace(longest_read=100),
        brief_tokens=100,
        long=lambda: RequestSpec(user=0, max_tokens=100, prompt_tokens=1),
        start=None,
        end=lambda: None,
    )
    wire = SimpleNamespace(begin_try=lambda _: None)
    recoveries = Recoveries(
        cast(Any, slots),
        cast(Any, SimpleNamespace(steps_at_rest=lambda _: [step_s] * 12)),
        cast(Any, streams),
        tries=8,
        wire=cast(Any, wire),
        occupancy=cast(Any, None),
    )
    bound = Bound(30.0, 30.0)
    found = recoveries.find(queues_first=False, is_alone=True, is_heavy=is_heavy, bound=bound)
    assert found.failure is failure, found.reason
