"""Prometheus' text formats, written in a way that bears being asked for twenty times a second.

All that does not change is put together once: heads, names, labels, bounds. A scrape fills in the
numbers. (prometheus_client takes ten times as long, on the event loop that has to notice clients
leaving; its parsers read these pages in the tests.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from reference_engine.config import EngineConfig
from reference_engine.core.request import FinishReason
from reference_engine.metrics.collector import Collector, Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[str, float]]


class Family(NamedTuple):
    """One metric. `samples` gives, at every scrape, series (name and labels) with their values."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    samples: Callable[[], Samples]


class Labels:
    """Those that every series has, written once; more can be added in front of a value."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._common = _written(labels)

    def series(self, name: str, **more: str) -> str:
        """A series as it stands in front of its value."""
        written = f"{self._common},{_written(more)}" if more else self._common
        return f"{name}{{{written}}}"


def gauge(labels: Labels, name: str, text: str, read: Callable[[], float]) -> Family:
    series = labels.series(name)
    return Family(name, "gauge", text, lambda: ((series, read()),))


def counter(labels: Labels, name: str, text: str, read: Callable[[], float]) -> Family:
    """`name` is without `_total`."""
    series = labels.series(f"{name}_total")
    return Family(name, "counter", text, lambda: ((series, read()),))


def counter_by(
    labels: Labels,
    name: str,
    text: str,
    reads: Mapping[str, Callable[[], float]],
    *,
    label: str,
) -> Family:
    """One series for each value of a label, there from the start."""
    series = [(labels.series(f"{name}_total", **{label: key}), reads[key]) for key in reads]
    return Family(name, "counter", text, lambda: ((head, read()) for head, read in series))


def tally(
    labels: Labels,
    name: str,
    text: str,
    counts: Mapping[tuple[str, ...], int],
    *,
    by: Sequence[str],
) -> Family:
    """A series for each combination of labels that has been counted so far."""

    def samples() -> Samples:
        for key, value in counts.items():
            more = dict(zip(by, key, strict=True))
            yield labels.series(f"{name}_total", **more), value

    return Family(name, "counter", text, samples)


def histogram(labels: Labels, name: str, text: str, values: Histogram) -> Family:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    heads = [labels.series(f"{name}_bucket", le=bound) for bound in bounds]
    count, total = labels.series(f"{name}_count"), labels.series(f"{name}_sum")

    def samples() -> Samples:
        upto = list(accumulate(values.counts))
        yield from zip(heads, upto, strict=True)
        yield count, upto[-1]
        yield total, values.total

    return Family(name, "histogram", text, samples)


class Page:
    """What `/metrics` answers: all but the numbers is written once, in advance."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = [(_head(family), family.samples) for family in families]

    def write(self) -> bytes:
        parts = []
        for head, samples in self._families:
            parts.append(head)
            parts += [f"{series} {value}\n" for series, value in samples()]
        return "".join(parts).encode()


def _head(family: Family) -> str:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    return f"# HELP {name} {family.text}\n# TYPE {name} {family.kind}\n"


def _written(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# Metric, its help, the field of `Counters`.
_COUNTERS: Final = (
    ("vllm:generation_tokens", "Tokens sampled, read or not.", "generated_tokens"),
    ("vllm:prompt_tokens", "Prompt tokens of prefilled requests.", "prompt_tokens"),
    ("vllm:num_preemptions", "Requests preempted.", "preemptions"),
    (
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache at a first admission.",
        "prefix_queried_tokens",
    ),
    ("vllm:prefix_cache_hits", "Tokens found there.", "prefix_hit_tokens"),
    (
        "walkaway_engine_resumed_prefix_queries",
        "Tokens looked up in the prefix cache for a preempted request.",
        "resumed_queried_tokens",
    ),
    ("walkaway_engine_resumed_prefix_hits", "Tokens found there.", "resumed_hit_tokens"),
    (
        "walkaway_engine_recomputed_tokens",
        "Tokens computed again after a preemption.",
        "recomputed_tokens",
    ),
    (
        "walkaway_engine_saved_tokens",
        "What aborted requests had left of their max_tokens.",
        "saved_tokens",
    ),
    (
        "walkaway_engine_unread_prompt_tokens",
        "Prompt tokens computed for requests that were aborted before their first token.",
        "unread_prompt_tokens",
    ),
    (
        "walkaway_engine_retained_hits",
        "Retained blocks of cancelled requests that somebody could use.",
        "retained_hits",
    ),
    ("walkaway_engine_steps", "Steps run.", "steps"),
    ("walkaway_engine_slot_steps", "Batch slots in use, summed over steps.", "slot_steps"),
)
# What became of a cancelled request's blocks, and the field of `Counters`.
_RECLAIMED: Final = {
    "freed": "reclaimed_freed",
    "retained": "reclaimed_retained",
    "forced": "reclaimed_forced",
}
# Metric, its help, the field of `Collector`.
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
        "From the cancelling of a request until its blocks were free.",
        "cancel_s",
    ),
)


