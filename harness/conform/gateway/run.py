"""The load process of `walkaway conform --upstream`: all cases of all dialects, as far as they may
run side by side.

The order is that of `Stage`: first clients that stay; then the leaves, together; then the cases
that want the gateway for themselves; then the cases that look back; last the cases in which the
provider seems to fail. The leaves of a dialect begin when the clients of the previous dialect have
left, and do not wait for what became of these clients.
"""

import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import gevent
from gevent.pool import Group

from harness.client.session import LoadSession
from harness.client.wire_log import WireLog
from harness.conform.case import Case
from harness.conform.finding import Finding
from harness.conform.gateway.bench import GatewayBench, GatewayEnd, LeaveSpec, RequestsLog
from harness.conform.gateway.case import GatewayCase, Stage
from harness.conform.gateway.cases import gateway_cases
from harness.conform.gateway.crossing import JudgedCrossing
from harness.conform.gateway.ledger import Ledger
from harness.conform.gateway.routes import find_spoken
from harness.conform.gateway.usage import UsageSource
from harness.conform.judgement import AT_ONCE
from harness.conform.messages import SuiteEvent, SuiteRequest
from harness.conform.verdict import settle_case
from harness.errors import TargetError
from harness.experiments.outcome import CannotDecideError, HarnessError, RefusedError
from harness.formatting import quantity
from harness.http_client import read_api_key, request_headers
from harness.records import RequestRow, Way
from harness.store.conform_result import CaseResult, Failure, Verdict, wire_log_name
from harness.workload.plan import LoadPlan
from harness.workload.target import DialectName, Target

_LEFT_S: Final = 2.0  # the longest until a dialect's clients have left
_FEWEST_STEPS: Final = 0.5  # within which our own side must see a leave
_CONTROLS: Final = 4
_CONTRACT_S: Final = {"cancel": 12.0, "drain": 45.0, "resume": 45.0}  # of an answer
_BY_TIME: Final = (Failure.LATE, Failure.NEVER)
ReportEvent = Callable[[SuiteEvent], None]
Outcome = JudgedCrossing | Finding | Exception


def run_gateway(order: SuiteRequest, plan: LoadPlan, report: ReportEvent) -> None:
    """Reports each case as soon as it is decided."""
    assert order.upstream is not None
    bench = _bench(order, plan)
    try:
        lag_s = _look_at_ourselves(bench)
        lacking = find_spoken(bench, order.upstream.port)
    except (CannotDecideError, TargetError) as error:
        is_gone = isinstance(error, TargetError)
        report(SuiteEvent(event="gone" if is_gone else "unusable", why=str(error)))
        return
    facts = {"step_s": bench.step_s, "ttft_s": bench.step_s, "lag_s": lag_s}
    report(SuiteEvent(event="facts", facts=facts))
    known = gateway_cases()
    cases = [known[name] for name in order.cases]
    GatewayTurns(bench, Path(order.folder), lacking, report).run(cases)


def _bench(order: SuiteRequest, plan: LoadPlan) -> GatewayBench:
    upstream = order.upstream
    assert upstream is not None
    direct = Target(name="upstream", description="", settle_s=1.0)
    answer_s = _CONTRACT_S[plan.target.disconnect]
    return GatewayBench(
        plan=plan,
        plans={},
        upstream=plan.at(upstream.url).model_copy(update={"target": direct, "headers": {}}),
        session_of=_session,
        wire=WireLog(request_headers(plan.headers, plan.api_key_env)),
        ledger=Ledger(Path(upstream.log)),
        rng=random.Random(order.seed),
        step_s=upstream.step_s,
        answer_tokens=round(answer_s / upstream.step_s),
        tries=order.tries,
        page_urls=order.page_urls,
        pid=order.pid,
        usage=None if order.usage is None else UsageSource.model_validate(order.usage),
    )


def _session(plan: LoadPlan, wire: WireLog) -> LoadSession:
    return LoadSession(
        plan,
        api_key=read_api_key(plan.api_key_env),
        tell=_nobody,
        enough=lambda: None,
        give_up=_fail,
        wire=wire,
    )


def _nobody(_row: RequestRow) -> None: ...


def _fail(why: str) -> None:
    raise HarnessError(why)


def _look_at_ourselves(bench: GatewayBench) -> float:
    """How late our own side sees a leave without a gateway: seconds. Raises HarnessError."""
    leave = LeaveSpec(way=Way.FIN, tokens=20)
    crossings = bench.leave_each(bench.upstream, leave, _CONTROLS)
    stops_s = [one.stopped_s for one in crossings]
    late = [one_s for one_s in stops_s if one_s is None or one_s > _FEWEST_STEPS * bench.step_s]
    if late:
        seen = "never" if late[0] is None else f"only after {quantity(late[0], 's')}"
        raise HarnessError(f"without a gateway our own upstream saw a leave {seen}")
    return max(one_s for one_s in stops_s if one_s is not None)


