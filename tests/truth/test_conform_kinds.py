"""What the table of kinds calls wrong, and that its cases are cases."""

import pytest

from harness.conform.config import all_cases
from harness.store.conform_result import (
    Aftermath,
    CaseResult,
    ConformResult,
    ConformTarget,
    Failure,
    Level,
    Machine,
    Verdict,
)
from tools.truth.conform_kinds import HEADS, Cell, Seen, line, slow, wrong
from tools.truth.kinds import KINDS, QUICK, Defect, Kind, slot_server

DEFECT = Defect({"hold_s": 1.0}, ("a/red",), (Failure.LATE,), ("a/green",))
KIND = Kind("K", "of a test", slot_server, {}, (DEFECT,))


def seen(*cases: CaseResult) -> Seen:
    target = ConformTarget(engine="", url="", model="")
    machine = Machine(cpu="", cores=1, python="")
    result = ConformResult(
        walkaway="", started_at="", command="", seed=0, machine=machine, target=target
    )
    result.cases = list(cases)
    return Seen(1.0, result)


def case(name: str, verdict: Verdict, kind: Failure | None = None, reason: str = "") -> CaseResult:
    return CaseResult(
        id=name, level=Level.MUST, verdict=verdict, kind=kind, requirement="", reason=reason
    )


PASSES = [case(f"a/{number}", Verdict.PASS) for number in range(9)]
LATE = case("a/red", Verdict.FAIL, Failure.LATE)
GREEN = case("a/green", Verdict.PASS)


@pytest.mark.parametrize(
    ("cases", "problems"),
    [
        (PASSES, 0),
        ([*PASSES, case("a/10", Verdict.CANNOT_DECIDE)], 0),
        ([*PASSES[1:], case("a/10", Verdict.CANNOT_DECIDE)], 1),
        ([*PASSES, case("a/10", Verdict.FAIL, Failure.HARM)], 1),
        ([], 1),
        ([case("a/1", Verdict.PASS, reason="-0.07 steps at the median")], 1),
        ([case("a/1", Verdict.PASS, reason="metrics could not be read (ConnectError)")], 1),
    ],
)
def test_a_clean_server_is_wrong_if_red_undecided_or_said_badly(
    cases: list[CaseResult], problems: int
) -> None:
    assert len(wrong(Cell(KIND, 4, None), seen(*cases))) == problems


@pytest.mark.parametrize(
    ("cases", "problems"),
    [
        ([LATE, GREEN], 0),
        ([LATE, case("a/green", Verdict.FAIL, Failure.HARM)], 1),
        ([case("a/red", Verdict.FAIL, Failure.HARM), GREEN], 1),
        ([case("a/red", Verdict.PASS), GREEN], 1),
        ([case("a/red", Verdict.CANNOT_DECIDE), GREEN], 1),
        ([GREEN], 1),
        ([LATE], 1),
    ],
)
def test_a_defect_is_wrong_unless_red_for_its_reason(
    cases: list[CaseResult], problems: int
) -> None:
    assert len(wrong(Cell(KIND, 4, DEFECT), seen(*cases))) == problems


@pytest.mark.parametrize(("aftermath", "problems"), [(Aftermath.GHOSTS, 0), (Aftermath.WEDGED, 1)])
def test_a_server_that_only_runs_what_was_left_is_not_wedged(
    aftermath: Aftermath, problems: int
) -> None:
    red = case("a/red", Verdict.FAIL, Failure.LATE)
    red.aftermath = aftermath
    deaf = DEFECT._replace(settings={"forgets": True})
    assert len(wrong(Cell(KIND, 4, deaf), seen(red, GREEN))) == problems


def test_a_clean_server_is_wrong_if_an_asked_case_did_not_run() -> None:
    kind = KIND._replace(cases=("a/1", "a/else"))
    assert wrong(Cell(kind, 4, None), seen(*PASSES)) == ["a/else did not run: "]


@pytest.mark.parametrize(
    ("slots", "defect", "took_s", "told"),
    [
        (4, None, 61.0, ["quick"]),
        (4, None, 59.0, []),
        (64, None, 61.0, []),
        (8, DEFECT, 11.0, ["first red"]),
        (8, DEFECT, 9.0, []),
    ],
)
def test_what_takes_too_long_is_slow(
    slots: int, defect: Defect | None, took_s: float, told: list[str]
) -> None:
    cases = [LATE] if defect else PASSES
    assert slow(Cell(KIND, slots, defect), seen(*cases)._replace(took_s=took_s)) == told


def test_a_line_counts_what_is_not_judged_by_itself() -> None:
    cases = [GREEN, case("a/1", Verdict.NOT_SUPPORTED), case("a/2", Verdict.INFO)]
    cells = line(Cell(KIND, 4, None), seen(*cases), [], "today").strip("| ").split(" | ")
    told = dict(zip(HEADS, cells, strict=True))
    assert (told["pass"], told["not judged"], told["measured"]) == ("1", "2", "today")


def test_kinds_name_cases_that_there_are() -> None:
    known = {one.id for one in all_cases()} | set(QUICK)
    named = {one for kind in KINDS for one in kind.cases}
    named |= {one for kind in KINDS for defect in kind.defects for one in defect.red + defect.green}
    assert named <= known
