"""A schedule and what it breaks, in words: the sentence that a maintainer needs."""

from collections.abc import Sequence
from typing import Final

from harness.formatting import quantity
from harness.records import Delivery, Way
from harness.search.broken import Violation
from harness.search.schedule import Feature, Leave, Phase, Schedule, Visit

_WAYS: Final = {
    Way.FIN: "closes its connection",
    Way.RST: "resets its connection",
    Way.HALF_CLOSE: "closes its sending side",
    Way.STOP_READING: "stops reading",
    Way.CANCEL: "cancels the request",
}
_FEATURES: Final = {
    Feature.SCHEMA: "a JSON schema",
    Feature.TOOLS: "tools",
    Feature.STOP: "stop strings",
    Feature.LOGPROBS: "log probabilities",
    Feature.SAMPLED: "sampling",
    Feature.PRIORITY: "a priority",
    Feature.ADAPTER: "an adapter",
}
_MOST_SAID: Final = 4  # visits; longer schedules are counted


def sentence_of(schedule: Schedule, violation: Violation) -> str:
    visits = [_visit(one, number) for number, one in enumerate(schedule.visits)]
    said = "; ".join(visits)
    if len(visits) > _MOST_SAID:
        said = f"of {len(visits)} requests {len(schedule.leaves)} are left by their clients"
    stays = ""
    if schedule.bystanders:
        some = quantity(schedule.bystanders, "greedy streams")
        stays = f", while {some} {'runs' if schedule.bystanders == 1 else 'run'} to the end"
    return f"{said[0].upper()}{said[1:]}{stays}; then: {violation.said}."


def sentence_of_many(schedules: Sequence[Schedule], violation: Violation, *, among: int = 0) -> str:
    """`among`: the schedules in the row whose rate was counted, if that row is longer."""
    requests = sum(len(one.visits) for one in schedules)
    leaves = sum(len(one.leaves) for one in schedules)
    counted = ""
    if among > len(schedules):
        counted = f"; how often it comes was counted with the whole row of {among}"
    return (
        f"{quantity(len(schedules), 'schedules')} in a row, with {requests} requests, {leaves} of "
        f"them left by their clients (no fewer were found to show it{counted}); "
        f"then: {violation.said}."
    )


def _visit(visit: Visit, number: int) -> str:
    what = f"{visit.n} answers" if visit.n > 1 else "an answer"
    tokens = quantity(visit.answer, "tokens")
    if visit.delivery is Delivery.UNARY:
        what += " in one piece"
    parts = [_FEATURES[one] for one in visit.features if one in _FEATURES]
    parts += [f"a prompt of {visit.prompt} tokens"] if visit.prompt > Visit().prompt else []
    parts += [f"{visit.shared} tokens of it shared"] if visit.shared else []
    of = f" ({', '.join(parts)})" if parts else ""
    route = "" if visit.route is None else f" on /v1/{visit.route}"
    said = f"client {number} asks for {what} of {tokens}{of}{route}"
    if visit.repeats is not None:
        said += f", with the prompt of client {visit.repeats}"
        said += " and its request id" if visit.same_id else ""
    if visit.after is not None:
        said += f", {quantity(visit.at, 'steps')} after client {visit.after} was gone"
    elif visit.at:
        said += f", {quantity(visit.at, 'steps')} after the beginning"
    return f"{said}, and {_leave(visit.leave)}"


def _leave(leave: Leave | None) -> str:
    if leave is None:
        return "stays"
    act = _WAYS.get(leave.way, f"leaves ({leave.way})")
    late = f" and {quantity(leave.late, 'steps')}" if leave.late else ""
    match leave.phase:
        case Phase.SENT:
            return f"{act} {quantity(leave.at + leave.late, 'steps')} after it asked"
        case Phase.PREFILL:
            return f"{act} at {leave.at:.0%} of the usual time to its first token{late}"
        case Phase.LAST:
            then = f", {quantity(leave.late, 'steps')} later" if leave.late else ""
            return f"{act} with {quantity(leave.at, 'tokens')} to come{then}"
        case _:
            return f"{act} after {quantity(max(1, int(leave.at)), 'tokens')}{late}"
