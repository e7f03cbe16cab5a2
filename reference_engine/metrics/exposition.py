"""The page `/metrics`: vLLM's names where it has them, `walkaway_engine_` for the rest.

The constant parts (heads, names, labels, bounds) are written once; a scrape fills in the numbers.
prometheus_client takes ten times as long, on the event loop that has to notice clients leaving.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Final

from reference_engine.config import EngineConfig
from reference_engine.metrics.collector import Histogram, MetricsCollector

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Each table: metric, its help, and the attribute that has its value, where that is not the metric's
# name without `walkaway_engine_`. The attribute is one of `MetricsCollector`, in the first table of
# its `counters`.
_WORKER_COUNTERS: Final = (
    ("vllm:generation_tokens", "Tokens sampled, read or not.", "generated_tokens"),
    ("vllm:prompt_tokens", "Prompt tokens of prefilled requests.", "prompt_tokens"),
    ("vllm:num_preemptions", "Requests preempted.", "preemptions"),
    (
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache at a first admission.",
        "prefix_queried_tokens",
    ),
    (
        "vllm:prefix_cache_hits",
        "Tokens found in the prefix cache at a first admission.",
        "prefix_hit_tokens",
    ),
    (
        "walkaway_engine_resumed_prefix_queries",
        "Tokens looked up in the prefix cache for a preempted request.",
        "resumed_queried_tokens",
    ),
    (
        "walkaway_engine_resumed_prefix_hits",
        "Tokens found in the prefix cache for a preempted request.",
        "resumed_hit_tokens",
    ),
    ("walkaway_engine_recomputed_tokens", "Tokens computed again after a preemption."),
    (
        "walkaway_engine_swapped_out_requests",
        "Requests preempted by a copy of their blocks to the host.",
    ),
    ("walkaway_engine_swapped_out_blocks", "Blocks copied to the host."),
    ("walkaway_engine_swapped_in_requests", "Requests resumed from the host."),
    (
        "walkaway_engine_swapped_in_blocks",
        "Blocks copied back from the host; cached prefixes need no copy.",
    ),
    ("walkaway_engine_handed_over_requests", "Requests that prefill workers handed over."),
    (
        "walkaway_engine_taken_over_requests",
        "Requests that other workers began: handed over, or migrated.",
    ),
    ("walkaway_engine_saved_tokens", "Tokens that aborted requests had left of their max_tokens."),
    (
        "walkaway_engine_unread_prompt_tokens",
        "Prompt tokens computed for requests that were aborted before their first token.",
    ),
    (
        "walkaway_engine_retained_hits",
        "Retained blocks of cancelled requests that a later request used.",
    ),
    ("walkaway_engine_steps", "Steps run."),
    ("walkaway_engine_slot_steps", "Batch slots in use, summed over steps."),
)
_COUNTERS: Final = (
    (
        "walkaway_engine_unread_tokens",
        "Tokens of cancelled requests that were not sent, because the client had left.",
    ),
    (
        "walkaway_engine_closed_before_stream",
        "Clients that left before a token of a stream, or before their whole answer.",
    ),
    ("walkaway_engine_closed_while_streaming", "Clients that left between two tokens of a stream."),
    (
        "walkaway_engine_unread_answers",
        "Answers that had ended when their client was cut off for not reading.",
    ),
)
_GAUGES: Final = (
    ("vllm:num_requests_running", "Requests in the batch.", "num_running"),
    ("vllm:num_requests_waiting", "Requests in the queue.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
    # The name that older dashboards ask for.
    ("vllm:gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
    ("walkaway_engine_free_blocks", "KV blocks that a request can take."),
    ("walkaway_engine_cached_blocks", "Free KV blocks that hold a prefix."),
    ("walkaway_engine_host_blocks", "Host blocks that hold swapped requests."),
    ("walkaway_engine_total_blocks", "KV blocks in all."),
    ("walkaway_engine_batch_slots", "Most requests in a batch."),
    ("walkaway_engine_slot_utilisation", "Mean share of the batch slots in use, over all steps."),
)
_HISTOGRAMS: Final = (
    ("vllm:time_to_first_token_seconds", "From arrival to the first token.", "first_token_s"),
    ("vllm:inter_token_latency_seconds", "Between a request's tokens.", "next_token_s"),
    # The name that older dashboards ask for.
    ("vllm:time_per_output_token_seconds", "Between a request's tokens.", "next_token_s"),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time of a request's tokens after its first.",
        "token_mean_s",
    ),
    ("vllm:e2e_request_latency_seconds", "From arrival to the end.", "e2e_s"),
    ("vllm:request_queue_time_seconds", "From arrival to admission.", "queue_s"),
    ("vllm:request_prefill_time_seconds", "From admission to the first token.", "prefill_s"),
    ("vllm:request_decode_time_seconds", "From the first token to the end.", "decode_s"),
    ("vllm:request_inference_time_seconds", "From admission to the end.", "inference_s"),
    ("vllm:request_prompt_tokens", "Prompt tokens of a request.", "prompt_tokens"),
    ("vllm:request_generation_tokens", "Tokens generated for an answer.", "generated_tokens"),
    (
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest of a request's answers.",
        "most_generated_tokens",
    ),
    ("vllm:request_params_max_tokens", "max_tokens asked for.", "max_tokens"),
    ("vllm:request_params_n", "Answers asked for.", "num_answers"),
    ("vllm:iteration_tokens_total", "Tokens computed in a step.", "step_tokens"),
    (
        "walkaway_engine_cancel_latency_seconds",
        "From the cancellation of a request until its blocks were free.",
        "cancel_s",
    ),
)

# Metric, its help, the labels, and the attribute of `MetricsCollector` that counts by their values.
_LABELLED_COUNTERS: Final = (
    ("vllm:request_success", "Requests ended, by reason.", ("finished_reason",), "ended_by_reason"),
    (
        "walkaway_engine_ended_generation_tokens",
        "Tokens of ended requests, by how they ended.",
        ("finished_reason",),
        "generated_by_reason",
    ),
    (
        "walkaway_engine_reclaimed_blocks",
        "Blocks of cancelled requests, by what became of them.",
        ("outcome",),
        "reclaimed_blocks",
    ),
    (
        "walkaway_engine_early_stops",
        "Answers ended early, by the condition that was met.",
        ("condition",),
        "early_stops",
    ),
    (
        "walkaway_engine_early_stop_tokens_saved",
        "Tokens that answers ended early had left of their max_tokens.",
        ("condition",),
        "early_stop_saved_tokens",
    ),
    (
        "walkaway_engine_abort_signals",
        "Aborts sent to the worker.",
        ("reason", "method"),
        "signals",
    ),
    (
        "walkaway_engine_cancellations",
        "Aborts that took effect.",
        ("reason", "phase", "method"),
        "cancellations",
    ),
)

Samples = Iterable[tuple[str, float]]


class MetricsPage:
    def __init__(self, collector: MetricsCollector, config: EngineConfig) -> None:
        self._labels = {"model_name": config.model, "engine": "0"}
        self._families: list[tuple[str, Callable[[], Samples]]] = []
        for name, text, *field in _GAUGES:
            read = partial(attrgetter(_attribute(name, *field)), collector)
            self._add_number(name, "gauge", text, read)
        for name, text, *field in _WORKER_COUNTERS:
            read = partial(attrgetter(f"counters.{_attribute(name, *field)}"), collector)
            self._add_number(f"{name}_total", "counter", text, read)
        for name, text in _COUNTERS:
            read = partial(attrgetter(_attribute(name)), collector)
            self._add_number(f"{name}_total", "counter", text, read)
        for name, text, by, counted in _LABELLED_COUNTERS:
            counts = partial(attrgetter(counted), collector)
            self._add_labelled_counter(f"{name}_total", text, by, counts, self._labels)
        text = "Requests whose client left; a request counts once."
        name, by = "dynamo_frontend_model_cancellation", ("model", "endpoint", "request_type")
        self._add_labelled_counter(f"{name}_total", text, by, lambda: collector.leavings, {})
        for name, text, *field in _HISTOGRAMS:
            self._add_histogram(name, text, getattr(collector, _attribute(name, *field)))
        cache = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
        }
        text = "The KV cache's settings."
        self._add_number("vllm:cache_config_info", "gauge", text, lambda: 1, **cache)

    def write(self) -> bytes:
        parts = []
        for head, samples in self._families:
            parts.append(head)
            parts += [f"{series} {value}\n" for series, value in samples()]
        return "".join(parts).encode()

    def _add_number(
        self, name: str, kind: str, text: str, read: Callable[[], float], **labels: str
    ) -> None:
        series = self._series(name, **labels)
        self._add(name, kind, text, lambda: ((series, read()),))

    def _add_labelled_counter(
        self,
        name: str,
        text: str,
        by: tuple[str, ...],
        counts: Callable[[], Mapping[tuple[str, ...], int]],
        shared: Mapping[str, str],
    ) -> None:
        def samples() -> Samples:
            for values, count in counts().items():
                yield _series(name, {**shared, **dict(zip(by, values, strict=True))}), count

        self._add(name, "counter", text, samples)

    def _add_histogram(self, name: str, text: str, values: Histogram) -> None:
        bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
        heads = [self._series(f"{name}_bucket", le=bound) for bound in bounds]
        count, total = self._series(f"{name}_count"), self._series(f"{name}_sum")

        def samples() -> Samples:
            upto = list(accumulate(values.counts))
            yield from zip(heads, upto, strict=True)
            yield count, upto[-1]
            yield total, values.total

        self._add(name, "histogram", text, samples)

    def _add(self, name: str, kind: str, text: str, samples: Callable[[], Samples]) -> None:
        self._families.append((f"# HELP {name} {text}\n# TYPE {name} {kind}\n", samples))

    def _series(self, name: str, **labels: str) -> str:
        return _series(name, self._labels | labels)


def _attribute(metric: str, named: str | None = None) -> str:
    return named or metric.removeprefix("walkaway_engine_")


def _series(name: str, labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    written = ",".join(f'{label}="{value.translate(escapes)}"' for label, value in labels.items())
    return f"{name}{{{written}}}"
