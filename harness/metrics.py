"""Which figures are shown first, and of arms that are compared, which of their figures."""

from collections.abc import Collection, Mapping, Sequence

from harness.formatting import is_only_limited
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
# Beside the others where requests come by a schedule.
OPEN_LOOP_HEADLINES = ("ttft_from_intended_s", "e2e_s", "e2e_from_intended_s", "start_delay_s")
ARM_HEADLINES = ("goodput_rps", "preemptions", "recomputed_tokens")


def headlines(metrics: Collection[str]) -> Sequence[str]:
    """The metrics that are shown first, of a run that has these."""
    is_open_loop = OPEN_LOOP_HEADLINES[0] in metrics
    return (*HEADLINES, *OPEN_LOOP_HEADLINES) if is_open_loop else HEADLINES


def headline_figures(
    arms: Mapping[str, Mapping[str, Metric]], first: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """What arms are compared by, as (metric, figure): median and p99 of times that are known of
    single requests, else the mean.

    `first`: the metrics that the workload's question is about; the others follow.
    """
    pairs = []
    present = {name for metrics in arms.values() for name in metrics}
    for name in dict.fromkeys([*first, *headlines(present), *ARM_HEADLINES]):
        found = [metrics[name] for metrics in arms.values() if name in metrics]
        keys = ("p50", "p99") if any(_is_known_one_by_one(one) for one in found) else ("mean",)
        pairs += [(name, key) for key in keys if any(_has(one, key) for one in found)]
    return pairs


def _is_known_one_by_one(metric: Metric) -> bool:
    return metric.unit == "s" and _has(metric, "p50")


def _has(metric: Metric, key: str) -> bool:
    if key == "mean" and is_only_limited(metric):
        return True
    return getattr(metric, key) is not None or key in metric.lower_bounds
