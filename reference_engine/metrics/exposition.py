"""The page `/metrics`: vLLM's names where it has them, `walkaway_engine_` for the rest.

Gauges and the worker's counters are as of its last report, which comes at the end of every step.
Aborted requests are in all counts of tokens and in all histograms.

The constant parts (heads, names, labels, bounds) are written once; a scrape fills in the numbers.
prometheus_client takes ten times as long, on the event loop that has to notice clients leaving; its
parser reads these pages in the tests.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from reference_engine.config import EngineConfig
from reference_engine.core.request import FinishReason
from reference_engine.metrics.collector import Collector, Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Each table: metric, its help, and the attribute of `Counters` or `Collector`.
_COUNTERS: Final = (
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
    (
        "walkaway_engine_recomputed_tokens",
        "Tokens computed again after a preemption.",
        "recomputed_tokens",
    ),
    (
        "walkaway_engine_saved_tokens",
        "Tokens that aborted requests had left of their max_tokens.",
        "saved_tokens",
    ),
    (
        "walkaway_engine_unread_prompt_tokens",
        "Prompt tokens computed for requests that were aborted before their first token.",
        "unread_prompt_tokens",
    ),
    (
        "walkaway_engine_retained_hits",
        "Retained blocks of cancelled requests that a later request used.",
        "retained_hits",
    ),
    ("walkaway_engine_steps", "Steps run.", "steps"),
    ("walkaway_engine_slot_steps", "Batch slots in use, summed over steps.", "slot_steps"),
)
_GAUGES: Final = (
    ("vllm:num_requests_running", "Requests in the batch.", "num_running"),
    ("vllm:num_requests_waiting", "Requests in the queue.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
    # The name that older dashboards ask for.
    ("vllm:gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
    ("walkaway_engine_free_blocks", "KV blocks that a request can take.", "free_blocks"),
    ("walkaway_engine_cached_blocks", "Free KV blocks that hold a prefix.", "cached_blocks"),
    ("walkaway_engine_total_blocks", "KV blocks in all.", "total_blocks"),
    ("walkaway_engine_batch_slots", "Most requests in a batch.", "batch_slots"),
    (
        "walkaway_engine_slot_utilisation",
        "Mean share of the batch slots in use, over all steps.",
        "slot_utilisation",
    ),
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

Samples = Iterable[tuple[str, float]]
Counts = Mapping[tuple[str, ...], int]


class Family(NamedTuple):
    """`samples` gives the present value of each series (name and labels)."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    samples: Callable[[], Samples]


class Page:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = [(_head(family), family.samples) for family in families]

    def write(self) -> bytes:
        parts = []
        for head, samples in self._families:
            parts.append(head)
            parts += [f"{series} {value}\n" for series, value in samples()]
        return "".join(parts).encode()


def metric_families(collector: Collector, config: EngineConfig) -> Iterator[Family]:
    labels = {"model_name": config.model, "engine": "0"}
    for name, text, field in _GAUGES:
        yield _gauge(labels, name, text, partial(attrgetter(field), collector))
    for name, text, field in _COUNTERS:
        yield _counter(labels, name, text, partial(attrgetter(f"counters.{field}"), collector))
    yield _counter(
        labels,
        "walkaway_engine_unread_tokens",
        "Tokens of cancelled requests that were not sent, because the client had left.",
        lambda: collector.unread_tokens,
    )
    yield _counter(
        labels,
        "walkaway_engine_unread_answers",
        "Answers that had ended when their client was cut off for not reading.",
        lambda: collector.unread_answers,
    )
    yield from _labelled_counters(labels, collector)
    for name, text, field in _HISTOGRAMS:
        yield _histogram(labels, name, text, getattr(collector, field))
    cache = {
        "block_size": str(config.block_size),
        "num_gpu_blocks": str(config.num_blocks),
        "enable_prefix_caching": str(config.enable_prefix_caching),
    }
    yield _gauge(labels | cache, "vllm:cache_config_info", "The KV cache's settings.", lambda: 1)


def _labelled_counters(labels: Mapping[str, str], collector: Collector) -> Iterator[Family]:
    def reclaimed() -> Counts:
        counters = collector.counters
        return {
            ("freed",): counters.reclaimed_freed,
            ("retained",): counters.reclaimed_retained,
            ("forced",): counters.reclaimed_forced,
        }

    yield _counter_by(
        labels,
        "vllm:request_success",
        "Requests ended, by reason.",
        ("finished_reason",),
        lambda: {(end,): collector.counters.finished.get(end, 0) for end in FinishReason},
    )
    yield _counter_by(
        labels,
        "walkaway_engine_ended_generation_tokens",
        "Tokens of ended requests, by how they ended.",
        ("finished_reason",),
        lambda: {(end,): collector.generated_by_end[end] for end in FinishReason},
    )
    yield _counter_by(
        labels,
        "walkaway_engine_reclaimed_blocks",
        "Blocks of cancelled requests, by what became of them.",
        ("outcome",),
        reclaimed,
    )
    yield _counter_by(
        labels,
        "walkaway_engine_abort_signals",
        "Aborts sent to the worker.",
        ("reason", "method"),
        lambda: collector.signals,
    )
    yield _counter_by(
        labels,
        "walkaway_engine_cancellations",
        "Aborts that took effect.",
        ("reason", "phase", "method"),
        lambda: collector.cancellations,
    )


def _gauge(labels: Mapping[str, str], name: str, text: str, read: Callable[[], float]) -> Family:
    series = _series(name, labels)
    return Family(name, "gauge", text, lambda: ((series, read()),))


def _counter(labels: Mapping[str, str], name: str, text: str, read: Callable[[], float]) -> Family:
    """`name` is without `_total`."""
    series = _series(f"{name}_total", labels)
    return Family(name, "counter", text, lambda: ((series, read()),))


def _counter_by(
    labels: Mapping[str, str],
    name: str,
    text: str,
    by: Sequence[str],
    counts: Callable[[], Counts],
) -> Family:
    def samples() -> Samples:
        for key, value in counts().items():
            yield _series(f"{name}_total", {**labels, **dict(zip(by, key, strict=True))}), value

    return Family(name, "counter", text, samples)


def _histogram(labels: Mapping[str, str], name: str, text: str, values: Histogram) -> Family:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    heads = [_series(f"{name}_bucket", {**labels, "le": bound}) for bound in bounds]
    count, total = _series(f"{name}_count", labels), _series(f"{name}_sum", labels)

    def samples() -> Samples:
        upto = list(accumulate(values.counts))
        yield from zip(heads, upto, strict=True)
        yield count, upto[-1]
        yield total, values.total

    return Family(name, "histogram", text, samples)


def _head(family: Family) -> str:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    return f"# HELP {name} {family.text}\n# TYPE {name} {family.kind}\n"


def _series(name: str, labels: Mapping[str, str]) -> str:
    written = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    return f"{name}{{{written}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
