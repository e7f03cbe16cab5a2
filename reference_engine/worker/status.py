"""The worker's own port: what it counts, its log of events and of steps, its checks of itself.

The log has the events of all its requests, so a lost frontend's requests can be followed here. A
thread of its own answers each request.
"""

import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from traceback import extract_tb
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from reference_engine.api.bodies import read_page
from reference_engine.api.journal import JournalPage, Log
from reference_engine.api.schemas import ApiError, LifecycleEntry
from reference_engine.core.request import FinishReason
from reference_engine.protocol import StepReport, WorkerSettings
from reference_engine.wire import LearnedBy
from reference_engine.worker.engine_io import FrontendShare
from reference_engine.worker.frontend_connections import Frontends
from reference_engine.worker.inbox import Inbox, Inspection

_INSPECTION_S: Final = 30.0  # for the step in progress
_COMPONENT: Final = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")
_GAUGES: Final = {
    "num_running": "Batch slots in use.",
    "num_waiting": "Requests that wait.",
    "free_blocks": "Blocks that can be given to requests.",
}


class WorkerStatus(Collector):
    """The step loop writes the logs, threads that answer read them: both under `_lock`."""

    def __init__(self, settings: WorkerSettings, frontends: Frontends, inbox: Inbox) -> None:
        self._settings = settings
        self._frontends = frontends
        self._inbox = inbox
        self._lock = threading.Lock()
        self._latest: StepReport | None = None
        self._num_aborted = 0  # as of `_latest`, whose counters still change
        self._lifecycle, self._steps = Log(), Log()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def report(self, report: StepReport, shares: Mapping[str, FrontendShare]) -> None:
        """Note it, then pass it on."""
        with self._lock:
            self._latest = report
            self._num_aborted = report.counters.finished.get(FinishReason.ABORT, 0)
            if report.step is not None:
                self._steps.append(report.step)
            for event in (event for share in shares.values() for event in share.events):
                entry = LifecycleEntry(
                    seq=self._lifecycle.next_number,
                    client_request_id=None,
                    worker=report.worker,
                    **asdict(event),
                )
                self._lifecycle.append(entry)
        self._frontends.report(report, shares)

    def page(self, path: str, query: Mapping[str, str]) -> JournalPage:
        """Raises ApiError."""
        log = self._steps if path.endswith("steps") else self._lifecycle
        with self._lock:
            return log.after(*read_page(query))

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
        text = "Requests that the engine aborted; each of n answers is one."
        yield CounterMetricFamily("walkaway_worker_aborted_requests", text, self._num_aborted)
        for name, text in _GAUGES.items():
            value = 0 if report is None else getattr(report, name)
            yield GaugeMetricFamily(f"walkaway_worker_{name}", text, value)


class StatusServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, status: WorkerStatus, listening: socket.socket) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.status = status

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a reader that has gone is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    protocol_version = "HTTP/1.1"
    timeout = 75.0  # longer than clients keep an idle connection

    def do_GET(self) -> None:
        url, status = urlsplit(self.path), self.server.status
        match url.path:
            case "/metrics":
                self._answer(200, status.metrics(), CONTENT_TYPE_LATEST)
            case "/walkaway/lifecycle" | "/walkaway/steps":
                try:
                    page = status.page(url.path, dict(parse_qsl(url.query)))
                except ApiError as error:
                    self._answer(error.status, f"{error}\n")
                else:
                    body, kind = b"".join(page.lines), "application/x-ndjson"
                    self._answer(200, body, kind, page.headers())
            case "/walkaway/integrity":
                self._answer(*_integrity(status))
            case _:
                text = "paths: /metrics, /walkaway/lifecycle, /walkaway/steps, /walkaway/integrity"
                self._answer(404, f"no such path; {text}\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the base's name
        """Requests are not logged."""

    def _answer(
        self,
        code: int,
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


def _integrity(status: WorkerStatus) -> tuple[int, str]:
    try:
        status.inspect()
    except AssertionError as error:
        return 500, f"{error}: {extract_tb(error.__traceback__)[-1].line}\n"
    except TimeoutError:
        return 503, f"no step boundary in {_INSPECTION_S:g} s\n"
    return 200, "ok\n"
