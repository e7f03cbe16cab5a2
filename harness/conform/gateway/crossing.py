"""One client that left, seen from both sides of a gateway; and what a gateway does with a leave.

    client    ── request ──────────── t0: it leaves
    gateway      │                     │ ?
    upstream  ── arrived ── tokens ─── closed, or the answer is made to its end

The contracts, from the best to the worst:

    cancel          the upstream's connection is closed within a step
    at next write   it is closed when the next tokens come, at most four, and cannot be handed on
    drain           it is closed later, before the answer's end: the time is the drain's cap
    never           the answer is made to its end
"""

from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from harness.conform.finding import Evidence, Finding
from harness.conform.gateway.ledger import UpstreamRequest
from harness.conform.judgement import AT_ONCE, WORST
from harness.experiments.outcome import CannotDecideError, HarnessError
from harness.formatting import quantity
from harness.records import Disconnect
from harness.store.conform_result import Contract, CrossingTimes, Failure, Steps

_RANKS: Final[tuple[Contract, ...]] = ("cancel", "at next write", "drain", "never")
_WRITES: Final = 4  # the first brings the reset, a later one fails; proxies collect small ones
_ALIKE: Final = 0.2  # the share by which caps of one drain differ


class Crossing(NamedTuple):
    """`request`: None if none had arrived when the client left."""

    t0_ns: int
    request: UpstreamRequest | None

    @property
    def stopped_s(self) -> float | None:
        """The time from t0 until the gateway closed its connection; None: not before the end."""
        request = self.request
        if request is None or not request.has_left or request.closed_ns is None:
            return None
        return (request.closed_ns - self.t0_ns) / 1e9

    @property
    def later_tokens_s(self) -> list[float]:
        """The times at which tokens were made after t0, from t0."""
        times_ns = () if self.request is None else self.request.token_times_ns
        return [(at_ns - self.t0_ns) / 1e9 for at_ns in times_ns if at_ns > self.t0_ns]

    def contract(self, step_s: float) -> Contract:
        stopped_s, later_s = self.stopped_s, self.later_tokens_s
        if stopped_s is None:
            return "never"
        if stopped_s <= step_s:
            return "cancel"
        is_written = bool(later_s) and self.request is not None and self.request.is_stream
        is_noticed = is_written and stopped_s <= later_s[:_WRITES][-1] + step_s
        return "at next write" if is_noticed else "drain"


class JudgedCrossing(NamedTuple):
    """`cap_s`: of a drain, if it was found."""

    finding: Finding
    contract: Contract | None = None
    cap_s: float | None = None
    tries: tuple[CrossingTimes, ...] = ()


def judge(
    crossings: Sequence[Crossing], *, step_s: float, declared: Disconnect, answer_s: float
) -> JudgedCrossing:
    """`answer_s`: how long the answers would have lasted. Raises CannotDecideError."""
    _check(crossings)
    contracts = [one.contract(step_s) for one in crossings]
    worst = max(contracts, key=_RANKS.index)
    tries = tuple(
        CrossingTimes(
            upstream_stopped_s=None if one.stopped_s is None else round(one.stopped_s, 4),
            tokens_after_leave=len(one.later_tokens_s),
        )
        for one in crossings
    )
    stops_s = [one.stopped_s for one in crossings if one.stopped_s is not None]
    cap_s = _cap(contracts, stops_s)
    by_step = _by_steps(crossings, contracts, stops_s, step_s)
    evidence = _evidence(stops_s, tries, contracts)
    finding = by_step._replace(evidence=evidence, way="upstream")
    if declared != "cancel" and finding.failure is not None:
        said = f"as it declares (`{declared}`), answers run on when their clients have left"
        said += _ended(contracts, stops_s, answer_s)
        finding = finding._replace(failure=None, reason=said)
    elif declared != "cancel":
        finding = finding._replace(
            reason=f"{finding.reason}; it declares `{declared}`, but it cancels"
        )
    return JudgedCrossing(finding, worst, cap_s, tries)


def _check(crossings: Sequence[Crossing]) -> None:
    missing = sum(one.request is None for one in crossings)
    if missing:
        raise CannotDecideError(
            f"{missing} of {len(crossings)} requests had not arrived at the upstream when their "
            "clients left"
        )
    ended = [one.request.why for one in crossings if one.request is not None]
    if "shutdown" in ended:
        raise HarnessError("our own upstream ended")
    early = sum(one.stopped_s is not None and one.stopped_s < 0 for one in crossings)
    if early:
        raise CannotDecideError(
            f"in {early} of {len(crossings)} tries the gateway had closed its connection to the "
            "upstream before the client left"
        )


def _by_steps(
    crossings: Sequence[Crossing],
    contracts: Sequence[Contract],
    stops_s: Sequence[float],
    step_s: float,
) -> Finding:
    never = contracts.count("never")
    if never:
        made = max(len(one.later_tokens_s) for one in crossings)
        said = (
            f"in {never} of {len(crossings)} tries the upstream's connection stayed open to the "
            "answer's end"
        )
        if made:
            said += f": {quantity(made, 'tokens')} were made for a client that had left"
        return Finding(Failure.NEVER, said, {}, stops=False)
    middle_s, worst_s = median(stops_s), max(stops_s)
    steps = Steps(round(middle_s / step_s, 2), round(worst_s / step_s, 2))
    said = f"the upstream's connection was closed {quantity(middle_s, 's')} after the leave"
    if len(stops_s) > 1:
        said += f", {quantity(worst_s, 's')} at worst"
    if (wasted := max(len(one.later_tokens_s) for one in crossings)) > 0:
        said += f", and at most {quantity(wasted, 'tokens')} came meanwhile"
    is_late = steps.p50 > AT_ONCE.steps or steps.worst > WORST * AT_ONCE.steps
    return Finding(Failure.LATE if is_late else None, said, {}, stops=True, steps=steps)


def _cap(contracts: Sequence[Contract], stops_s: Sequence[float]) -> float | None:
    """The time that all drains of a case lasted; None: there was none, or they differ."""
    if "drain" not in contracts or "never" in contracts:
        return None
    middle_s = median(stops_s)
    is_one = all(abs(one_s - middle_s) <= _ALIKE * middle_s for one_s in stops_s)
    return round(middle_s, 2) if is_one else None


def _ended(contracts: Sequence[Contract], stops_s: Sequence[float], answer_s: float) -> str:
    """Words for when answers that run on have ended."""
    never = contracts.count("never")
    if never == len(contracts):
        return f"; a cap beyond {quantity(answer_s, 's')} is not seen"
    if never:
        return f", in {never} of {len(contracts)} tries to their end"
    if (cap_s := _cap(contracts, stops_s)) is not None:
        return f", and are ended after {quantity(cap_s, 's')}"
    within = f", and are ended within {quantity(max(stops_s), 's')}"
    return f"{within}, at different times" if "drain" in contracts else within


def _evidence(
    stops_s: Sequence[float], tries: Sequence[CrossingTimes], contracts: Sequence[Contract]
) -> Evidence:
    counts = [f"{one} {contracts.count(one)}" for one in _RANKS if one in contracts]
    return {
        "median_ms": round(1e3 * median(stops_s), 2) if stops_s else None,
        "worst_ms": round(1e3 * max(stops_s), 2) if stops_s else None,
        "worst_after_leave_tokens": max(one.tokens_after_leave for one in tries),
        "contracts": ", ".join(counts),
    }
