"""The dialects that a gateway speaks, found by asking in each of them."""

import time
from collections.abc import Mapping
from typing import Final

import gevent
import httpx

from harness.client.wire_log import secrets_of
from harness.conform.gateway.bench import GatewayAnswer, GatewayBench, why_ended
from harness.errors import TargetError
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.run.recipes import PATHS
from harness.upstream.orders import Order
from harness.workload.plan import LoadPlan
from harness.workload.target import DialectName, Target

_ASKED: Final = 3  # one after the other: a second upstream, or a cache, answers some of them
# The headers that each request of a dialect has.
_OWN_HEADERS: Final[Mapping[DialectName, dict[str, str]]] = {
    "messages": {"anthropic-version": "2023-06-01"}
}
_KEY: Final = frozenset({401, 403})
_NOT_SPOKEN: Final = frozenset({404, 405, 501})
_MISREAD: Final = frozenset({400, 415, 422})  # the route is there
_UNHEALTHY: Final = frozenset({502, 503, 504})
_HEALTHY_S: Final = 15.0  # until a gateway must have seen that its upstream is there
_LOOK_S: Final = 0.5


def plan_of(plan: LoadPlan, dialect: DialectName) -> LoadPlan | None:
    """How the gateway is asked in this dialect; None: its file names other routes."""
    target = plan.target
    route = target.routes.get(dialect)
    if route is None and target.routes:
        return None
    path = PATHS[dialect] if route is None else route.path
    own = {"path": path, "dialect": dialect, "limit_key": None}
    own_headers, named = _OWN_HEADERS.get(dialect, {}), {} if route is None else route.headers
    return plan.model_copy(
        update={
            "target": target.model_copy(update=own),
            "model": (route and route.model) or plan.model,
            "headers": own_headers | plan.headers | named,
        }
    )


def secrets_of_routes(target: Target) -> list[str]:
    return [text for route in target.routes.values() for text in secrets_of(route.headers)]


def find_spoken(bench: GatewayBench, port: int) -> dict[DialectName, Exception]:
    """Why dialects are not judged: RefusedError, or CannotDecideError; the plans of the others are
    then in the bench. Raises TargetError if nothing can be judged."""
    lacking: dict[DialectName, Exception] = {}
    until_s = time.monotonic() + _HEALTHY_S
    for dialect in PATHS:
        plan = plan_of(bench.plan, dialect)
        if plan is None:
            lacking[dialect] = RefusedError("the target's file names no route for this dialect")
            continue
        is_named = dialect in bench.plan.target.routes
        try:
            _ask(bench, plan, port, until_s=until_s, is_named=is_named)
        except (RefusedError, CannotDecideError) as error:
            lacking[dialect] = error
            continue
        bench.plans[dialect] = plan
    if not bench.plans:
        raise TargetError(f"the gateway at {bench.plan.url} cannot be judged: {_first(lacking)}")
    return lacking


def _first(lacking: Mapping[DialectName, Exception]) -> Exception:
    """One that says more than that a route is missing, if there is one."""
    undecided = [why for why in lacking.values() if isinstance(why, CannotDecideError)]
    return [*undecided, *lacking.values()][0]


def _ask(bench: GatewayBench, plan: LoadPlan, port: int, *, until_s: float, is_named: bool) -> None:
    """Raises RefusedError if the dialect is not spoken, and CannotDecideError. `is_named`: the
    target's file says that it is."""
    answers = [_first_answer(bench, plan, until_s)]
    if answers[0].is_whole:
        answers += [bench.ask_each(plan, [Order()], 1)[0] for _ in range(1, _ASKED)]
    _check_status(answers, plan, port, is_named=is_named)
    arrived = sum(bool(one.requests) for one in answers)
    if not arrived:
        row = answers[0].row
        how = "answered" if answers[0].is_whole else f"answered with an error ({why_ended(row)})"
        raise CannotDecideError(
            f"POST {plan.target.path} for the model {plan.model} is {how}, but no request of ours "
            f"arrived at port {port}: the gateway sends it to another server, or answers from a "
            f"cache; point it at port {port}, turn its cache off, or name its model for that "
            "server (--model)"
        )
    if arrived < len(answers):
        raise CannotDecideError(
            f"only {arrived} of {len(answers)} requests arrived at port {port}: the gateway sends "
            "some to another server, or answers from a cache; let it have no other server than this"
        )


def _first_answer(bench: GatewayBench, plan: LoadPlan, until_s: float) -> GatewayAnswer:
    """Routers look now and then whether a server is there."""
    while True:
        (answer,) = bench.ask_each(plan, [Order()], 1)
        is_unhealthy = answer.row.status_code in _UNHEALTHY and not answer.requests
        if not is_unhealthy or time.monotonic() > until_s:
            return answer
        gevent.sleep(_LOOK_S)


def _check_status(
    answers: list[GatewayAnswer], plan: LoadPlan, port: int, *, is_named: bool
) -> None:
    """Raises RefusedError, or CannotDecideError, unless all are answered; one that is cut is for
    hop/whole."""
    bad = [one for one in answers if one.is_late or one.row.status_code != httpx.codes.OK]
    if not bad:
        return
    row = bad[0].row
    said = f"POST {plan.target.path}: {why_ended(row)}"
    if row.status_code in _KEY:
        said += (
            "; if it wants a key, name the variable that holds it with --api-key-env, or send "
            "another header with --header"
        )
    if row.status_code in _MISREAD:
        said += (
            "; if it does not speak this dialect, name those that it speaks in a target's [routes]"
        )
    if not bad[0].requests:
        said += f"; no request of ours arrived at port {port}"
    if row.status_code in _UNHEALTHY:
        said += ": does the gateway send to this port, and does it take the server there for well?"
    if row.status_code in _NOT_SPOKEN and not is_named:
        raise RefusedError(said)
    raise CannotDecideError(said)
