"""Verdicts from figures: late, never, disturbed; a second run; expected failures; the exit code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.conform.case import Case
from harness.conform.finding import Finding
from harness.conform.judgement import Bound, CaseConditions, judge_recovery
from harness.conform.known import Known, hurried
from harness.conform.recoveries import by_first
from harness.conform.verdict import (
    Expectation,
    accuse,
    by_contract,
    exit_code,
    hold_against,
    read_expectations,
    settle_case,
)
from harness.errors import ConfigError
from harness.experiments.full_slots import READ_TOKENS, SlotTry
from harness.experiments.outcome import (
    CannotDecideError,
    HarnessError,
    RefusedError,
    TooQuickError,
)
from harness.experiments.patience import Patience
from harness.records import Outcome, RequestRow
from harness.store.conform_result import (
    Aftermath,
    CaseResult,
    ConformTarget,
    Failure,
    JudgingWay,
    Level,
    Verdict,
)
from tests.made_up.rows import request_row

STEP_S = 0.01
CALM = CaseConditions(step_s=STEP_S, step_p90_s=STEP_S, step_after_s=STEP_S, lag_s=0.0)
GOOD = Finding(None, "good", {})
LATE = Finding(Failure.LATE, "late", {})
NEVER = Finding(Failure.NEVER, "never", {})
KNOWN = ("stream/fin-decode", "queue/leave")
TARGET = ConformTarget(engine="vllm", url="http://127.0.0.1:1", model="m", version="0.32.1")


def tried(*steps: float, others: int | None = None) -> list[SlotTry]:
    """`others`: the tokens of another stream; None: as many as steps."""
    return [
        SlotTry(one * STEP_S, one * STEP_S, round(one) if others is None else others)
        for one in steps
    ]


CONTROLS = tried(*[1] * 5)


def a_case(level: Level = Level.MUST) -> Case:
    rest: dict[str, Any] = {"wire": "w", "passes": "p", "methods": "P", "why": "", "limit_s": 1.0}
    return Case(
        id="stream/fin-decode",
        level=level,
        requirement="r",
        check=lambda _bench: GOOD,
        needs=frozenset(),
        quick=False,
        caught=(),
        **rest,
    )


def result(verdict: Verdict, level: Level = Level.MUST, expected: Any = None) -> CaseResult:
    return CaseResult(
        id=KNOWN[0], level=level, verdict=verdict, requirement="", reason="", expected=expected
    )


def test_one_late_try_of_some_is_no_proof() -> None:
    found = judge_recovery(tried(1, 1, 1, 17), CALM, Bound(), controls=CONTROLS, natural_s=9.0)
    assert found.failure is None
    assert found.stops
    assert "one late try of 4 may be the machine's" in found.reason


@pytest.mark.parametrize(
    ("steps", "failure"),
    [
        ((1, 2, 4), None),
        ((4, 4, 4), None),
        ((5, 5, 1), Failure.LATE),
        ((1, 1, 12), None),
        ((1, 1, 1, 13, 13), Failure.LATE),
    ],
)
def test_the_median_and_the_worst_have_bounds(
    steps: tuple[int, ...], failure: Failure | None
) -> None:
    found = judge_recovery(tried(*steps), CALM, Bound(), controls=CONTROLS)
    assert found.failure is failure
    assert found.stops
    assert found.steps is not None
    assert found.steps.worst == found.evidence["worst_steps"] == max(steps)
    allowed = "at most 4 steps at the median and 12 in each are allowed"
    assert (allowed in found.reason) == (failure is not None)


def test_steps_that_a_slot_takes_after_an_end_too_are_not_the_leaves() -> None:
    """A server whose steps have room for 255 streams and one token of a prompt."""
    found = judge_recovery(tried(24, 25, 24), CALM, Bound(), controls=tried(24))
    assert (found.failure, found.stops, found.steps) == (None, True, None)
    assert "24 steps at the median, and 24 steps after answers that ended" in found.reason
    late = judge_recovery(tried(34, 35, 34), CALM, Bound(), controls=tried(24, 24, 24))
    assert late.failure is Failure.LATE


def test_a_time_that_only_the_clock_calls_late_leaves_the_steps_open() -> None:
    found = judge_recovery(tried(9, 9, 9, others=2), CALM, Bound(), controls=CONTROLS)
    assert (found.failure, found.stops, found.steps) == (None, True, None)
    assert "a machine that was slow" in found.reason


def test_where_steps_compute_a_prompt_another_stream_gets_fewer_tokens() -> None:
    bound = Bound(steps=40, tokens=6)
    late = judge_recovery(tried(50, 50, 50, others=7), CALM, bound, controls=CONTROLS)
    assert late.failure is Failure.LATE


def test_a_probe_that_is_never_served_though_the_controls_were_is_a_red() -> None:
    for others in (190, 3):  # the streams that stayed got tokens, or stood still, too
        missing = [*tried(1), SlotTry(None, 2.0, others)]
        found = judge_recovery(missing, CALM, Bound(), controls=CONTROLS)
        assert (found.failure, found.stops) == (Failure.NEVER, False)
        assert "1 of 2 tries" in found.reason
    with pytest.raises(CannotDecideError, match="another load"):
        judge_recovery([SlotTry(None, 2.0, 190)], CALM, Bound(), controls=tried(150))
    with pytest.raises(CannotDecideError, match="no control"):
        judge_recovery([SlotTry(None, 2.0, 190)], CALM, Bound(), controls=[])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"lag_s": 0.006}, "this client is"),
        ({"step_p90_s": 0.031}, "uneven"),
        ({"step_s": 1.6e-5}, "one piece"),
        ({"step_s": 0.0, "step_p90_s": 0.0, "step_after_s": 0.0}, "one piece"),
    ],
)
def test_where_steps_cannot_be_counted_seconds_decide(changed: dict[str, float], why: str) -> None:
    now = CALM._replace(**changed)
    good = judge_recovery(tried(1, 9, 1), now, Bound(), controls=CONTROLS)
    assert (good.failure, good.stops, good.steps) == (None, True, None)
    assert why in good.reason
    late = judge_recovery(tried(*[90] * 5), now, Bound(), controls=tried(*[1] * 5))
    assert (late.failure, late.stops) == (Failure.LATE, False)


@pytest.mark.parametrize(
    ("steps", "after_s", "wanted"),
    [
        (3, 0.02, None),
        (3, 0.005, "late by the one"),
        (9, 0.02, Failure.LATE),
        (6, 0.02, "late by the one"),
        (9, 0.005, Failure.LATE),
    ],
)
def test_steps_are_judged_by_those_before_and_after(
    steps: float, after_s: float, wanted: Failure | str | None
) -> None:
    now = CALM._replace(step_after_s=after_s)
    found = judge_recovery(tried(steps, steps), now, Bound(), controls=CONTROLS)
    if isinstance(wanted, str) and not isinstance(wanted, Failure):
        assert found.failure is None
        assert found.steps is None
        assert wanted in found.reason
    else:
        assert found.failure is wanted


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (LATE, LATE, Verdict.FAIL),
        (LATE, GOOD, Verdict.CANNOT_DECIDE),
        (LATE, CannotDecideError("busy"), Verdict.CANNOT_DECIDE),
        (NEVER, GOOD, Verdict.CANNOT_DECIDE),
        (NEVER, CannotDecideError("the slots do not fill"), Verdict.CANNOT_DECIDE),
        (NEVER, NEVER, Verdict.FAIL),
        (GOOD, None, Verdict.PASS),
        (RefusedError("404"), None, Verdict.NOT_SUPPORTED),
        (ValueError("oops"), None, Verdict.HARNESS),
        (HarnessError("this client is late"), None, Verdict.HARNESS),
        (LATE, HarnessError("this client is late"), Verdict.HARNESS),
        (TooQuickError("22 ms"), None, Verdict.PASS),
    ],
)
def test_two_reds_make_a_fail(first: Any, second: Any, verdict: Verdict) -> None:
    assert settle_case(a_case(), first, second).verdict is verdict


def test_a_case_that_informs_is_never_judged() -> None:
    assert settle_case(a_case(Level.INFO), LATE, LATE).verdict is Verdict.INFO


def leaving(name: str, left: int, in_all: int) -> CaseResult:
    found = result(Verdict.PASS)
    found.id, found.left, found.left_in_all, found.reason = name, left, in_all, "as it was"
    return found


def test_a_death_is_laid_at_the_case_in_which_clients_had_left() -> None:
    (dead,) = accuse(
        leaving("storm/all", 16, 40),
        Aftermath.DEAD,
        "nothing listens",
        before=leaving("unary/leave", 5, 24),
    )
    assert (dead.verdict, dead.kind, dead.aftermath) == (Verdict.FAIL, Failure.HARM, "dead")
    assert dead.reason == (
        "after 16 clients had left in this case and 40 in all: nothing listens; as it was"
    )
    assert dead.ended_server


def test_where_nobody_had_left_the_case_before_is_accused() -> None:
    before, after = accuse(
        leaving("queue/leave", 0, 24),
        Aftermath.WEDGED,
        "no answer",
        before=leaving("unary/leave", 1, 24),
    )
    assert (before.id, before.verdict, before.kind) == (
        "unary/leave",
        Verdict.FAIL,
        Failure.HARM,
    )
    assert before.reason.startswith(
        "the server stopped answering between this case and queue/leave, after 1 client had left "
        "in this case and 24 in all"
    )
    assert (after.id, after.verdict, after.kind) == ("queue/leave", Verdict.CANNOT_DECIDE, None)
    assert "between unary/leave and this case, in which nobody had left yet" in after.reason
    (alone,) = accuse(leaving("queue/leave", 0, 0), Aftermath.DEAD, "nothing listens", before=None)
    assert alone.verdict is Verdict.CANNOT_DECIDE
    assert alone.reason == "the server died before any client had left: nothing listens"


@pytest.mark.parametrize(("wrong", "failure"), [(None, None), ("1 slot is held", Failure.NEVER)])
def test_a_server_that_declares_to_drain_must_hold_nothing_then(
    wrong: str | None, failure: Failure | None
) -> None:
    held = by_contract(NEVER, "drain", good="all is free", wrong=wrong)
    assert held.failure is failure
    assert "`drain`" in held.reason
    assert (wrong or "all is free") in held.reason


@pytest.mark.parametrize(("lag_s", "verdict"), [(0.006, "harness"), (0.005, "cannot_decide")])
def test_what_a_late_client_left_open_is_no_word_about_the_server(
    lag_s: float, verdict: str
) -> None:
    now = CALM._replace(lag_s=lag_s, step_p90_s=0.04)
    with pytest.raises(CannotDecideError, match=r"too uneven to say .* median") as opened:
        judge_recovery(tried(1, 90, 90), now, Bound(), controls=CONTROLS[:1])
    assert settle_case(a_case(), opened.value).verdict == verdict

    def look() -> Finding:
        raise opened.value

    ways: list[tuple[JudgingWay, str | None, Callable[[], Finding]]] = [
        ("full_slots", None, look),
        ("gauge", "no page shows it", look),
    ]
    with pytest.raises(type(opened.value), match="by gauge: no page shows it"):
        by_first(ways, give_up=lambda: None)
    assert by_first([*ways, ("quiet", None, lambda: GOOD)], give_up=lambda: None) is GOOD


def a_row(left_ns: int | None = None, heard_ns: int | None = None) -> RequestRow:
    outcome = Outcome.COMPLETED if left_ns is None else Outcome.ABANDONED
    return request_row(
        "r",
        sent_ns=1,
        ended_ns=heard_ns or left_ns or 1,
        outcome=outcome,
        abandoned_ns=left_ns,
        last_token_ns=heard_ns,
    )


def test_leaves_count_as_long_as_the_server_answers() -> None:
    """Clients that give up on a server that has fallen silent are not the cause."""
    known = Known(left=10)
    known.note(a_row(left_ns=100, heard_ns=90))
    known.note(a_row(left_ns=500))
    assert known.left_here(50) == 1
    known.note(a_row(heard_ns=460))
    assert known.left_here(50) == 2
    known.begin_case()
    assert known.left == 12
    assert known.left_here(50) == 0


def test_a_server_that_never_stops_is_waited_for_a_shorter_time() -> None:
    usual = Patience.of(2.0, None, step_s=0.02, begin_s=0.2, most_tokens=4000)
    short = hurried(usual, step_s=0.02, begin_s=0.2, ttft_s=0.0)
    assert short.probe_s == pytest.approx(0.6)
    assert short.answer_tokens * 0.02 > 2 * short.probe_s
    assert short.outlives < usual.outlives
    assert min(READ_TOKENS) <= short.longest_read < max(READ_TOKENS) <= usual.longest_read
    slow = Patience.of(2.0, None, step_s=0.5, begin_s=0.2, most_tokens=4000)
    assert hurried(slow, step_s=0.5, begin_s=0.2, ttft_s=0.0) == slow


@pytest.mark.parametrize(
    ("results", "strict", "code"),
    [
        ([result(Verdict.PASS), result(Verdict.NOT_SUPPORTED)], False, 0),
        ([result(Verdict.FAIL), result(Verdict.CANNOT_DECIDE)], False, 3),
        ([result(Verdict.FAIL, expected="listed")], False, 0),
        ([result(Verdict.PASS, expected="stale")], False, 3),
        ([result(Verdict.CANNOT_DECIDE, expected="listed")], False, 4),
        ([result(Verdict.PASS), result(Verdict.HARNESS)], False, 4),
        ([result(Verdict.FAIL), result(Verdict.HARNESS)], False, 3),
        ([result(Verdict.FAIL, Level.SHOULD)], False, 0),
        ([result(Verdict.FAIL, Level.SHOULD)], True, 3),
        ([result(Verdict.CANNOT_DECIDE, Level.SHOULD)], False, 0),
        ([result(Verdict.CANNOT_DECIDE, Level.SHOULD)], True, 4),
        ([result(Verdict.CANNOT_DECIDE, Level.INFO)], True, 0),
    ],
)
def test_the_exit_code(results: list[CaseResult], strict: bool, code: int) -> None:
    assert exit_code(results, strict=strict) == code


def test_a_run_that_was_cut_short_has_not_decided_what_is_missing() -> None:
    assert exit_code([result(Verdict.PASS)], strict=False, is_cut=True) == 4
    assert exit_code([result(Verdict.FAIL)], strict=False, is_cut=True) == 3


def test_expected_failures_are_of_an_engine_and_a_version(tmp_path: Path) -> None:
    file = tmp_path / "expected"
    file.write_text("# known\n\nqueue/leave [vllm 0.32] computed first https://x.test/1\n")
    (entry,) = read_expectations(file, KNOWN)
    assert entry == Expectation("queue/leave", "vllm", "0.32", "computed first https://x.test/1")
    failed, passed = result(Verdict.FAIL), result(Verdict.PASS)
    failed.id = passed.id = "queue/leave"
    hold_against([failed, passed], [entry], TARGET)
    assert (failed.expected, passed.expected) == ("listed", "stale")
    for engine, version in (("sglang", ""), ("vllm", "0.4")):
        hold_against([failed], [entry._replace(engine=engine, version=version)], TARGET)
        assert failed.expected is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("queue/leav known", "line 1: there is no case 'queue/leav'; the nearest is queue/leave"),
        ("queue/leave", "queue/leave has no reason"),
        ("queue/leave [vllm]", "queue/leave has no reason"),
    ],
)
def test_a_bad_line_of_expected_failures(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "expected"
    file.write_text(line)
    with pytest.raises(ConfigError, match=why):
        read_expectations(file, KNOWN)
