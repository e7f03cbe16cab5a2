"""How late a freed slot works for another request, judged from figures alone.

Two questions. Does the server stop: in seconds, against controls (harness/conform/stopping.py).
Within how many steps: a server is late when the freed slot works for another request more than some
steps after the client left, at the median of the tries, or more than three times as many in any of
them. A step may change meanwhile, with the context of the streams or the speed of the machine: a
verdict, late or in time, must hold by the steps before the leaves and by the steps after them. Two
clocks must agree: this client's, divided by the step, and the tokens that the other streams got
meanwhile. The second question stays open where steps cannot be counted; the first one then decides.
"""

from collections.abc import Sequence
from math import inf
from statistics import median, quantiles
from typing import Final, NamedTuple, Self

from harness.conform.finding import Evidence, Finding
from harness.conform.stopping import AT_MEDIAN, HARM_S, Stopping, judge_stalls, judge_stopping
from harness.experiments.full_slots import SlotTry
from harness.experiments.holds import Holds
from harness.experiments.outcome import CannotDecideError, HarnessError
from harness.formatting import quantity
from harness.store.conform_result import Failure, Steps

WORST: Final = 3  # times the bound of the median, which no try may exceed
WIDEST_STEP: Final = 3.0  # the p90 of the steps, over their median
MOST_LAG_STEPS: Final = 0.5
LEAST_STEP_S: Final = 1e-4  # shorter, and the tokens were there before


class Bound(NamedTuple):
    """Limits for the median of the tries: typical `steps`, and the `tokens` that another stream
    gets in that time, which are fewer where a step computes a prompt, too."""

    steps: float = 4.0
    tokens: float = 4.0


AT_ONCE: Final = Bound()


class CaseConditions(NamedTuple):
    """One case, in seconds: the steps just before the first leave and after the last.
    `flush_tokens`: tokens that come at once."""

    step_s: float
    step_p90_s: float
    step_after_s: float
    lag_s: float
    flush_tokens: float = 1.0

    @classmethod
    def of(
        cls,
        before: Sequence[float],
        after: Sequence[float],
        lag_s: float,
        flush_tokens: float = 1.0,
    ) -> Self:
        """`before`, `after`: the gaps between tokens."""
        p90_s = quantiles(before, n=10)[-1] if len(before) > 1 else before[0]
        return cls(median(before), p90_s, median(after), lag_s, flush_tokens)

    @property
    def floor_s(self) -> float:
        return self.lag_s

    @property
    def flush_s(self) -> float:
        return self.flush_tokens * self.step_s


class _Counted(NamedTuple):
    """The answer to the second question. `why_open`: why there is none; then `steps` and `failure`
    are None."""

    steps: Steps | None
    failure: Failure | None
    said: str
    why_open: CannotDecideError | None = None


def judge_recovery(
    tries: Sequence[SlotTry],
    now: CaseConditions,
    bound: Bound,
    *,
    controls: Sequence[SlotTry],
    natural_s: float | None = None,
) -> Finding:
    """Judges by full slots. Raises CannotDecideError where both questions are open."""
    holds = holds_of(tries, controls, now, natural_s)
    stopping = judge_stopping(holds, _harm_s(now, bound))
    tries = _less_controls(tries, controls)
    counted = _unless_usual(_count_steps(tries, now, bound), tries, controls, now, bound)
    evidence = _evidence(holds, stopping) | {
        "median_steps": None if counted.steps is None else counted.steps.p50,
        "worst_steps": None if counted.steps is None else counted.steps.worst,
        "bound_steps": bound.steps,
        "step_ms": round(1e3 * now.step_s, 3),
        "step_after_ms": round(1e3 * now.step_after_s, 3),
        "client_lag_ms": round(1e3 * now.lag_s, 3),
    }
    if now.flush_tokens > 1:
        evidence["flush_tokens"] = now.flush_tokens
        evidence["flush_ms"] = round(1e3 * now.flush_s, 1)
    return _settled(holds, stopping, counted, evidence, now)


def judge_holds(holds: Holds, step_s: float, bound: Bound) -> Finding:
    """Judges by a way that counts no steps. Raises CannotDecideError where the question is open."""
    stopping = judge_stopping(holds, bound.steps * step_s + HARM_S)
    floor = quantity(max(holds.floor_s, step_s), "s")
    counted = _open(f"nothing shorter than {floor} is seen this way")
    now = CaseConditions(step_s, step_s, step_s, 0.0)
    return _settled(holds, stopping, counted, _evidence(holds, stopping), now)


