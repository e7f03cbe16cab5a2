"""The load process of a conformance run: it makes all requests, and decides case by case.

It gets an order on standard input, ends with it, and reports on standard output. Each case has its
streams and its log of the wire; what it leaves behind is seen by a probe before the next case
begins.
"""

from gevent import monkey

monkey.patch_all()

import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import gevent
import msgspec

from harness.conform.bench import Asked, Bench
from harness.conform.case import CASES, Case, Check
from harness.conform.cases import load_cases
from harness.conform.finding import Finding
from harness.conform.order import Event, Order
from harness.conform.pages import Pages
from harness.conform.verdict import settle_case, with_aftermath
from harness.errors import TargetError
from harness.experiments.facts import find_facts
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.http_client import read_api_key, request_headers
from harness.load.fd_limit import allow_streams
from harness.load.lag import LagWatch
from harness.load.session import LoadSession
from harness.load.wire_log import WireLog, masked, secrets_of
from harness.records import Protocol
from harness.store.conform_result import Aftermath, CaseResult, Failure, wire_log_name
from harness.workload.plan import LoadPlan

_STREAMS = 1000
_FILLS = {*"POK"}  # methods that are about all slots
_TAKES_SLOTS = {*"POKBR"}  # methods whose requests another load keeps waiting


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = msgspec.json.decode(line, type=Order)
    plan = LoadPlan.model_validate_json(bytes(order.plan))
    gevent.spawn(_end_with_input)
    headers = request_headers(plan.headers, plan.api_key_env)
    secrets = secrets_of(headers)
    tell = partial(_tell, output=_claim_output(), secrets=secrets)
    allow_streams(_STREAMS)
    if plan.protocol is Protocol.GRPC:
        from harness.load.kserve import use_gevent  # its packages are an extra

        use_gevent()
    load_cases()
    wire = WireLog(headers)
    session = LoadSession(
        plan,
        api_key=read_api_key(plan.api_key_env),
        tell=lambda _row: None,
        enough=lambda: None,
        give_up=lambda why: tell(Event(event="gone", why=why)),
        wire=wire,
    )
    lag = LagWatch(open_streams=lambda: session.client.open_streams, give_up=lambda _why: None)
    try:
        bench = _bench(order, plan, session, lag, wire)
    except (CannotDecideError, TargetError) as error:
        is_gone = isinstance(error, TargetError)
        tell(Event(event="gone" if is_gone else "unusable", why=str(error)))
        return
    tell(
        Event(
            event="facts",
            facts=bench.facts._asdict() | {"lag_s": bench.lag_s, "settle_s": bench.settle_s},
        )
    )
    for case_id in order.cases:
        tell(Event(event="started", id=case_id))
        result = run_case(CASES[case_id], bench, Path(order.folder), secrets)
        tell(Event(event="case", id=case_id, case=result))
        if result.aftermath is Aftermath.DEAD:
            break
    session.close()


def _bench(
    order: Order, plan: LoadPlan, session: LoadSession, lag: LagWatch, wire: WireLog
) -> Bench:
    asked = Asked(
        settle_s=order.settle_s,
        tries=order.tries,
        is_quick=order.quick,
        seed=order.seed,
        pid=order.pid,
        direct=order.direct,
    )
    pages = Pages(plan, judged=order.metrics_urls, every=order.page_urls)
    facts = find_facts(session, slots=order.slots, context=order.context)
    bench = Bench(session, facts, asked, lag, wire, pages)
    bench.cleaning.learn_canary()
    return bench


def run_case(case: Case, bench: Bench, folder: Path, secrets: list[str]) -> CaseResult:
    started_s = time.monotonic()
    log = wire_log_name(case.id)
    bench.wire.begin(folder / log)
    bench.rng.seed(f"{bench.asked.seed}/{case.id}")
    outcome, again = _attempt(case, partial(_check_free, case), bench, secrets), None
    times = (Failure.LATE, Failure.NEVER)  # harm is no matter of chance, and cannot be undone
    takes_slots = bool(_TAKES_SLOTS & {*case.methods})
    if takes_slots and isinstance(outcome, Finding) and outcome.failure in times:
        facts = bench.facts
        again = _once_more(case, bench, secrets)
        bench.facts = facts
    bench.end()
    result = settle_case(case, outcome, again)
    bench.wire.end()
    result.wire_log = log
    aftermath, told = bench.cleaning.aftermath()
    bench.cleaning.rest()
    if aftermath is Aftermath.WEDGED and bench.cleaning.running == 0 and not bench.serves():
        aftermath, told = Aftermath.DEAD, "the server serves no request any more"
    result = with_aftermath(result, aftermath, told)
    result.took_s = round(time.monotonic() - started_s, 2)
    return result


def _check_free(case: Case, bench: Bench) -> Finding:
    bench.cleaning.check_free(wholly=bool(_FILLS & {*case.methods}))
    return case.check(bench)


def _check_alone(bench: Bench) -> Finding:
    return bench.recoveries.check_alone(bench.cleaning.running)


def _once_more(case: Case, bench: Bench, secrets: list[str]) -> Finding | Exception | None:
    """After a red: the control, and, if times were judged, a second run in the slots that are left.
    None: the red stands."""
    bench.end()
    bench.cleaning.rest()  # may take longer than a case
    control = _attempt(case, _check_alone, bench, secrets)
    bench.end()
    if isinstance(control, Exception) or control.failure is not None:
        return control
    if "P" not in case.methods:
        return None
    bench.cleaning.rest()
    if bench.cleaning.running:
        bench.facts = bench.facts._replace(slots=bench.cleaning.running)
    return _attempt(case, case.check, bench, secrets)


def _attempt(case: Case, check: Check, bench: Bench, secrets: list[str]) -> Finding | Exception:
    limit_s = case.limit_s + 3 * bench.settle_s
    limit = gevent.Timeout(limit_s)  # no Exception, so that no check takes it for its own
    try:
        with limit:
            return check(bench)
    except gevent.Timeout as ended:
        if ended is not limit:
            raise
        return CannotDecideError(f"the check was not finished within {limit_s:.0f} s")
    except Exception as error:  # noqa: BLE001  jepsen's check-safe: a crash decides nothing
        if not isinstance(error, CannotDecideError | RefusedError):
            sys.stderr.write(masked(traceback.format_exc(), secrets))
        return error


def _claim_output() -> int:
    """Standard output, for the reports alone: what a library prints goes to standard error."""
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return output


def _tell(event: Event, *, output: int, secrets: list[str]) -> None:
    event.why = masked(event.why, secrets)
    if (result := event.case) is not None:
        result.reason = masked(result.reason, secrets)
        result.evidence = {
            name: masked(value, secrets) if isinstance(value, str) else value
            for name, value in result.evidence.items()
        }
    with os.fdopen(output, "wb", closefd=False) as pipe:
        pipe.write(msgspec.json.encode(event) + b"\n")


def _end_with_input() -> None:
    while True:
        gevent.socket.wait_read(sys.stdin.fileno())
        if not os.read(sys.stdin.fileno(), 4096):
            os._exit(0)


if __name__ == "__main__":
    main()
