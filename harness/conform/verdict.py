"""Verdicts: of a case, of a run, and against the expected failures."""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from harness.conform.case import Case, no_such_case
from harness.conform.finding import Finding
from harness.errors import ConfigError, in_words
from harness.experiments.outcome import (
    CannotDecideError,
    HarnessError,
    RefusedError,
    TooQuickError,
)
from harness.records import Disconnect
from harness.store.conform_result import (
    Aftermath,
    CaseResult,
    ConformTarget,
    Failure,
    JudgingWay,
    Level,
    Verdict,
)

ENDED_REMEDY: Final = "find in the server's log what ended it when these clients left"
_NONE_HELD: Final = {Verdict.PASS: True, Verdict.FAIL: False}  # slots, by their count
# How a case is judged whose finding does not say so, by its first method.
_WAY_OF: Final[dict[str, JudgingWay]] = {
    "O": "occupancy",
    "B": "text",
    "R": "text",
    "W": "wire",
    "C": "counters",
}


def settle_case(
    case: Case, outcome: Finding | Exception, again: Finding | Exception | None = None
) -> CaseResult:
    """The result of a check that returned or raised. `again`: of the control or the second run that
    a red gets (harness/conform/turn.py): two reds make the fail."""
    result = CaseResult(
        id=case.id,
        level=case.level,
        verdict=Verdict.CANNOT_DECIDE,
        requirement=case.requirement,
        reason="",
        wire=case.wire,
        passes=case.passes,
        why=case.why,
        caught=case.caught,
        remedy=case.remedy,
    )
    match outcome:
        case Finding(failure, reason, evidence, is_judged, stops, steps, way):
            result.reason, result.evidence = reason, evidence
            result.stops, result.steps = stops, steps
            result.way = way or _WAY_OF.get(case.methods[:1])
            result.verdict = _verdict_on(failure, is_judged=is_judged)
            result.kind = failure
        case RefusedError():
            result.verdict, result.reason = Verdict.NOT_SUPPORTED, str(outcome)
        case TooQuickError():
            result.verdict, result.reason = Verdict.PASS, f"too quick to matter: {outcome}"
        case HarnessError():
            result.verdict, result.reason = Verdict.HARNESS, str(outcome)
        case CannotDecideError():
            result.reason = str(outcome)
        case Exception():
            result.verdict = Verdict.HARNESS
            result.reason = f"the check itself crashed: {type(outcome).__name__}: {outcome}"
    if again is not None and result.verdict is Verdict.FAIL:
        _confirm(result, again)
    if result.way == "occupancy" and result.stops is None:
        result.stops = _NONE_HELD.get(result.verdict)
    if case.level is Level.INFO and result.verdict in (Verdict.PASS, Verdict.FAIL):
        result.verdict, result.kind = Verdict.INFO, None
    return result


def _verdict_on(failure: Failure | None, *, is_judged: bool) -> Verdict:
    if not is_judged:
        return Verdict.INFO
    return Verdict.PASS if failure is None else Verdict.FAIL


def _confirm(result: CaseResult, again: Finding | Exception) -> None:
    """A second run without a red, or one in which something got in the way, leaves it undecided."""
    said = again.reason if isinstance(again, Finding) else str(again)
    if isinstance(again, Finding) and again.failure is not None:
        result.evidence = {**result.evidence, "second_run": f"{again.failure}: {said}"}
        return
    result.evidence = {**result.evidence, "second_run": said}
    result.reason = f"{result.kind} in a first run ({result.reason}), then: {said}"
    result.verdict, result.kind, result.stops = Verdict.CANNOT_DECIDE, None, None
    if isinstance(again, HarnessError):
        result.verdict = Verdict.HARNESS


def by_contract(red: Finding, contract: Disconnect, *, good: str, wrong: str | None) -> Finding:
    """The verdict on a server that declares `drain` or `resume`, from a red by time: what was left
    may run on to its end. `good`, `wrong`: what was seen after that."""
    if wrong is None and red.stops:
        return red._replace(failure=None)
    if wrong is None:
        said = f"as it declares (`{contract}`), answers run on when their clients have left"
        return Finding(None, f"{said}, and then {good}", red.evidence, way=red.way)
    said = f"it declares `{contract}`, but when the answers that were left must have ended"
    return Finding(Failure.NEVER, f"{said}, {wrong}", red.evidence, way=red.way)


