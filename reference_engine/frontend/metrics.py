"""What `/metrics` shows: vLLM's names where it has them, `walkaway_engine_` for the rest.

Gauges and the worker's counters are as of its last report, which comes at the end of every step.
Aborted requests are in all counts of tokens and in all histograms.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from reference_engine.config import EngineConfig
from reference_engine.frontend import exposition as expose
from reference_engine.frontend.exposition import Family, Labels
from reference_engine.frontend.worker_link import WorkerLink
from reference_engine.request import FinishReason

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
# Metric, its help, the field of `Statistics`.
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


def metric_families(link: WorkerLink, config: EngineConfig) -> list[Family]:
    """All metrics, over the state of the link."""
    labels = Labels({"model_name": config.model, "engine": "0"})
    return [
        *_gauges(labels, link, config),
        *_counters(labels, link),
        *_cancellations(labels, link),
        *(
            expose.histogram(labels, name, text, getattr(link.statistics, field))
            for name, text, field in _HISTOGRAMS
        ),
        _cache_config(config),
    ]


def _gauges(labels: Labels, link: WorkerLink, config: EngineConfig) -> list[Family]:
    def usage() -> float:
        return 1.0 - link.free_blocks / config.num_blocks

    def utilisation() -> float:
        counters = link.counters
        return counters.slot_steps / max(1, counters.steps * config.max_num_seqs)

    rows: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("vllm:num_requests_running", "Requests in the batch.", lambda: link.num_running),
        ("vllm:num_requests_waiting", "Requests in the queue.", lambda: link.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage),
        # The name that older dashboards ask for.
        ("vllm:gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage),
        (
            "walkaway_engine_free_blocks",
            "KV blocks that can be given out.",
            lambda: link.free_blocks,
        ),
        (
            "walkaway_engine_cached_blocks",
            "Free KV blocks that hold a prefix.",
            lambda: link.cached_blocks,
        ),
        ("walkaway_engine_total_blocks", "KV blocks in all.", lambda: config.num_blocks),
        ("walkaway_engine_batch_slots", "Most requests in a batch.", lambda: config.max_num_seqs),
        (
            "walkaway_engine_slot_utilisation",
            "Mean share of the batch slots in use, over all steps.",
            utilisation,
        ),
    )
    return [expose.gauge(labels, *row) for row in rows]


def _counters(labels: Labels, link: WorkerLink) -> list[Family]:
    def read(field: str) -> float:
        value: int = getattr(link.counters, field)
        return value

    def ended(reason: str) -> float:
        return link.counters.finished.get(reason, 0)

    return [
        *(
            expose.counter(labels, name, text, partial(read, field))
            for name, text, field in _COUNTERS
        ),
        expose.counter_by(
            labels,
            "vllm:request_success",
            "Requests ended, by reason.",
            {reason: partial(ended, reason) for reason in FinishReason},
            label="finished_reason",
        ),
        expose.counter_by(
            labels,
            "walkaway_engine_reclaimed_blocks",
            "Blocks of cancelled requests, by what became of them.",
            {outcome: partial(read, field) for outcome, field in _RECLAIMED.items()},
            label="outcome",
        ),
    ]


def _cancellations(labels: Labels, link: WorkerLink) -> list[Family]:
    statistics = link.statistics

    def generated(reason: str) -> float:
        return statistics.generated_by_end[reason]

    return [
        expose.tally(
            labels,
            "walkaway_engine_abort_signals",
            "Aborts sent to the worker.",
            statistics.signals,
            by=("reason", "method"),
        ),
        expose.tally(
            labels,
            "walkaway_engine_cancellations",
            "Aborts that took effect.",
            statistics.cancellations,
            by=("reason", "phase", "method"),
        ),
        expose.counter(
            labels,
            "walkaway_engine_unread_tokens",
            "Tokens of cancelled requests that a client who had left was never sent.",
            lambda: statistics.unread_tokens,
        ),
        expose.counter(
            labels,
            "walkaway_engine_unread_answers",
            "Answers that had ended when their client, who had stopped reading, was cut off.",
            lambda: statistics.unread_answers,
        ),
        expose.counter_by(
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
    return expose.gauge(labels, "vllm:cache_config_info", "The KV cache's settings.", lambda: 1)
