"""The worker's own port: what it counts, its log of events and of steps, its checks of itself.

The log has the events of all its requests, so those of a lost frontend can be followed here. A
thread of its own answers each request.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from traceback import extract_tb
from typing import Final
from urllib.parse import parse_qs, urlsplit

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from reference_engine.api.journal import Log, Page
from reference_engine.api.schemas import LifecycleEntry, StepEntry
from reference_engine.core.request import FinishReason
from reference_engine.protocol import StepReport, WorkerSettings
from reference_engine.wire import LearnedBy
from reference_engine.worker.engine import Report, Share
from reference_engine.worker.frontends import Frontends
from reference_engine.worker.inbox import Inbox, Inspection

_MAX_PAGE: Final = 10_000
_INSPECTION_S: Final = 30.0  # for the step in progress
_COMPONENT: Final = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")


class Status(Collector):
    """The step loop writes the logs, threads that answer read them: both under `_lock`."""

    def __init__(self, settings: WorkerSettings, frontends: Frontends, inbox: Inbox) -> None:
        self._settings = settings
        self._frontends = frontends
        self._inbox = inbox
        self._lock = threading.Lock()
        self._latest: StepReport | None = None
        self._lifecycle = Log()
        self._steps = Log()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def before(self, report: Report) -> Report:
        """A report that is noted here, then passed on."""

        def note(whole: StepReport, shares: Mapping[str, Share]) -> None:
            self._note(whole, shares)
            report(whole, shares)

        return note

    def lifecycle(self, after: int, limit: int) -> Page:
        with self._lock:
            return self._lifecycle.after(after, limit)

    def steps(self, after: int, limit: int) -> Page:
        with self._lock:
            return self._steps.after(after, limit)

    def metrics(self) -> bytes:
        return generate_latest(self._registry)

    def inspect(self) -> None:
        """Raises AssertionError if the engine finds itself wrong at its next boundary, TimeoutError
        if there is none.
        """
        result: Future[None] = Future()
        self._inbox.put(Inspection(result))
        result.result(_INSPECTION_S)

    def collect(self) -> Iterator[Metric]:
        signals, report = self._frontends.cancellations, self._latest
        kind = self._settings.config.component
        component = CounterMetricFamily(
            "dynamo_component_cancellation", "Requests that were cancelled.", labels=_COMPONENT
        )
        component.add_metric(["dynamo", kind, "generate"], signals.total())
        learned = CounterMetricFamily(
            "walkaway_worker_cancellations",
            "Requests that were cancelled, by how the worker learned of it.",
            labels=["learned_by"],
        )
        for one in LearnedBy:
            learned.add_metric([one], signals[one])
        yield component
        yield learned
        aborted = 0 if report is None else report.counters.finished.get(FinishReason.ABORT, 0)
        text = "Requests that the engine aborted; each of n answers is one."
        yield CounterMetricFamily("walkaway_worker_aborted_requests", text, aborted)
        for name, text in _GAUGES.items():
            value = 0 if report is None else getattr(report, name)
            yield GaugeMetricFamily(f"walkaway_worker_{name}", text, value)

    def _note(self, report: StepReport, shares: Mapping[str, Share]) -> None:
        with self._lock:
            self._latest = report
            if report.step is not None:
                self._steps.append(StepEntry(worker=report.worker, **asdict(report.step)))
            for _, events in shares.values():
                for event in events:
                    entry = LifecycleEntry(
                        seq=self._lifecycle.next_number,
                        client_request_id=None,
                        worker=report.worker,
                        **asdict(event),
                    )
                    self._lifecycle.append(entry)


_GAUGES: Final = {
    "num_running": "Batch slots in use.",
    "num_waiting": "Requests that wait.",
    "free_blocks": "Blocks that can be given to requests.",
}


class StatusServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, status: Status, address: tuple[str, int]) -> None:
        self.status = status
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url, status = urlsplit(self.path), self.server.status
        match url.path:
            case "/metrics":
                self._answer(HTTPStatus.OK, status.metrics(), CONTENT_TYPE_LATEST)
            case "/walkaway/lifecycle" | "/walkaway/steps":
                self._page(url.path.removeprefix("/walkaway/"), url.query)
            case "/walkaway/integrity":
                self._integrity()
            case _:
                text = "paths: /metrics, /walkaway/lifecycle, /walkaway/steps, /walkaway/integrity"
                self._answer(HTTPStatus.NOT_FOUND, f"no such path; {text}\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the base's name
        """Requests are not logged."""

    def _page(self, name: str, query: str) -> None:
        given = {key: values[-1] for key, values in parse_qs(query).items()}
        numbers = [given.get("after", "0"), given.get("limit", str(_MAX_PAGE))]
        if not all(re.fullmatch(r"[0-9]{1,18}", text) for text in numbers):
            self._answer(HTTPStatus.BAD_REQUEST, "after and limit: numbers of at most 18 digits\n")
            return
        after, limit = map(int, numbers)
        page = getattr(self.server.status, name)(after, min(max(limit, 1), _MAX_PAGE))
        kind = "application/x-ndjson"
        self._answer(HTTPStatus.OK, b"".join(page.lines), kind, page.headers())

    def _integrity(self) -> None:
        try:
            self.server.status.inspect()
        except AssertionError as error:
            line = extract_tb(error.__traceback__)[-1].line
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}: {line}\n")
        except TimeoutError:
            text = f"no step boundary in {_INSPECTION_S:g} s\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, text)
        else:
            self._answer(HTTPStatus.OK, "ok\n")

    def _answer(
        self,
        code: HTTPStatus,
        body: bytes | str,
        kind: str = "text/plain; charset=utf-8",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        whole = {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}
        for name, value in whole.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