class GatewayTurns:
    def __init__(
        self,
        bench: GatewayBench,
        folder: Path,
        lacking: dict[DialectName, Exception],
        report: ReportEvent,
    ) -> None:
        self._bench, self._folder, self._lacking, self._report = bench, folder, lacking, report
        self._end: CaseResult | None = None  # the case after which nothing can be asked

    def run(self, cases: Sequence[GatewayCase]) -> None:
        spoken = [one for one in cases if one.dialect not in self._lacking]
        for one in cases:
            if one not in spoken:
                self._decided(one, self._lacking[one.dialect], None, 0.0)
        self._one_by_one(spoken, "first")
        dialects = list(dict.fromkeys(one.dialect for one in spoken))
        together = Group()
        for dialect in dialects:
            mine = [one for one in spoken if (one.dialect, one.stage) == (dialect, "leaves")]
            begun = [together.spawn(self._turn, one) for one in mine]
            gevent.joinall(begun, timeout=_LEFT_S)
        together.join()
        self._one_by_one(spoken, "one by one")
        self._one_by_one(spoken, "after all")
        self._one_by_one(spoken, "last")

    def _one_by_one(self, cases: Sequence[GatewayCase], stage: Stage) -> None:
        for one in cases:
            if one.stage == stage:
                self._turn(one)

    def _turn(self, one: GatewayCase) -> None:
        if self._is_over():
            return
        began_s = time.monotonic()
        self._report(SuiteEvent(event="started", id=one.case.id))
        plan = self._bench.plans[one.dialect]
        wire = RequestsLog(request_headers(plan.headers, plan.api_key_env))
        wire.begin(self._folder / wire_log_name(one.case.id))
        bench = replace(self._bench, wire=wire)
        outcome, again = _attempt(one, bench), None
        if _is_mixed(outcome, bench.step_s):
            bench.crowds.pop(one.dialect, None)
            again = _attempt(one, bench)
        wire.end()
        took_s, end = time.monotonic() - began_s, _find_end(one, outcome, bench)
        if self._is_over():
            return  # another case has seen the gateway's end
        if end is None:
            self._decided(one, outcome, again, took_s)
            return
        self._end = end
        self._report_case(one, end, took_s)
        self._report(SuiteEvent(event="unusable", why=end.reason))

    def _is_over(self) -> bool:
        return self._end is not None

    def _decided(
        self, one: GatewayCase, outcome: Outcome, again: Outcome | None, took_s: float
    ) -> None:
        second = None if again is None else _finding(again)
        result = settle_case(one.case, _finding(outcome), second)
        if isinstance(outcome, JudgedCrossing):
            result.tries = outcome.tries
        if isinstance(outcome, JudgedCrossing) and result.verdict is not Verdict.CANNOT_DECIDE:
            result.contract, result.cap_s = outcome.contract, outcome.cap_s
        self._report_case(one, result, took_s)

    def _report_case(self, one: GatewayCase, result: CaseResult, took_s: float) -> None:
        result.way = "upstream"
        result.took_s, result.dialect = round(took_s, 2), one.dialect
        if took_s:
            result.wire_log = wire_log_name(one.case.id)
        self._report(SuiteEvent(event="case", id=result.id, case=result))


def _find_end(one: GatewayCase, outcome: Outcome, bench: GatewayBench) -> CaseResult | None:
    """The case's result, if nothing can be asked any more."""
    finding = _finding(outcome)
    if isinstance(finding, RefusedError) or (isinstance(finding, Finding) and not finding.failure):
        return None
    try:
        bench.check_upstream()
    except HarnessError as error:
        return settle_case(one.case, error)
    if isinstance(finding, Finding) and finding.failure is not Failure.HARM:
        return None
    end = bench.find_end(one.dialect)
    return None if end is None else _ended_by_leaves(one.case, end, bench.left_in_all())


def _ended_by_leaves(case: Case, end: GatewayEnd, left: int) -> CaseResult:
    if not left:
        result = settle_case(case, CannotDecideError(f"before any client had left, {end.reason}"))
    else:
        said = f"after {quantity(left, 'clients')} had left in all, {end.reason}"
        result = settle_case(case, Finding(Failure.HARM, said, {}))
        result.verdict, result.kind = Verdict.FAIL, Failure.HARM  # of a case for information, too
        result.remedy = "find in the gateway's log what ended it when clients left"
    result.aftermath = end.aftermath
    return result


def _attempt(one: GatewayCase, bench: GatewayBench) -> Outcome:
    try:
        with gevent.Timeout(one.case.limit_s + bench.answer_s, _too_long(one.case.limit_s)):
            return one.check(bench, one.dialect)
    except Exception as error:  # noqa: BLE001  a crash of the check is a result
        if not isinstance(error, CannotDecideError | RefusedError):
            traceback.print_exc()
        return error


def _too_long(limit_s: float) -> CannotDecideError:
    return CannotDecideError(f"the check was not finished within {limit_s:g} s and an answer")


def _finding(outcome: Outcome) -> Finding | Exception:
    return outcome.finding if isinstance(outcome, JudgedCrossing) else outcome


def _is_mixed(outcome: Outcome, step_s: float) -> bool:
    """Some tries are red and others are good: it may be chance, or our machine."""
    if not isinstance(outcome, JudgedCrossing) or outcome.finding.failure not in _BY_TIME:
        return False
    stops_s = [one.upstream_stopped_s for one in outcome.tries]
    return any(one_s is not None and one_s <= AT_ONCE.steps * step_s for one_s in stops_s)
