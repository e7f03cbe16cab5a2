"""Verdicts from figures: late, never, disturbed; a second run; expected failures; the exit code."""

from pathlib import Path
from typing import Any

import pytest

from harness.conform.case import Case
from harness.conform.finding import Finding
from harness.conform.judgement import Bound, Conditions, judge_recovery
from harness.conform.verdict import (
    Expectation,
    exit_code,
    hold_against,
    read_expectations,
    settle_case,
    with_aftermath,
)
from harness.errors import ConfigError
from harness.experiments.full_slots import Try
from harness.experiments.outcome import (
    CannotDecideError,
    HarnessError,
    RefusedError,
    TooQuickError,
)
from harness.store.conform_result import (
    Aftermath,
    CaseResult,
    ConformTarget,
    Failure,
    Level,
    Verdict,
)

STEP_S = 0.01
CALM = Conditions(step_s=STEP_S, step_p90_s=STEP_S, step_after_s=STEP_S, lag_s=0.0)
GOOD = Finding(None, "good", {})
LATE = Finding(Failure.LATE, "late", {})
NEVER = Finding(Failure.NEVER, "never", {})
KNOWN = ("stream/fin-decode", "queue/leave")
TARGET = ConformTarget(engine="vllm", url="http://127.0.0.1:1", model="m", version="0.32.1")


def tried(*steps: float, others: int | None = None) -> list[Try]:
    """`others`: the tokens of another stream; as many as steps, if not told."""
    return [
        Try(one * STEP_S, one * STEP_S, round(one) if others is None else others) for one in steps
    ]


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


@pytest.mark.parametrize(
    ("steps", "failure"),
    [
        ((1, 2, 4), None),
        ((4, 4, 4), None),
        ((5, 5, 1), Failure.LATE),
        ((1, 1, 12), None),
        ((1, 1, 13), Failure.LATE),
    ],
)
def test_the_median_and_the_worst_have_bounds(
    steps: tuple[int, ...], failure: Failure | None
) -> None:
    found = judge_recovery(tried(*steps), CALM, Bound())
    assert found.failure is failure
    assert found.evidence["worst_steps"] == max(steps)


def test_a_time_that_only_the_clock_calls_late_decides_nothing() -> None:
    with pytest.raises(CannotDecideError, match="the machine was slow"):
        judge_recovery(tried(9, 9, 9, others=2), CALM, Bound())


def test_where_steps_compute_a_prompt_another_stream_gets_fewer_tokens() -> None:
    bound = Bound(steps=40, tokens=6)
    assert judge_recovery(tried(50, 50, 50, others=7), CALM, bound).failure is Failure.LATE
    assert judge_recovery([Try(None, 2.0, 30)], CALM, bound).failure is Failure.NEVER


def test_a_probe_that_is_never_served_is_a_red_unless_all_stood_still() -> None:
    missing = [*tried(1), Try(None, 2.0, 190)]
    found = judge_recovery(missing, CALM, Bound())
    assert found.failure is Failure.NEVER
    assert "200 steps" in found.reason
    with pytest.raises(CannotDecideError, match="stood still"):
        judge_recovery([Try(None, 2.0, 3)], CALM, Bound())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"lag_s": 0.006}, "this client is"),
        ({"step_p90_s": 0.031}, "uneven"),
    ],
)
def test_a_disturbed_machine_decides_nothing(changed: dict[str, float], why: str) -> None:
    for steps in (1, 9):
        with pytest.raises(CannotDecideError, match=why):
            judge_recovery(tried(steps, steps), CALM._replace(**changed), Bound())


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
def test_a_verdict_holds_by_the_steps_before_and_after(
    steps: float, after_s: float, wanted: Failure | str | None
) -> None:
    now = CALM._replace(step_after_s=after_s)
    if isinstance(wanted, str) and not isinstance(wanted, Failure):
        with pytest.raises(CannotDecideError, match=wanted):
            judge_recovery(tried(steps, steps), now, Bound())
    else:
        assert judge_recovery(tried(steps, steps), now, Bound()).failure is wanted


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


def test_a_death_fails_the_case_before() -> None:
    passed = settle_case(a_case(), GOOD)
    assert with_aftermath(passed, Aftermath.WEDGED, "").verdict is Verdict.PASS
    dead = with_aftermath(passed, Aftermath.DEAD, "no server listens")
    assert (dead.verdict, dead.kind) == (Verdict.FAIL, Failure.HARM)
    assert dead.reason.startswith("no server listens")


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