def accuse(
    result: CaseResult, end: Aftermath, reason: str, *, before: CaseResult | None
) -> list[CaseResult]:
    """The results that change, since the server was found dead or wedged for good in or after this
    case. The case is accused if clients had left in it; else the latest case in which some did
    (`before`; None: nobody has left at all)."""
    result.aftermath = end
    if result.left:
        return [_blamed(result, f"after {_leaves(result)}: {reason}")]
    gone = "died" if end is Aftermath.DEAD else "stopped answering"
    result.verdict, result.kind = Verdict.CANNOT_DECIDE, None
    if before is None:
        result.reason = f"the server {gone} before any client had left: {reason}"
        return [result]
    result.reason = (
        f"the server {gone} between {before.id} and this case, in which nobody had left yet "
        f"({before.left_in_all} clients had left in all)"
    )
    between = f"the server {gone} between this case and {result.id}, after {_leaves(before)}"
    before.aftermath = end
    return [_blamed(before, between), result]


def _leaves(result: CaseResult) -> str:
    clients = "1 client" if result.left == 1 else f"{result.left} clients"
    return f"{clients} had left in this case and {result.left_in_all} in all"


def _blamed(result: CaseResult, reason: str) -> CaseResult:
    if result.verdict is not Verdict.FAIL:
        result.verdict, result.kind = Verdict.FAIL, Failure.HARM
        result.remedy = ENDED_REMEDY
    result.reason = f"{reason}; {result.reason}" if result.reason else reason
    return result


class Expectation(NamedTuple):
    """A line of the file of expected failures. `engine`, `version`: "" for any."""

    id: str
    engine: str
    version: str
    reason: str

    def holds_for(self, target: ConformTarget) -> bool:
        is_engine = self.engine in ("", target.engine)
        return is_engine and (target.version or "").startswith(self.version)


_LINE: Final = re.compile(r"(?P<id>\S+)\s+(?:\[(?P<where>[^\]]*)\]\s+)?(?P<reason>[^\s\[].*)")


def read_expectations(file: Path, known: Collection[str]) -> list[Expectation]:
    """Raises ConfigError for an unreadable file, an unknown id, and an entry without a reason."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--expected-failures {file}: cannot be read: {in_words(error)}"
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            found.append(_parse(text, f"{file}, line {number}", known))
    return found


def _parse(text: str, place: str, known: Collection[str]) -> Expectation:
    case_id = text.split()[0]
    if case_id not in known:
        raise ConfigError(f"{place}: {no_such_case(case_id, known)}")
    parts = _LINE.fullmatch(text)
    if parts is None:
        raise ConfigError(
            f"{place}: {case_id} has no reason; write `{case_id} [engine version] reason link`"
        )
    engine, _, version = (parts["where"] or "").partition(" ")
    return Expectation(case_id, engine, version.strip(), parts["reason"])


def hold_against(
    results: Iterable[CaseResult], expected: Iterable[Expectation], target: ConformTarget
) -> None:
    listed = {one.id for one in expected if one.holds_for(target)}
    for result in results:
        result.expected = None
        without_dialect = result.id if result.dialect is None else result.id.rpartition("/")[0]
        if listed & {result.id, without_dialect}:
            is_stale = result.verdict in (Verdict.PASS, Verdict.NOT_SUPPORTED)
            result.expected = "stale" if is_stale else "listed"


UNDECIDED: Final = (Verdict.CANNOT_DECIDE, Verdict.HARNESS)


def is_judged(result: CaseResult | Case, *, strict: bool) -> bool:
    return result.level is Level.MUST or (strict and result.level is Level.SHOULD)


def is_unexpected_failure(result: CaseResult, *, strict: bool) -> bool:
    is_red = result.verdict is Verdict.FAIL and is_judged(result, strict=strict)
    return is_red and result.expected != "listed"


def exit_code(results: Sequence[CaseResult], *, strict: bool, is_cut: bool = False) -> int:
    """3: an unexpected failure or a stale expectation; 4: else something judged is undecided.
    `is_cut`: the run ended before a case that is judged."""
    if any(is_unexpected_failure(one, strict=strict) or one.expected == "stale" for one in results):
        return 3
    undecided_ones = (one.verdict in UNDECIDED for one in results if is_judged(one, strict=strict))
    return 4 if is_cut or any(undecided_ones) else 0
