"""The load process of a conformance run: it makes all requests, and decides case by case.

It gets an order on standard input, ends when that is closed, and reports on standard output.
"""

from gevent import monkey

monkey.patch_all()

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gevent
import msgspec

from harness.client.fd_limit import allow_streams
from harness.client.lag import LagWatch
from harness.client.session import LoadSession
from harness.client.wire_log import WireLog, masked, secrets_of
from harness.conform.bench import Bench
from harness.conform.case import CASES, Case
from harness.conform.cases import load_cases
from harness.conform.gateway.routes import secrets_of_routes
from harness.conform.gateway.run import run_gateway
from harness.conform.gentle_case import GENTLE_ID
from harness.conform.known import Known
from harness.conform.load_side import claim_output, end_with_input
from harness.conform.messages import SuiteEvent, SuiteRequest
from harness.conform.pages import MetricsPages
from harness.conform.turn import CaseTurns
from harness.errors import TargetError
from harness.experiments.idle_server import COUNT_S, QUICK_COUNT_S, find_facts
from harness.experiments.outcome import CannotDecideError
from harness.http_client import read_api_key, request_headers
from harness.records import Protocol
from harness.store.conform_result import CaseResult
from harness.workload.plan import LoadPlan

_STREAMS = 1000


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = msgspec.json.decode(line, type=SuiteRequest)
    plan = LoadPlan.model_validate_json(bytes(order.plan))
    gevent.spawn(end_with_input)
    headers = request_headers(plan.headers, plan.api_key_env)
    secrets = secrets_of(headers) + secrets_of_routes(plan.target)
    report = partial(_report, output=claim_output(), secrets=secrets)
    allow_streams(_STREAMS)
    if plan.protocol is Protocol.GRPC:
        from harness.client.kserve import use_gevent  # its packages are an extra

        use_gevent()
    if order.upstream is not None:
        run_gateway(order, plan, report)
        return
    load_cases()
    wire = WireLog(headers)
    known = Known(left=order.left)
    session = LoadSession(
        plan,
        api_key=read_api_key(plan.api_key_env),
        tell=known.note,
        enough=lambda: None,
        give_up=lambda why: report(SuiteEvent(event="gone", why=why)),
        wire=wire,
    )
    if order.gentle_s is not None:
        _watch_gently(order, session, report)
        return
    lag = LagWatch(open_streams=lambda: session.client.open_streams, give_up=lambda _why: None)
    try:
        bench = _bench(order, plan, session, lag, wire, known)
    except (CannotDecideError, TargetError) as error:
        is_gone = isinstance(error, TargetError)
        report(SuiteEvent(event="gone" if is_gone else "unusable", why=str(error)))
        return
    report(
        SuiteEvent(
            event="facts",
            facts=bench.facts._asdict() | {"lag_s": bench.lag_s, "settle_s": bench.settle_s},
        )
    )
    _run_cases([CASES[one] for one in order.cases], bench, Path(order.folder), secrets, report)
    session.close()


def _watch_gently(
    order: SuiteRequest, session: LoadSession, report: Callable[[SuiteEvent], None]
) -> None:
    def decided(result: CaseResult) -> None:
        report(SuiteEvent(event="case", id=result.id, case=result))

    def so_far(result: CaseResult) -> None:
        report(SuiteEvent(event="so_far", id=result.id, case=result))

    from harness.conform.gently import watch_gently  # only this needs numpy

    report(SuiteEvent(event="started", id=GENTLE_ID))
    try:
        watch_gently(order, session, decided, so_far)
    except TargetError as error:
        report(SuiteEvent(event="gone", why=str(error)))
    session.close()


def _run_cases(
    cases: list[Case],
    bench: Bench,
    folder: Path,
    secrets: list[str],
    report: Callable[[SuiteEvent], None],
) -> None:
    def decided(result: CaseResult) -> None:
        report(SuiteEvent(event="case", id=result.id, case=result))

    turns = CaseTurns(bench, folder, secrets, bench.patience, decided)
    for number, case in enumerate(cases):
        report(SuiteEvent(event="started", id=case.id))
        for result in turns.run(case, cases[number + 1 :]):
            decided(result)
        if turns.end is not None:
            report(SuiteEvent(event="unusable", why=turns.end))
            return


def _bench(
    order: SuiteRequest,
    plan: LoadPlan,
    session: LoadSession,
    lag: LagWatch,
    wire: WireLog,
    known: Known,
) -> Bench:
    pages = MetricsPages(plan, judged=order.metrics_urls, every=order.page_urls)
    count_s = QUICK_COUNT_S if order.quick else COUNT_S
    facts = find_facts(session, slots=order.slots, context=order.context, count_s=count_s)
    bench = Bench(session, facts, order, lag, wire, pages, known)
    bench.cleaning.learn_canary()
    bench.held.learn_idle()
    return bench


def _report(event: SuiteEvent, *, output: int, secrets: list[str]) -> None:
    event.why = masked(event.why, secrets)
    if (result := event.case) is not None:
        result.reason = masked(result.reason, secrets)
        result.evidence = {
            name: masked(value, secrets) if isinstance(value, str) else value
            for name, value in result.evidence.items()
        }
    with os.fdopen(output, "wb", closefd=False) as pipe:
        pipe.write(msgspec.json.encode(event) + b"\n")


if __name__ == "__main__":
    main()
