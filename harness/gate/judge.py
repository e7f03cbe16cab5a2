"""Judge a run: can it be judged at all, and does it keep each limit?

pass: the whole range in which the true value lies is within the limit. fail: none of it is.
Otherwise the gate cannot decide, and that is never a pass.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from harness.analysis.plan_failure import without_advice
from harness.compare.comparable import (
    Conditions,
    depends_on_machine,
    machine_in_words,
    other_machine,
    why_not_conditions,
    why_not_figures,
)
from harness.compare.pairs import FEWEST_ROUNDS, compare_rounds
from harness.formatting import number, quantity
from harness.gate.interval import Range, figure_range
from harness.gate.limits import BASELINE, Limit
from harness.metrics import METRICS
from harness.records import Metric

_MORE_ROUNDS: Final = f"at least {FEWEST_ROUNDS} rounds of both (`[[arms]]` and `run.rounds`)"
_THE_RUN: Final = "the run"
_MENDED: Final = "a new run, once the cause named here is gone"


class GateSide(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run, or of one of its arms.

    `per_round`: {metric: {figure: a value a round}}; a run without arms is one round.
    `token_counting`: None if the summary does not say.
    """

    conditions: Conditions
    metrics: dict[str, Metric]
    not_measurable: dict[str, str]
    per_round: dict[str, dict[str, list[float | None]]]
    abandoned: int
    token_counting: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A run as the gate reads it. `invalid`: the reasons why its figures mean nothing.
    `conditions`: of the first server; each side has its own. `simulated`: by what, in
    words."""

    run_id: str
    created_at: str
    status: str
    is_silent: bool
    invalid: list[str]
    conditions: Conditions
    sides: dict[str, GateSide]
    simulated: str | None = None


def num_rounds(side: GateSide) -> int:
    return max((len(values) for of in side.per_round.values() for values in of.values()), default=0)


class GateVerdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    CANNOT_DECIDE = "cannot decide"


EXIT_CODES: Final = {GateVerdict.PASS: 0, GateVerdict.FAIL: 3, GateVerdict.CANNOT_DECIDE: 4}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """`measured` and `reason` are in words; `to_decide` says what would decide an undecided one."""

    name: str
    verdict: GateVerdict
    measured: str = ""
    reason: str
    to_decide: str = ""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """`left_out`: figures not compared with the baseline: times of another machine."""

    run: str
    workload: str | None
    verdict: GateVerdict
    checks: list[Check]
    baseline: str | None = None
    left_out: list[str] = []
    simulated: str | None = None

    @property
    def question(self) -> str:
        return ", ".join(filter(None, (self.workload or "run", self.simulated)))


def judge(
    measured: Measured,
    limits: Iterable[Limit],
    *,
    run: str,
    fewest_abandons: int,
    baseline: Measured | None = None,
    left_out: Sequence[str] = (),
) -> Judgement:
    of_limits = (_judge_limit(limit, measured, baseline) for limit in limits)
    checks = [_check_run(measured), *of_limits, *_too_few(measured, fewest_abandons)]
    return Judgement(
        run=run,
        workload=measured.conditions.workload,
        verdict=overall(checks),
        checks=checks,
        baseline=None if baseline is None else baseline.run_id,
        left_out=list(left_out),
        simulated=measured.simulated,
    )


def breaks(measured: Measured, limit: Limit) -> bool:
    """Whether the gate fails the run by this limit on a figure."""
    return _judge_limit(limit, measured, None).verdict is GateVerdict.FAIL


def refuse(run: str, reason: str, to_decide: str) -> Judgement:
    checks = [_undecided(_THE_RUN, reason, to_decide)]
    return Judgement(run=run, workload=None, verdict=overall(checks), checks=checks)


def overall(checks: Iterable[Check]) -> GateVerdict:
    found = {one.verdict for one in checks}
    for verdict in (GateVerdict.FAIL, GateVerdict.CANNOT_DECIDE):
        if verdict in found:
            return verdict
    return GateVerdict.PASS if found else GateVerdict.CANNOT_DECIDE


def _undecided(name: str, reason: str, to_decide: str) -> Check:
    return Check(name=name, verdict=GateVerdict.CANNOT_DECIDE, reason=reason, to_decide=to_decide)


def _judge_limit(limit: Limit, measured: Measured, baseline: Measured | None) -> Check:
    check = _check_limit(limit, _range(limit, measured, baseline))
    return _only_if_sound(check, limit, measured)


def _check_limit(limit: Limit, found: Range) -> Check:
    holds = {limit.holds(found.low), limit.holds(found.high)}
    verdict, reason = GateVerdict.CANNOT_DECIDE, found.reason
    if holds == {True} and (limit.operator != "==" or found.low == found.high):
        verdict, reason = GateVerdict.PASS, "within the limit"
    elif holds == {False} and not found.low < limit.number < found.high:
        verdict, reason = GateVerdict.FAIL, "beyond the limit"
    to_decide = found.to_decide if verdict is GateVerdict.CANNOT_DECIDE else ""
    return Check(
        name=limit.text, verdict=verdict, measured=found.shown, reason=reason, to_decide=to_decide
    )


def _check_run(measured: Measured) -> Check:
    if measured.is_silent:
        reason = "after the load the server answered no request"
        return Check(name=_THE_RUN, verdict=GateVerdict.FAIL, reason=reason)
    if measured.invalid:
        parts = [without_advice(one) for one in measured.invalid]
        advice = "; ".join(advice for _, advice in parts if advice)
        return _undecided(_THE_RUN, "; ".join(why for why, _ in parts), advice or _MENDED)
    if measured.status != "complete":
        what = measured.status.replace("_", " ")
        return _undecided(_THE_RUN, f"it ended early: {what}", "a run that is complete")
    return Check(
        name=_THE_RUN, verdict=GateVerdict.PASS, reason="complete, and its figures are valid"
    )


def _only_if_sound(check: Check, limit: Limit, measured: Measured) -> Check:
    """A run that broke off can fail but not pass. An invalid run can fail only by a metric that no
    client can cause, however slow."""
    is_sound = measured.status == "complete" and not measured.invalid
    is_certain = not measured.invalid or METRICS[limit.metric].from_server_alone
    is_kept = is_sound or (check.verdict is GateVerdict.FAIL and is_certain)
    if is_kept or check.verdict is GateVerdict.CANNOT_DECIDE:
        return check
    return msgspec.structs.replace(
        check,
        verdict=GateVerdict.CANNOT_DECIDE,
        reason="the run is not one to judge by",
        to_decide="a run that is complete and valid",
    )


def _too_few(measured: Measured, fewest: int) -> Iterator[Check]:
    for name, side in measured.sides.items():
        if side.abandoned < fewest:
            of = "" if len(measured.sides) == 1 else f" in arm {name}"
            was = "was" if side.abandoned == 1 else "were"
            yield _undecided(
                f"abandons{of} >= {fewest}",
                f"only {quantity(side.abandoned, 'requests')} {was} abandoned{of}",
                f"{fewest - side.abandoned:,} more (or a lower `gate.min_abandons`)",
            )


def _range(limit: Limit, measured: Measured, baseline: Measured | None) -> Range:
    mine = measured.sides[limit.arm]
    metric = mine.metrics.get(limit.metric)
    if metric is None:
        return _missing(limit, mine, "a run that can measure it")
    if limit.against is None:
        return figure_range(limit, metric, _rounds(mine, limit))
    if limit.against != BASELINE:
        other = measured.sides[limit.against]
        return _why_unlike(limit, mine, other) or _of_rounds(limit, mine, other)
    if baseline is None:
        return Range(reason="there is no baseline", to_decide="one, by --save-baseline")
    before = baseline.sides.get(limit.arm)
    if before is None:
        reason = f"the baseline has no arm {limit.arm}"
        return Range(reason=reason, to_decide="a baseline that has it")
    return _why_not_since(limit, mine, before) or _of_rounds(limit, mine, before)


def _why_not_since(limit: Limit, mine: GateSide, before: GateSide) -> Range | None:
    if why := why_not_conditions(mine.conditions, before.conditions):
        return Range(reason=f"not comparable: {why}", to_decide="a baseline of the same")
    if unlike := _why_unlike(limit, mine, before):
        return unlike
    machine = other_machine(mine.conditions, before.conditions)
    if machine is None or not depends_on_machine(METRICS[limit.metric].unit):
        return None
    return Range(
        reason=f"a time on another machine than the baseline's ({machine})",
        to_decide="a run on that machine, or a baseline from this one "
        f"({machine_in_words(mine.conditions)})",
    )


def _why_unlike(limit: Limit, mine: GateSide, other: GateSide) -> Range | None:
    metric, theirs = mine.metrics[limit.metric], other.metrics.get(limit.metric)
    if theirs is None:
        return _missing(limit, other, "two that can measure it", of=f"{limit.against}: ")
    counting = mine.token_counting, other.token_counting
    why = why_not_figures(limit.metric, metric, theirs, counting)
    if why is None:
        return None
    return Range(
        reason=f"not comparable: {why} ({limit.arm}, {limit.against})",
        to_decide="a figure that both have in one way",
    )


def _of_rounds(limit: Limit, mine: GateSide, other: GateSide) -> Range:
    rounds = _rounds(mine, limit), _rounds(other, limit)
    is_paired, is_ratio = limit.against != BASELINE, limit.relation == "/"
    one = compare_rounds(limit.arm, str(limit.against), *rounds, paired=is_paired)
    num_rounds = f"{one.n} rounds" if is_paired else f"{one.n} rounds or more of both"
    if is_ratio and one.n >= FEWEST_ROUNDS and not any(rounds[0]) and not any(rounds[1]):
        return Range(low=1.0, high=1.0, shown=f"both 0 in {num_rounds}", to_decide="")
    value, limits = one.difference, one.difference_ci95
    if is_ratio:
        value, limits = one.ratio, one.ratio_ci95
    if value is None or limits is None:
        instead = f"a limit on the difference: `{limit.arm} - {limit.against}: ...`"
        to_decide = _MORE_ROUNDS if one.n < FEWEST_ROUNDS else instead
        return Range(reason=one.note or "nothing to compare", to_decide=to_decide)
    low, high = limits
    return Range(
        low=low,
        high=high,
        shown=f"{number(value)} ({number(low)} to {number(high)}), {num_rounds}",
        to_decide="more rounds: `run.rounds`",
    )


def _missing(limit: Limit, side: GateSide, to_decide: str, of: str = "") -> Range:
    why = side.not_measurable.get(limit.metric, "the summary does not have it")
    instead = (name for name in METRICS[limit.metric].instead if name in side.metrics)
    if (nearest := next(instead, None)) is not None:
        to_decide += f", or a limit on `{nearest}`, which this server shows"
    return Range(reason=f"{of}not measurable: {why}", to_decide=to_decide)


def _rounds(side: GateSide, limit: Limit) -> Sequence[float | None]:
    return side.per_round.get(limit.metric, {}).get(limit.key, [])
