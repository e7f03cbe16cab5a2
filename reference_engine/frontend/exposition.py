"""`/metrics`: vLLM's names where it has them, `walkaway_engine_` for the rest.

Values are those of the worker's last report, which comes at the end of every step.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reference_engine.config import EngineConfig
from reference_engine.frontend.worker_link import WorkerLink
from reference_engine.request import CancelReason, FinishReason


class EngineCollector(Collector):
    """Reads the link's state at each scrape."""

    def __init__(self, link: WorkerLink, config: EngineConfig) -> None:
        self._link = link
        self._config = config

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterable[Metric]:
        link, config = self._link, self._config
        used = 1.0 - link.free_blocks / config.num_blocks
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", link.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", link.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
            ("walkaway_engine_free_blocks", "KV blocks that can be given out.", link.free_blocks),
            ("walkaway_engine_total_blocks", "KV blocks in all.", config.num_blocks),
            ("walkaway_engine_batch_slots", "Most requests in a batch.", config.max_num_seqs),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def _counters(self) -> Iterable[Metric]:
        counters = self._link.counters
        for name, text, value in (
            ("vllm:generation_tokens", "Tokens sampled, read or not.", counters.generated_tokens),
            ("vllm:prompt_tokens", "Prompt tokens of prefilled requests.", counters.prompt_tokens),
            ("vllm:num_preemptions", "Requests preempted.", counters.preemptions),
            ("walkaway_engine_steps", "Steps run.", counters.steps),
            (
                "walkaway_engine_recomputed_tokens",
                "Computed tokens that preemptions threw away.",
                counters.recomputed_tokens,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests ended, by reason.", labels=["finished_reason"]
        )
        for reason in FinishReason:
            finished.add_metric([reason], counters.finished.get(reason, 0))
        yield finished
        cancelled = CounterMetricFamily(
            "walkaway_engine_cancellations", "Aborts sent to the worker.", labels=["reason"]
        )
        for cancel in CancelReason:
            cancelled.add_metric([cancel], self._link.cancellations.get(cancel, 0))
        yield cancelled


def metrics_registry(link: WorkerLink, config: EngineConfig) -> CollectorRegistry:
    """A registry of this engine alone, without the process's own metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(link, config))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The text format, version 0.0.4."""
    return generate_latest(registry)
