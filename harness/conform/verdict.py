"""Verdicts, decided from figures alone: of a case, of a run, and against the expected failures.

A server is late when the freed slot works for another request more than so many steps after the
client left, at the median of the tries, or more than three times as many in any of them. A step may
change meanwhile, with the context of the streams or the speed of the machine: late is late by the
steps before the leaves and by those after them, in time is in time by both. Two clocks
must agree: this client's, divided by the step, and the tokens that the other streams got meanwhile.
If only the first says late, then the whole machine was slow, and the case cannot decide.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Final, NamedTuple, Self

from harness.conform.case import CannotDecideError, Case, Finding, RefusedError, no_such_case
from harness.errors import ConfigError, in_words
from harness.formatting import quantity
from harness.store.conform_result import (
    Aftermath,
    CaseResult,
    ConformTarget,
    Failure,
    Level,
    Verdict,
)

WORST: Final = 3  # times the bound of the median, which no try may exceed
WIDEST_STEP: Final = 3.0  # the p90 of the steps, over their median
MOST_LAG_STEPS: Final = 0.5


class Bound(NamedTuple):
    """At the median of the tries: typical `steps`, and the `tokens` that another stream gets in
    that time: fewer where a step computes a prompt, too."""

    steps: float = 4.0
    tokens: float = 4.0


AT_ONCE: Final = Bound()


class Try(NamedTuple):
    """One leave behind full slots. `recovery_s`: from t0 to the probe's first token, less the
    probe's time on an idle server and the client's lag; None: not within `waited_s`. `others`: the
    tokens that another stream got in that time, a measure in steps; None: there was no other."""

    recovery_s: float | None
    waited_s: float
    others: int | None


class Conditions(NamedTuple):
    """One case, in seconds: the steps just before the first leave and after the last."""

    step_s: float
    step_p90_s: float
    step_after_s: float
    lag_s: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float], lag_s: float) -> Self:
        """`before`, `after`: the gaps between tokens."""
        return cls(median(before), quantiles(before, n=10)[-1], median(after), lag_s)


def judge_recovery(tries: Sequence[Try], now: Conditions, bound: Bound) -> Finding:
    """Raises CannotDecideError."""
    came_s = [one.recovery_s for one in tries if one.recovery_s is not None]
    came = [recovery_s / now.step_s for recovery_s in came_s]
    most = WORST * bound.steps
    evidence: dict[str, float | str | None] = {
        "tries": len(tries),
        "median_steps": round(median(came), 2) if came else None,
        "worst_steps": round(max(came), 2) if came else None,
        "bound_steps": bound.steps,
        "step_ms": round(1e3 * now.step_s, 3),
        "step_after_ms": round(1e3 * now.step_after_s, 3),
        "client_lag_ms": round(1e3 * now.lag_s, 3),
    }
    missing = [one for one in tries if one.recovery_s is None]
    if missing:
        return _judge_never(missing, now, len(tries), evidence, WORST * bound.tokens)
    if (trouble := disturbance(now)) is not None:
        raise CannotDecideError(trouble)
    told = (
        f"{quantity(median(came), 'steps')} at the median, {quantity(max(came), 'steps')} at worst"
    )
    by_either = [
        median(came_s) > bound.steps * step_s or max(came_s) > most * step_s
        for step_s in (now.step_s, now.step_after_s)
    ]
    if not any(by_either):
        return Finding(None, told, evidence)
    if not all(by_either):
        raise CannotDecideError(
            f"{told}, of the step before the leaves ({quantity(now.step_s, 's')}) or after them "
            f"({quantity(now.step_after_s, 's')}): late by the one, in time by the other"
        )
    others = [one.others for one in tries if one.others is not None]
    if others and median(others) <= bound.tokens and max(others) <= WORST * bound.tokens:
        raise CannotDecideError(
            f"{told}, but the other streams got only {median(others):g} tokens in that time "
            f"({max(others)} at most): the machine was slow, not the server late"
        )
    return Finding(
        Failure.LATE, f"{told}; at most {bound.steps:g} and {most:g} were allowed", evidence
    )


def _judge_never(
    missing: Sequence[Try],
    now: Conditions,
    num_tries: int,
    evidence: dict[str, float | str | None],
    most_tokens: float,
) -> Finding:
    first = missing[0]
    if first.others is not None and first.others < most_tokens:
        raise CannotDecideError(
            f"no first token came in {quantity(first.waited_s, 's')}, but the other streams stood "
            f"still, too: they got {first.others} tokens"
        )
    evidence["never"] = len(missing)
    waited = f"{quantity(first.waited_s, 's')} ({first.waited_s / now.step_s:.0f} steps)"
    return Finding(
        Failure.NEVER,
        f"in {len(missing)} of {num_tries} tries the slot worked for no other request within "
        f"{waited} after the client left",
        evidence,
    )


def disturbance(now: Conditions) -> str | None:
    """Why no time of this case means anything; None if times do."""
    if now.lag_s > MOST_LAG_STEPS * now.step_s:
        return (
            f"this client is {quantity(now.lag_s, 's')} late at the median, more than half a step "
            f"of {quantity(now.step_s, 's')}: the machine is busy, or the step too short"
        )
    if now.step_p90_s > WIDEST_STEP * now.step_s:
        return (
            f"the steps are uneven: {quantity(now.step_s, 's')} at the median, "
            f"{quantity(now.step_p90_s, 's')} at the 90th percentile"
        )
    return None


def settle_case(
    case: Case, outcome: Finding | Exception, again: Finding | Exception | None = None
) -> CaseResult:
    """The result of a check that returned or raised. `again`: of the control or the second run that
    a red gets (harness/conform/__main__.py): two reds make the fail."""
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
    )
    match outcome:
        case Finding(failure, reason, evidence, is_judged):
            result.reason, result.evidence = reason, evidence
            result.verdict = Verdict.PASS if failure is None else Verdict.FAIL
            if not is_judged:
                result.verdict = Verdict.INFORMATIONAL
            result.kind = failure
        case RefusedError():
            result.verdict, result.reason = Verdict.NOT_SUPPORTED, str(outcome)
        case CannotDecideError():
            result.reason = str(outcome)
        case Exception():
            result.reason = f"the check itself crashed: {type(outcome).__name__}: {outcome}"
    if again is not None and result.verdict is Verdict.FAIL:
        _confirm(result, again)
    if case.level is Level.INFO and result.verdict in (Verdict.PASS, Verdict.FAIL):
        result.verdict, result.kind = Verdict.INFORMATIONAL, None
    return result


def _confirm(result: CaseResult, again: Finding | Exception) -> None:
    """A second run without a red, or one in which something got in the way, leaves it undecided."""
    told = again.reason if isinstance(again, Finding) else str(again)
    if isinstance(again, Finding) and again.failure is not None:
        result.evidence = {**result.evidence, "second_run": f"{again.failure}: {told}"}
        return
    result.evidence = {**result.evidence, "second_run": told}
    result.reason = f"{result.kind} in a first run ({result.reason}), then: {told}"
    result.verdict, result.kind = Verdict.CANNOT_DECIDE, None


def with_aftermath(result: CaseResult, aftermath: Aftermath, told: str) -> CaseResult:
    """A server that died fails the case before. Slots that are still held make it a wedged one for
    a while: that is the news of the case itself."""
    result.aftermath = aftermath
    if aftermath is not Aftermath.DEAD:
        return result
    if result.verdict is not Verdict.FAIL:
        result.verdict = Verdict.FAIL
        result.reason = f"{told}; {result.reason}" if result.reason else told
        result.kind = Failure.HARM
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
        if result.id in listed:
            is_stale = result.verdict in (Verdict.PASS, Verdict.NOT_SUPPORTED)
            result.expected = "stale" if is_stale else "listed"


def is_judged(result: CaseResult, *, strict: bool) -> bool:
    return result.level is Level.MUST or (strict and result.level is Level.SHOULD)


def is_unexpected_failure(result: CaseResult, *, strict: bool) -> bool:
    is_red = result.verdict is Verdict.FAIL and is_judged(result, strict=strict)
    return is_red and result.expected != "listed"


def exit_code(results: Sequence[CaseResult], *, strict: bool) -> int:
    """3: an unexpected failure or a stale expectation; 4: else something judged is undecided."""
    if any(is_unexpected_failure(one, strict=strict) or one.expected == "stale" for one in results):
        return 3
    undecided_ones = (
        one.verdict is Verdict.CANNOT_DECIDE for one in results if is_judged(one, strict=strict)
    )
    return 4 if any(undecided_ones) else 0