def holds_of(
    tries: Sequence[SlotTry],
    controls: Sequence[SlotTry],
    now: CaseConditions,
    natural_s: float | None = None,
) -> Holds:
    """Slots that change hands together are one try: the one that came last."""
    tries, controls = _last_of_waves(tries), _last_of_waves(controls)
    return Holds(
        way="full_slots",
        tries_s=[one.recovery_s for one in tries],
        controls_s=[one.waited_s if one.recovery_s is None else one.recovery_s for one in controls],
        floor_s=now.floor_s,
        waited_s=max((one.waited_s for one in tries if one.recovery_s is None), default=0.0),
        natural_s=natural_s,
        stalls_s=[one.stall_s for one in tries if one.stall_s is not None],
        control_stalls_s=[one.stall_s for one in controls if one.stall_s is not None],
        cuts=[one.cut for one in tries if one.cut is not None],
        control_cuts=[one.cut for one in controls if one.cut is not None],
    )


def _last_of_waves(tries: Sequence[SlotTry]) -> list[SlotTry]:
    last: dict[int, SlotTry] = {}
    for number, one in enumerate(tries):
        wave = -1 - number if one.wave is None else one.wave
        if wave not in last or _wait_of(one) > _wait_of(last[wave]):
            last[wave] = one
    return list(last.values())


def _less_controls(tries: Sequence[SlotTry], controls: Sequence[SlotTry]) -> list[SlotTry]:
    """The last of many probes at once wait for the prompts of the first, after leaves as after
    ends: what a control took for the probe of the same rank is not the leave's."""
    if all(one.rank == 0 for one in tries):
        return list(tries)
    usual_s: dict[int, list[float]] = {}
    for one in controls:
        if one.recovery_s is not None:
            usual_s.setdefault(one.rank, []).append(max(0.0, one.recovery_s))
    return [
        one
        if one.recovery_s is None or one.rank not in usual_s
        else one._replace(recovery_s=one.recovery_s - median(usual_s[one.rank]))
        for one in tries
    ]


def _unless_usual(
    counted: _Counted,
    tries: Sequence[SlotTry],
    controls: Sequence[SlotTry],
    now: CaseConditions,
    bound: Bound,
) -> _Counted:
    """The leave is not to blame for a slot that is late after an answer's own end, too: a server
    with full slots may have little room for a prompt in each step."""
    usual_s = [one.recovery_s for one in controls if one.recovery_s is not None and not one.rank]
    if counted.failure is None or counted.steps is None or not usual_s:
        return counted
    middle_s = median(usual_s)
    if middle_s <= bound.steps * now.step_s:
        return counted
    less = [
        one if one.recovery_s is None else one._replace(recovery_s=one.recovery_s - middle_s)
        for one in tries
    ]
    if _count_steps(less, now, bound).failure is not None:
        return counted
    return _open(
        f"{in_steps(counted.steps.p50)} at the median, and "
        f"{in_steps(round(middle_s / now.step_s, 2))} after answers that ended by themselves"
    )


def _wait_of(one: SlotTry) -> float:
    return inf if one.recovery_s is None else one.recovery_s


def _harm_s(now: CaseConditions, bound: Bound) -> float:
    return bound.steps * max(now.step_s, now.step_after_s) + HARM_S


def _settled(
    holds: Holds, stopping: Stopping, counted: _Counted, evidence: Evidence, now: CaseConditions
) -> Finding:
    def finding(failure: Failure | None, reason: str) -> Finding:
        return Finding(
            failure,
            reason,
            evidence,
            stops=stopping.stops,
            steps=counted.steps,
            way=holds.way,
            is_one_try=holds.is_one_try,
        )

    if holds.cuts and holds.control_cuts:
        raise CannotDecideError(
            f"a stream that stayed was cut as another one left ({holds.cuts[0]}), and one as an "
            f"answer ended by itself ({holds.control_cuts[0]}): a limit of the server's, or of "
            "one before it, may end long requests"
        )
    if (harm := judge_stalls(holds, now.step_s, now.flush_s)) is not None:
        return finding(Failure.HARM, harm)
    if stopping.stops is False:
        in_steps = "" if counted.steps is None else f" ({quantity(counted.steps.p50, 'steps')})"
        return finding(stopping.failure, stopping.said.replace(AT_MEDIAN, AT_MEDIAN + in_steps, 1))
    if counted.why_open is None:
        return finding(counted.failure, counted.said)
    if stopping.stops:
        return finding(None, f"{stopping.said}; {counted.why_open}")
    raise type(counted.why_open)(f"{stopping.said}; {counted.why_open}")


