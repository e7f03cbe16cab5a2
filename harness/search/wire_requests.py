"""The requests of a schedule as a plain HTTP client sends them: what repro.py has in it."""

import json
from typing import Any, Final

from harness.client.exchange import StreamClient
from harness.client.session import canary_prompt
from harness.client.stream import BUSY_STATUSES
from harness.conform.bench import Bench
from harness.records import Delivery, Role, Way
from harness.search.answers import excused_by, may_refuse
from harness.search.broken import WAITED_S, WAY, Broken, Violation
from harness.search.play import bystander_tokens, longest_of
from harness.search.requests import is_greedy, spec_of, text_of
from harness.search.schedule import Phase, Schedule, Visit
from harness.workload.abandon import RequestSpec

_SOME_SLOTS: Final = 256  # that repro.py fills at most
_NO_SLOTS: Final = 8  # where their number is not known
_PLAIN_WAYS: Final = {
    Way.FIN: "close",
    Way.RST: "reset",
    Way.HALF_CLOSE: "half-close",
    Way.STOP_READING: "stop-reading",
}
_SEEN_BY: Final = {  # what of it repro.py sees
    Broken.DEAD: "slots",
    Broken.WEDGED: "slots",
    Broken.LOST: "slots",
    Broken.HELD: "slots",
    Broken.CUT: "cut",
    Broken.HUNG: "cut",
    Broken.TEXT: "text",
    Broken.GAUGES: "gauges",
}
_HELD_BY: Final = {"gauge": "gauges", "occupancy": "slots"}
_WHOLE_OR: Final = "whole|HTTP/1.1 (?:{})"
_OF_CONNECTION: Final = frozenset({"host", "connection", "accept-encoding", "content-length"})


def wire_of(bench: Bench, schedule: Schedule, seen: Violation) -> dict[str, Any]:
    """Empty over gRPC, for ways to leave that a plain client does not have, and for what it does
    not see. All waits are in seconds; headers that the user gave are left out."""
    client, ways, by = bench.session.client, {one.way for one in schedule.leaves}, seen_by(seen)
    if not isinstance(client, StreamClient) or not ways <= {*_PLAIN_WAYS} or by is None:
        return {}
    metrics = bench.session.plan.target.metrics.items()
    return {
        "seen_by": by,
        "gauges": [source.name for role, source in metrics if role in ("running", "waiting")],
        "slots": bench.crowd(_SOME_SLOTS) if bench.facts.can_fill else _NO_SLOTS,
        "settle_s": round(max(bench.settle_s, seen.evidence.get(WAITED_S, 0.0)), 3),
        "patience_s": round(longest_of(bench, schedule), 1),
        "short": _short(bench, client),
        "greedy": [_greedy(bench, client, number + 1) for number in range(schedule.bystanders)],
        "requests": [
            _request(bench, client, schedule, number) for number in range(len(schedule.visits))
        ],
    }


def _short(bench: Bench, client: StreamClient) -> dict[str, Any]:
    """A request that lasts until as many as slots run."""
    spec = bench.short(bench.facts.together_tokens, role=Role.PROBE)
    return _message(client, spec, _canary(bench, spec, 0))


def _greedy(bench: Bench, client: StreamClient, number: int) -> dict[str, Any]:
    """A bystander, which may find no slot."""
    spec = bench.short(bystander_tokens(bench), role=Role.CANARY)
    message = _message(client, spec, _canary(bench, spec, number))
    return message | {"may_end": _WHOLE_OR.format("|".join(map(str, sorted(BUSY_STATUSES))))}


def _canary(bench: Bench, spec: RequestSpec, number: int) -> str:
    scale = bench.session.plan.prompt_scale
    return canary_prompt(number, tokens=spec.prompt_tokens, scale=scale)


def _request(bench: Bench, client: StreamClient, schedule: Schedule, number: int) -> dict[str, Any]:
    """`may_end`: a pattern of the ends that are no fault while the client is there."""
    visit = schedule.visits[number]
    spec = spec_of(bench, visit, number, request_id=_name(visit, number))
    statuses = excused_by(visit, can_refuse=may_refuse(bench.facts, schedule))
    return _message(client, spec, text_of(bench, schedule, number)) | {
        "wait_s": round(visit.at * bench.step_s, 4),
        "after": visit.after,
        "leave": _leave(bench, visit),
        "greedy": visit.leave is None and is_greedy(visit),
        "may_end": _WHOLE_OR.format(statuses),
    }


def seen_by(seen: Violation) -> str | None:
    """None: a plain client does not see it."""
    way = seen.evidence.get(WAY)
    return _SEEN_BY.get(seen.broken) if way is None else _HELD_BY.get(way)


def _name(visit: Visit, number: int) -> str:
    return f"repro-{visit.repeats if visit.same_id else number}"


def _message(client: StreamClient, spec: RequestSpec, text: str) -> dict[str, Any]:
    raw_path, fields, encoded = client.message(spec, text)
    headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in fields}
    given = {*_OF_CONNECTION, "authorization", *(name.lower() for name in client.plan.headers)}
    return {
        "path": raw_path.decode("ascii"),
        "headers": {key: text for key, text in headers.items() if text and key not in given},
        "body": json.loads(encoded),
    }


def _leave(bench: Bench, visit: Visit) -> dict[str, Any] | None:
    """The way of the leave, and its time: seconds after a number of events with text (one for each
    token), or after the sending."""
    leave = visit.leave
    if leave is None:
        return None
    late_s = leave.late * bench.step_s
    way = _PLAIN_WAYS[leave.way]
    match leave.phase:
        case Phase.SENT:
            return {"way": way, "after_s": round(leave.at * bench.step_s + late_s, 4)}
        case Phase.PREFILL:
            after_s = min(leave.at, 1.0) * bench.ttft_s + late_s
            return {"way": way, "after_s": round(after_s, 4)}
        case Phase.LAST:
            tokens = max(1, visit.n * visit.answer - int(leave.at))
        case _:
            tokens = max(1, int(leave.at))
    if visit.delivery is Delivery.UNARY:
        return {"way": way, "after_s": round(tokens * bench.step_s + late_s, 4)}
    return {"way": way, "after_events": tokens, "after_s": round(late_s, 4)}
