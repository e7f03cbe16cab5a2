"""Which figures are shown first, and of arms that are compared, which of their figures."""

from collections.abc import Mapping, Sequence

from harness.records import Metric

HEADLINES = (
    "cancel_latency_s",
    "cancel_latency_steps",
    "cancel_latency_prefill_s",
    "cancel_latency_prefill_steps",
    "removed_at_first_boundary",
    "detect_s",
    "signal_s",
    "wait_s",
    "free_s",
    "slot_refill_s",
    "refilled_next_schedule",
    "slot_recovery_s",
    "probe_ttft_unloaded_s",
    "probe_ttft_control_s",
    "wasted_tokens",
    "wasted_in_flight_tokens",
    "wasted_after_close_tokens",
    "wasted_prompt_tokens",
    "ghost_rate",
    "leaked_slots",
    "leaked_blocks",
    "leaked_slots_per_abandon",
    "leaked_blocks_per_abandon",
    "memory_per_abandon",
    "handles_per_abandon",
    "slot_utilisation",
    "throughput_tps",
    "ttft_s",
    "itl_s",
    "ttft_again_s",
    "cached_again",
    "attempts_per_answer",
    "canary_mismatch_rate",
    "canary_ttft_s",
    "canary_itl_s",
    "storm_clear_s",
    "storm_spread_s",
)
ARM_HEADLINES = (*HEADLINES, "goodput_rps", "preemptions", "recomputed_tokens")


def headline_figures(
    arms: Mapping[str, Mapping[str, Metric]], first: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """What arms are compared by, as (metric, figure): median and p99 of times, else the mean.

    `first`: the metrics that the workload's question is about; the others follow.
    """
    pairs = []
    for name in dict.fromkeys([*first, *ARM_HEADLINES]):
        found = [metrics[name] for metrics in arms.values() if name in metrics]
        keys = ("p50", "p99") if any(one.unit == "s" for one in found) else ("mean",)
        pairs += [(name, key) for key in keys if any(_has(one, key) for one in found)]
    return pairs


def _has(metric: Metric, key: str) -> bool:
    return getattr(metric, key) is not None or key in metric.lower_bounds