def metric_families(collector: Collector, config: EngineConfig) -> list[Family]:
    """All metrics, over the state of the collector."""
    labels = Labels({"model_name": config.model, "engine": "0"})
    return [
        *_gauges(labels, collector, config),
        *_counters(labels, collector),
        *_cancellations(labels, collector),
        *(
            histogram(labels, name, text, getattr(collector, field))
            for name, text, field in _HISTOGRAMS
        ),
        _cache_config(config),
    ]


def _gauges(labels: Labels, collector: Collector, config: EngineConfig) -> list[Family]:
    def usage() -> float:
        return 1.0 - collector.free_blocks / config.num_blocks

    def utilisation() -> float:
        counters = collector.counters
        return counters.slot_steps / max(1, counters.steps * config.max_num_seqs)

    rows: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("vllm:num_requests_running", "Requests in the batch.", lambda: collector.num_running),
        ("vllm:num_requests_waiting", "Requests in the queue.", lambda: collector.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage),
        # The name that older dashboards ask for.
        ("vllm:gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage),
        (
            "walkaway_engine_free_blocks",
            "KV blocks that can be given out.",
            lambda: collector.free_blocks,
        ),
        (
            "walkaway_engine_cached_blocks",
            "Free KV blocks that hold a prefix.",
            lambda: collector.cached_blocks,
        ),
        ("walkaway_engine_total_blocks", "KV blocks in all.", lambda: config.num_blocks),
        ("walkaway_engine_batch_slots", "Most requests in a batch.", lambda: config.max_num_seqs),
        (
            "walkaway_engine_slot_utilisation",
            "Mean share of the batch slots in use, over all steps.",
            utilisation,
        ),
    )
    return [gauge(labels, *row) for row in rows]


def _counters(labels: Labels, collector: Collector) -> list[Family]:
    def read(field: str) -> float:
        value: int = getattr(collector.counters, field)
        return value

    def ended(reason: str) -> float:
        return collector.counters.finished.get(reason, 0)

    return [
        *(counter(labels, name, text, partial(read, field)) for name, text, field in _COUNTERS),
        counter_by(
            labels,
            "vllm:request_success",
            "Requests ended, by reason.",
            {reason: partial(ended, reason) for reason in FinishReason},
            label="finished_reason",
        ),
        counter_by(
            labels,
            "walkaway_engine_reclaimed_blocks",
            "Blocks of cancelled requests, by what became of them.",
            {outcome: partial(read, field) for outcome, field in _RECLAIMED.items()},
            label="outcome",
        ),
    ]


def _cancellations(labels: Labels, collector: Collector) -> list[Family]:
    def generated(reason: str) -> float:
        return collector.generated_by_end[reason]

    return [
        tally(
            labels,
            "walkaway_engine_abort_signals",
            "Aborts sent to the worker.",
            collector.signals,
            by=("reason", "method"),
        ),
        tally(
            labels,
            "walkaway_engine_cancellations",
            "Aborts that took effect.",
            collector.cancellations,
            by=("reason", "phase", "method"),
        ),
        counter(
            labels,
            "walkaway_engine_unread_tokens",
            "Tokens of cancelled requests that a client who had left was never sent.",
            lambda: collector.unread_tokens,
        ),
        counter(
            labels,
            "walkaway_engine_unread_answers",
            "Answers that had ended when their client, who had stopped reading, was cut off.",
            lambda: collector.unread_answers,
        ),
        counter_by(
            labels,
            "walkaway_engine_ended_generation_tokens",
            "Tokens of ended requests, by how they ended.",
            {reason: partial(generated, reason) for reason in FinishReason},
            label="finished_reason",
        ),
    ]


def _cache_config(config: EngineConfig) -> Family:
    labels = Labels(
        {
            "model_name": config.model,
            "engine": "0",
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
        }
    )
    return gauge(labels, "vllm:cache_config_info", "The KV cache's settings.", lambda: 1)
