"""From what is known of a figure to a verdict on its limit.

pass: all of the range is within the limit. fail: none of it is. Anything else cannot be decided,
and that is never a pass.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from harness.gate.interval import Known, Unknown
from harness.gate.limits import Limit


class Verdict(StrEnum):
    """What the gate says."""

    PASS = "pass"
    FAIL = "fail"
    CANNOT_DECIDE = "cannot decide"


EXIT_CODES: Final = {Verdict.PASS: 0, Verdict.FAIL: 3, Verdict.CANNOT_DECIDE: 4}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was judged. `measured` and `reason` are in words; `to_decide` says of one that
    cannot be decided what would."""

    name: str
    verdict: Verdict
    measured: str = ""
    reason: str
    to_decide: str = ""


def check(limit: Limit, known: Known | Unknown) -> Check:
    """Judge one limit."""
    if isinstance(known, Unknown):
        return undecided(limit.text, known.reason, known.to_decide)
    holds = {limit.holds(known.low), limit.holds(known.high)}
    is_one_value = known.low == known.high
    is_inside = known.low < limit.number < known.high
    if holds == {True} and (limit.operator != "==" or is_one_value):
        return Check(
            name=limit.text, verdict=Verdict.PASS, measured=known.shown, reason="within the limit"
        )
    if holds == {False} and not is_inside:
        return Check(
            name=limit.text, verdict=Verdict.FAIL, measured=known.shown, reason="beyond the limit"
        )
    return Check(
        name=limit.text,
        verdict=Verdict.CANNOT_DECIDE,
        measured=known.shown,
        reason="the limit lies within what the true value can be",
        to_decide=known.to_decide,
    )


def undecided(name: str, reason: str, to_decide: str) -> Check:
    """Nothing was measured that could be held to the limit."""
    return Check(name=name, verdict=Verdict.CANNOT_DECIDE, reason=reason, to_decide=to_decide)


def overall(checks: Iterable[Check]) -> Verdict:
    """A fail wins, then what cannot be decided; nothing judged is no pass."""
    found = {one.verdict for one in checks}
    for verdict in (Verdict.FAIL, Verdict.CANNOT_DECIDE):
        if verdict in found:
            return verdict
    return Verdict.PASS if found else Verdict.CANNOT_DECIDE