def _open(why: str) -> _Counted:
    return _Counted(None, None, "", CannotDecideError(why))


def _evidence(holds: Holds, stopping: Stopping) -> Evidence:
    came = [one for one in holds.tries_s if one is not None]
    evidence: Evidence = {
        "tries": len(holds.tries_s),
        "median_ms": _ms(median(came)) if came else None,
        "worst_ms": _ms(max(came)) if came else None,
        "controls": len(holds.controls_s),
        "control_median_ms": _ms(median(holds.controls_s)) if holds.controls_s else None,
        "control_worst_ms": _ms(max(holds.controls_s)) if holds.controls_s else None,
        "floor_ms": _ms(holds.floor_s),
    }
    if len(came) < len(holds.tries_s):
        evidence["never"] = len(holds.tries_s) - len(came)
    if stopping.false_alarm is not None:
        evidence["false_alarm"] = round(stopping.false_alarm, 5)
    if holds.stalls_s and holds.control_stalls_s:
        evidence["stall_ms"] = _ms(median(holds.stalls_s))
        evidence["control_stall_ms"] = _ms(max(holds.control_stalls_s))
    return evidence


def _ms(seconds: float) -> float:
    return round(1e3 * max(0.0, seconds), 2)


def _count_steps(tries: Sequence[SlotTry], now: CaseConditions, bound: Bound) -> _Counted:
    came_s = [one.recovery_s for one in tries if one.recovery_s is not None]
    if not came_s or len(came_s) < len(tries):
        return _open("a slot that does not come back has no steps to count")
    if (trouble := disturbance(now)) is not None:
        return _Counted(None, None, "", trouble)
    steps = Steps(*(round(max(0.0, one) / now.step_s, 2) for one in (median(came_s), max(came_s))))
    said = f"{in_steps(steps.p50)} at the median, {in_steps(steps.worst)} at worst"
    if steps.worst < 1:
        said = f"within one step in each of {len(tries)} tries"
    most = WORST * bound.steps
    by_either = [
        median(came_s) > bound.steps * step_s or max(came_s) > most * step_s
        for step_s in (now.step_s, now.step_after_s)
    ]
    if not any(by_either):
        return _Counted(steps, None, said)
    if not all(by_either):
        why = (
            f"{said}, of the step before the leaves ({quantity(now.step_s, 's')}) or after them "
            f"({quantity(now.step_after_s, 's')}): late by the one, in time by the other"
        )
        return _open(why)
    num_late = sum(one > most * now.step_s for one in came_s)
    if num_late == 1 < len(came_s) and median(came_s) <= bound.steps * now.step_s:
        return _open(f"{said}: one late try of {len(came_s)} may be the machine's")
    others = [one.others for one in tries if one.others is not None]
    if others and median(others) <= bound.tokens and max(others) <= WORST * bound.tokens:
        why = (
            f"{said}, but the streams that stayed got only {median(others):g} tokens in that time "
            f"({max(others)} at most), as on a machine that was slow"
        )
        return _open(why)
    said += f"; at most {bound.steps:g} steps at the median and {most:g} in each are allowed"
    return _Counted(steps, Failure.LATE, said)


def in_steps(steps: float) -> str:
    return "within one step" if steps < 1 else quantity(steps, "steps")


def disturbance(now: CaseConditions) -> CannotDecideError | None:
    """Why no steps of this case can be counted; None if they can."""
    if now.step_s < LEAST_STEP_S:
        return CannotDecideError("the streams show no step: their tokens come in one piece")
    step = quantity(now.step_s, "s")
    if now.lag_s > MOST_LAG_STEPS * now.step_s:
        return HarnessError(
            f"a step of {step} is too short to count steps here: this client is "
            f"{quantity(now.lag_s, 's')} late at the median"
        )
    if now.step_p90_s > WIDEST_STEP * now.step_s:
        return CannotDecideError(
            f"the steps are too uneven to count: {step} at the median, "
            f"{quantity(now.step_p90_s, 's')} at the 90th percentile"
        )
    return None
