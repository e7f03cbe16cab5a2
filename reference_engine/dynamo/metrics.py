"""The counts of a process's handlers, as a page for Prometheus, with Dynamo's names and ours."""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reference_engine.dynamo.serving import Served
from reference_engine.wire import LearnedBy

_LABELS: Final = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")


class Counts(Collector):
    """Read by a thread of its own."""

    def __init__(self, served: Mapping[str, Served]) -> None:
        self._served = served

    def serve(self, host: str, port: int) -> None:
        """Serve until the process ends. Raises OSError if the port is taken."""
        registry = CollectorRegistry()
        registry.register(self)
        start_http_server(port, host, registry)

    def collect(self) -> Iterator[Metric]:
        component = CounterMetricFamily(
            "dynamo_component_cancellation", "Calls that were cancelled.", labels=_LABELS
        )
        learned = CounterMetricFamily(
            "walkaway_worker_cancellations",
            "Calls that were cancelled, by how the process learned of it.",
            labels=(*_LABELS, "learned_by"),
        )
        inflight = GaugeMetricFamily(
            "dynamo_component_inflight_requests", "Handlers that have not ended.", labels=_LABELS
        )
        for path, served in list(self._served.items()):
            labels = path.split(".")
            component.add_metric(labels, served.cancellations.total())
            inflight.add_metric(labels, len(served.calls))
            for one in LearnedBy:
                learned.add_metric([*labels, one], served.cancellations[one])
        yield from (component, learned, inflight)
