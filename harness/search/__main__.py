"""The load process of a search: it plays schedules, and follows what breaks.

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
from harness.client.live_stream import LiveStream
from harness.client.session import LoadSession
from harness.client.wire_log import WireLog, masked, secrets_of
from harness.conform.bench import Bench
from harness.conform.known import Known
from harness.conform.load_side import claim_output, end_with_input
from harness.conform.pages import MetricsPages
from harness.errors import TargetError
from harness.experiments.idle_server import QUICK_COUNT_S, find_facts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.http_client import read_api_key, request_headers
from harness.place import Place
from harness.records import Outcome, Protocol, Role
from harness.search.hunt import Hunt
from harness.search.invariants import Invariants
from harness.search.keeper import ServerKeeper, listens
from harness.search.messages import ALIVE_S, SearchEvent, SearchRequest
from harness.search.requests import check_taken, find_offered
from harness.search.schedule import Schedule, seen_in
from harness.search.trial import BREACH_LOG, Trial
from harness.store.search_result import SearchFinding
from harness.workload.abandon import RequestSpec
from harness.workload.plan import LoadPlan

_STREAMS = 256
_ANSWER_S = 120.0  # without a byte: one in one piece, or behind full slots, on a slow server
Report = Callable[[SearchEvent], None]


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = msgspec.json.decode(line, type=SearchRequest)
    plan = _patient(LoadPlan.model_validate_json(bytes(order.suite.plan)))
    secrets = secrets_of(request_headers(plan.headers, plan.api_key_env))
    report = partial(_report, output=claim_output(), secrets=secrets)
    allow_streams(_STREAMS)
    if plan.protocol is Protocol.GRPC:
        from harness.client.kserve import use_gevent  # its packages are an extra

        use_gevent()
    wire = WireLog(request_headers(plan.headers, plan.api_key_env))
    known = Known()
    session = LoadSession(
        plan,
        api_key=read_api_key(plan.api_key_env),
        tell=known.note,
        enough=lambda: None,
        give_up=lambda why: report(SearchEvent(event="gone", why=why)),
        wire=wire,
    )
    log = Path(order.suite.folder) / "server.log"
    keeper = ServerKeeper(
        order.restart,
        log,
        is_up=lambda: listens(Place(plan.url, plan.address)),
        is_ready=lambda: _answers(session),
    )
    gevent.spawn(end_with_input, keeper.close)
    alive = gevent.spawn(_say_alive, report)
    try:
        _search(order, session, keeper, known, wire, report)
    except (CannotDecideError, TargetError) as error:
        report(SearchEvent(event="gone", why=str(error)))
    finally:
        alive.kill()
        keeper.close()
        session.close()


def _say_alive(report: Report) -> None:
    """A wait for a slow server may take longer than the silence that the command allows."""
    while True:
        gevent.sleep(ALIVE_S)
        report(SearchEvent(event="alive"))


def _search(
    order: SearchRequest,
    session: LoadSession,
    keeper: ServerKeeper,
    known: Known,
    wire: WireLog,
    report: Report,
) -> None:
    tells = _Tells(report, Path(order.suite.folder))
    if keeper.can_start:
        order.suite.pid = None  # another one after each start: none is watched for its rest
    if order.starts_first:
        keeper.start()
    bench = _bench(order, session, known, wire)
    report(SearchEvent(event="facts", facts=bench.facts._asdict()))
    invariants = Invariants(
        bench,
        log=_log_of(order, keeper),
        pid=lambda: keeper.pid if keeper.can_start else order.suite.pid,
    )
    tells.doing("measuring the idle server: its texts, its gauges, its memory")
    invariants.learn()
    trial = Trial(bench, invariants, keeper, wire, tells.folder)
    hunt = Hunt(trial, found=tells.found, played=tells.played, doing=tells.doing)
    tells.doing("asking for each feature once")
    report(SearchEvent(event="over", why=_run(order, bench, hunt)))


class _Tells:
    """What the hunt says becomes events, and files in `folder`."""

    def __init__(self, report: Report, folder: Path) -> None:
        self._report, self.folder = report, folder
        self._count = 0

    def doing(self, what: str) -> None:
        self._report(SearchEvent(event="doing", doing=what))

    def found(self, finding: SearchFinding) -> None:
        place, latest = self.folder / finding.folder, self.folder / BREACH_LOG
        place.mkdir(exist_ok=True)
        if latest.exists():
            latest.replace(place / "wire.jsonl")
        self._report(SearchEvent(event="found", finding=finding))

    def played(self, schedule: Schedule) -> None:
        self._count += 1
        covered = list(seen_in(schedule))
        self._report(SearchEvent(event="played", played=self._count, covered=covered))


def _log_of(order: SearchRequest, keeper: ServerKeeper) -> Path | None:
    if order.log:
        return Path(order.log)
    return Path(order.suite.folder) / "server.log" if keeper.can_start else None


def _run(order: SearchRequest, bench: Bench, hunt: Hunt) -> str:
    """Why the search has ended."""
    if order.schedule is not None:
        check_taken(bench, order.schedule)
        return hunt.run_one(order.schedule, seconds=order.seconds)
    offered = find_offered(bench)
    return hunt.run(offered, seed=order.seed, seconds=order.seconds, themes=order.themes)


def _bench(order: SearchRequest, session: LoadSession, known: Known, wire: WireLog) -> Bench:
    suite, plan = order.suite, session.plan
    lag = LagWatch(open_streams=lambda: session.client.open_streams, give_up=lambda _why: None)
    pages = MetricsPages(plan, judged=suite.metrics_urls, every=suite.page_urls)
    facts = find_facts(session, slots=suite.slots, context=suite.context, count_s=QUICK_COUNT_S)
    bench = Bench(session, facts, suite, lag, wire, pages, known)
    bench.cleaning.learn_canary()
    bench.held.learn_idle()
    bench.lets_wait(2)  # counts the places of its queue
    return bench


def _patient(plan: LoadPlan) -> LoadPlan:
    waits = {"timeout_s": _ANSWER_S, "connect_timeout_s": READY_S}
    return plan.model_copy(update={"run": plan.run.model_copy(update=waits)})


def _answers(session: LoadSession) -> bool:
    """A short request is answered. It is asked of a server that only starts."""
    spec = RequestSpec(user=0, max_tokens=2, prompt_tokens=16, role=Role.CHECK)
    stream = LiveStream(session, spec)
    row = stream.join(READY_S)
    stream.cut()
    return row is not None and row.outcome is Outcome.COMPLETED


def _report(event: SearchEvent, *, output: int, secrets: list[str]) -> None:
    event.why, event.doing = masked(event.why, secrets), masked(event.doing, secrets)
    if (finding := event.finding) is not None:
        finding.said = masked(finding.said, secrets)
        finding.sentence = masked(finding.sentence, secrets)
    with os.fdopen(output, "wb", closefd=False) as pipe:
        pipe.write(msgspec.json.encode(event) + b"\n")


if __name__ == "__main__":
    main()
