"""The dialects that a gateway speaks, found by asking once in each."""

from collections.abc import Mapping
from typing import Final

import httpx

from harness.conform.gateway.bench import Answer, GatewayBench, why_ended
from harness.errors import TargetError
from harness.experiments.outcome import CannotDecideError
from harness.records import Outcome
from harness.upstream.orders import Order
from harness.workload.plan import LoadPlan
from harness.workload.target import DialectName

_PATHS: Final[Mapping[DialectName, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_ASKED: Final = 3  # requests in each dialect, one after the other: a second upstream, or a cache,
# has some of them
_KEY: Final = frozenset({401, 403})


def plan_of(plan: LoadPlan, dialect: DialectName) -> LoadPlan | None:
    """How the gateway is asked in this dialect; None: its file names other routes."""
    target = plan.target
    route = target.routes.get(dialect)
    if route is None and target.routes:
        return None
    path = _PATHS[dialect] if route is None else route.path
    own = {"path": path, "dialect": dialect, "limit_key": None}
    headers = {} if route is None else route.headers
    return plan.model_copy(
        update={
            "target": target.model_copy(update=own),
            "model": (route and route.model) or plan.model,
            "headers": plan.headers | headers,
        }
    )


def find_spoken(bench: GatewayBench, port: int) -> dict[DialectName, str]:
    """Why dialects are not spoken; the plans of the others are then in the bench. Raises
    TargetError if nothing can be judged."""
    refused: dict[DialectName, str] = {}
    for dialect in _PATHS:
        plan = plan_of(bench.plan, dialect)
        if plan is None:
            refused[dialect] = "the target's file names no route for this dialect"
            continue
        try:
            answers = [bench.ask_each(plan, [Order()], 1)[0] for _ in range(_ASKED)]
        except CannotDecideError as error:
            refused[dialect] = f"POST {plan.target.path}: {error}"
            continue
        if (why := _why_not(answers, plan, port)) is not None:
            refused[dialect] = why
            continue
        bench.plans[dialect] = plan
    if not bench.plans:
        raise TargetError(f"the gateway at {bench.plan.url} cannot be judged: {_first(refused)}")
    return refused


def _first(refused: Mapping[DialectName, str]) -> str:
    """The reason that is not about a missing route, if there is one."""
    found = [why for why in refused.values() if "status 404" not in why]
    return [*found, *refused.values()][0]


def _why_not(answers: list[Answer], plan: LoadPlan, port: int) -> str | None:
    """Raises TargetError where the gateway answers, but not by this upstream alone."""
    path = plan.target.path
    arrived = sum(bool(one.requests) for one in answers)
    whole = [one for one in answers if one.is_whole]
    if not whole:
        row = answers[0].row
        said = f"POST {path}: {why_ended(row)}"
        if row.status_code in _KEY:
            return f"{said}; it wants a key: name the variable that holds it with --api-key-env"
        if not arrived and (row.status_code or 500) >= httpx.codes.INTERNAL_SERVER_ERROR:
            said += f"; no request of ours arrived at port {port}: point the gateway there"
        return said
    if not arrived:
        raise TargetError(
            f"the gateway at {plan.url} answers POST {path}, but no request of ours arrived at "
            f"port {port}: it sends them to another server, or answers from a cache; point it "
            f"at http://127.0.0.1:{port}, and turn its cache off"
        )
    if arrived < len(whole):
        raise TargetError(
            f"only {arrived} of {len(whole)} requests arrived at port {port}: the gateway at "
            f"{plan.url} has another server besides, or answers from a cache; leave it this one"
        )
    if any(one.row.outcome is not Outcome.COMPLETED for one in answers):
        return None  # some were cut: that is what hop/whole is about
    return None
