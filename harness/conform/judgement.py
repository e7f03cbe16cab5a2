"""How late a freed slot works for another request, judged from figures alone.

A server is late when the freed slot works for another request more than so many steps after the
client left, at the median of the tries, or more than three times as many in any of them. A step may
change meanwhile, with the context of the streams or the speed of the machine: late is late by the
steps before the leaves and by those after them, in time is in time by both. Two clocks
must agree: this client's, divided by the step, and the tokens that the other streams got meanwhile.
If only the first says late, then the whole machine was slow, and the case cannot decide.
"""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Final, NamedTuple, Self

from harness.conform.finding import Finding
from harness.experiments.full_slots import Try
from harness.experiments.outcome import CannotDecideError
from harness.formatting import quantity
from harness.store.conform_result import Failure

WORST: Final = 3  # times the bound of the median, which no try may exceed
WIDEST_STEP: Final = 3.0  # the p90 of the steps, over their median
MOST_LAG_STEPS: Final = 0.5


class Bound(NamedTuple):
    """At the median of the tries: typical `steps`, and the `tokens` that another stream gets in
    that time: fewer where a step computes a prompt, too."""

    steps: float = 4.0
    tokens: float = 4.0


AT_ONCE: Final = Bound()


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
