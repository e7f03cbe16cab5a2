"""The table of metrics: everything to be said of a metric, apart from its value in a run.

An entry here and a formula in `harness.analysis` make a metric: the summary, the gate, comparisons,
the terminal and the pages take its name, unit, words, direction and place from this table. Entries
stand in the order of `summary.json`; `rank` orders the headlines.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

import msgspec

from harness.formatting import is_only_limited
from harness.records import Metric

# sample: one value a request, a trial or a step, with quantiles. proportion: hits of n, with a
# one-sided bound. reading: one number a run. idle: a reading of the server at rest, so certain.
# slope: change with each abandon, over several loops.
Kind = Literal["sample", "proportion", "reading", "idle", "slope"]
Better = Literal["less", "more", "neither"]
# always; open loop: where requests come by a schedule; arms: only where arms are compared.
Shown = Literal["always", "open loop", "arms"]

CANCEL_LATENCY: Final = "cancel_latency_s"
CANCEL_LATENCY_STEPS: Final = "cancel_latency_steps"
SLOT_RECOVERY: Final = "slot_recovery_s"
WASTED_TOKENS: Final = "wasted_tokens"
GHOST_RATE: Final = "ghost_rate"
NOBODY_LEFT: Final = "no request was abandoned"  # why there is no figure of cancels
PROBES_LEFT_OUT: Final = "the probes after the load were left out"  # the warning's beginning
ENERGY_PER_TOKEN: Final = "energy_per_token_j"
STAGES: Final = ("detect_s", "signal_s", "wait_s", "free_s")
_OPEN_LOOP_SIGN: Final = "ttft_from_intended_s"  # only an open loop has it
_CAPITALS: Final = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "gpu": "GPU"}


class MetricInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `shows` is a sentence, `formula` how it is computed, `label` its name in a
    sentence (by default that of the table in words).

    `good`, for a metric followed over many runs: the hoped-for course. `rank`: its place among the
    headlines, `shown` in which runs it is one. `in_brief`: it is shown without `--all`.
    `never_over`: a censored value stands for one that never ended. `of_tokens`: it rests on how
    tokens were counted. `per_run`: several runs together have the mean of their readings, not a
    figure of all their rows. `from_server_alone`: a slow client does not move it. `part_of` names
    the metric that it is a part of, or equals in another unit. `baseline_figure` is judged against
    a baseline if no limit says more. `instead`: the metrics, nearest first, that answer the
    question if a server hides this one.
    """

    name: str = ""
    unit: str = "s"
    label: str = ""
    shows: str
    formula: str
    kind: Kind = "sample"
    better: Better = "less"
    rank: int | None = None
    shown: Shown = "always"
    in_brief: bool = False
    on_web_tab: bool = False
    good: str | None = None
    never_over: bool = False
    of_tokens: bool = False
    per_run: bool = False
    may_be_negative: bool = False
    from_server_alone: bool = False
    part_of: str | None = None
    baseline_figure: str | None = None
    instead: tuple[str, ...] = ()


_part = partial(MetricInfo, never_over=True, part_of=CANCEL_LATENCY)
_cancel = partial(MetricInfo, never_over=True)
_share = partial(MetricInfo, unit="ratio", kind="proportion")
_leak = partial(MetricInfo, kind="idle", may_be_negative=True, from_server_alone=True, per_run=True)
_slope = partial(MetricInfo, kind="slope", may_be_negative=True)
_reading = partial(MetricInfo, kind="reading")
_run_reading = partial(MetricInfo, kind="reading", per_run=True)

_TABLE: Final[Mapping[str, MetricInfo]] = {
    "detect_s": _part(
        shows="From a user's leaving until the server saw the disconnect.",
        formula="disconnected - t0",
        rank=6,
    ),
    "signal_s": _part(
        shows="From the server's seeing the disconnect until its worker heard of it.",
        formula="abort received - disconnected",
        rank=7,
    ),
    "wait_s": _part(
        shows="From the worker's hearing of it until the request was out of the batch.",
        formula="removed - abort received",
        rank=8,
    ),
    "free_s": _part(
        shows="From the request's leaving the batch until its blocks were reclaimed.",
        formula="blocks reclaimed - removed",
        rank=9,
    ),
    "hop_s": _part(
        label="hop",
        shows="From one worker's hearing of an abort until the next tier's worker heard of it.",
        formula="abort received at the next tier - at the tier before",
        rank=55,
    ),
    CANCEL_LATENCY: _cancel(
        shows="From a user's leaving until the server held nothing for them.",
        formula="blocks reclaimed - t0; of a queued request: left the queue - t0",
        rank=1,
        in_brief=True,
        on_web_tab=True,
        good="flat, at one or two steps of the engine.",
        baseline_figure="mean",
        instead=(SLOT_RECOVERY, "leaked_slots"),
    ),
    CANCEL_LATENCY_STEPS: _part(
        unit="steps",
        shows="The step boundaries that passed until the server held nothing for a user who had "
        "left.",
        formula="step boundaries in (t0, blocks reclaimed]",
        rank=2,
        in_brief=True,
        good="flat, at one or two; it does not depend on the machine.",
        baseline_figure="mean",
        instead=(CANCEL_LATENCY, SLOT_RECOVERY, "leaked_slots"),
    ),
    "cancel_latency_prefill_s": _cancel(
        shows="The cancel latency of long prompts that were left during their prefill.",
        formula="as cancel_latency_s, of these requests only",
        rank=3,
        in_brief=True,
    ),
    "cancel_latency_prefill_steps": _cancel(
        unit="steps",
        shows="That cancel latency in step boundaries.",
        formula="as cancel_latency_steps, of these requests only",
        rank=4,
        part_of="cancel_latency_prefill_s",
    ),
    "cancel_latency_prefill_tier_s": _part(
        label="cancel latency of the prefill tier",
        shows="From a user's leaving until the prefill worker held nothing, if it held anything.",
        formula="blocks reclaimed at the prefill worker - t0",
        rank=56,
    ),
    "cancel_latency_decode_tier_s": _part(
        label="cancel latency of the decode tier",
        shows="From a user's leaving until the decode worker held nothing, if it held anything.",
        formula="blocks reclaimed at the decode worker - t0",
        rank=57,
    ),
    "freed_after_kill_s": _cancel(
        shows="From the kill of a process until the workers held nothing that belonged to it.",
        formula="blocks reclaimed - kill, of requests open then",
        rank=58,
        in_brief=True,
        on_web_tab=True,
        good="flat, within one heartbeat.",
    ),
    "others_failed_rate": _share(
        label="failure rate of others",
        shows="The share of requests that failed though no killed process had them.",
        formula="failed or rejected / requests that went through no killed process",
        rank=59,
        in_brief=True,
        on_web_tab=True,
        good="0 in every run.",
    ),
    "removed_at_first_boundary": _share(
        shows="The share removed at the first step boundary after the worker heard of the abort.",
        formula="removed at the first boundary / aborts that the worker heard",
        better="more",
        rank=5,
        in_brief=True,
    ),
    "slot_refill_s": MetricInfo(
        shows="From a slot's coming free to the next request in it.",
        formula="next waiting request admitted - blocks reclaimed, paired first come first served",
        rank=10,
        in_brief=True,
        on_web_tab=True,
        good="flat, far below a step.",
    ),
    "refilled_next_schedule": _share(
        shows="The share of wanted slots that the very next schedule took.",
        formula="slots taken in the next schedule / slots given back while a request waited",
        better="more",
        rank=11,
    ),
    SLOT_RECOVERY: MetricInfo(
        shows="From a user's leaving to the first token of a request that waited, seen by its "
        "client.",
        formula="first token of the waiting probe - t0",
        rank=12,
        in_brief=True,
        on_web_tab=True,
        good="flat, near the wait for an unloaded server.",
        may_be_negative=True,
        baseline_figure="p50",
    ),
    "probe_ttft_unloaded_s": MetricInfo(
        shows="The probe's first token on an idle server, to judge slot recovery by.",
        formula="first token - sent, no filler running",
        rank=13,
    ),
    "probe_ttft_control_s": MetricInfo(
        shows="The next request's first token after one ended by itself: the control of slot "
        "recovery.",
        formula="first token - last token of the request that ended before it",
        better="neither",
        rank=14,
    ),
    WASTED_TOKENS: MetricInfo(
        unit="tokens",
        shows="Tokens generated that the user did not read, for each abandoned request.",
        formula="generated - read by the client at t0",
        rank=15,
        in_brief=True,
        on_web_tab=True,
        good="flat, at what was on its way and the step in flight.",
        of_tokens=True,
        baseline_figure="mean",
    ),
    "wasted_in_flight_tokens": MetricInfo(
        unit="tokens",
        shows="Wasted tokens that were sampled before the user left.",
        formula="sampled before t0 - read by the client at t0",
        rank=16,
        of_tokens=True,
        part_of=WASTED_TOKENS,
    ),
    "wasted_after_close_tokens": MetricInfo(
        unit="tokens",
        shows="Wasted tokens that were sampled after the user had left.",
        formula="sampled in steps that ended after t0",
        rank=17,
        of_tokens=True,
        part_of=WASTED_TOKENS,
    ),
    "wasted_prompt_tokens": _reading(
        unit="tokens",
        shows="Prompt tokens computed for each request that was left before its first token.",
        formula="(prompt counter after - before - prompts of requests with a first token) / "
        "requests left before their first token",
        rank=18,
    ),
    "slot_seconds_after_abandon": MetricInfo(
        shows="Time that an abandoned request stayed in the batch.",
        formula="seconds in the batch after t0",
    ),
    "block_seconds_after_abandon": MetricInfo(
        unit="block seconds",
        shows="KV blocks that an abandoned request held, times how long.",
        formula="integral of the blocks held after t0",
    ),
    "gpu_seconds_after_abandon": MetricInfo(
        shows="Device time spent on an abandoned request.",
        formula="sum over steps of duration after t0 * the request's share of scheduled tokens",
    ),
    "energy_wasted_j": MetricInfo(
        unit="J",
        label="wasted energy",
        shows="Energy that the GPU spent on an abandoned request after its user had left.",
        formula="sum over steps of the energy after t0 * the request's share of scheduled tokens",
        rank=45,
        on_web_tab=True,
        good="flat, at about the energy of a step's share.",
    ),
    "ttft_s": MetricInfo(
        shows="Time to the first token of users who stayed.",
        formula="first token - sent",
        rank=28,
        in_brief=True,
        good="flat: users who stay do not pay for users who leave.",
        baseline_figure="p50",
    ),
    "itl_s": MetricInfo(
        shows="Time between two tokens of users who stayed.",
        formula="token event - token event before it",
        rank=29,
        in_brief=True,
        good="flat, at about a step.",
        of_tokens=True,
        baseline_figure="p50",
    ),
    "tpot_s": MetricInfo(
        shows="Mean time a token after the first, for each request of users who stayed.",
        formula="(last token - first token) / (tokens - 1)",
        of_tokens=True,
    ),
    _OPEN_LOOP_SIGN: MetricInfo(
        shows="TTFT from the moment at which the schedule wanted the request sent.",
        formula="first token - intended start",
        rank=38,
        in_brief=True,
        shown="open loop",
    ),
    "e2e_s": MetricInfo(
        shows="Time to the last token of users who stayed.",
        formula="last token - sent, of completed requests",
        rank=39,
        shown="open loop",
    ),
    "e2e_from_intended_s": MetricInfo(
        shows="Time to the last token from the moment at which the schedule wanted the request "
        "sent.",
        formula="last token - intended start, of completed requests",
        rank=40,
        shown="open loop",
    ),
    "goodput_rps": _run_reading(
        unit="rps",
        shows="Completed requests a second.",
        formula="requests completed in the load window / its length",
        better="more",
        rank=42,
        shown="arms",
        good="flat, or rising.",
    ),
    "ttft_again_s": MetricInfo(
        shows="Time to the first token of requests that repeat an abandoned one.",
        formula="first token - sent",
        rank=30,
    ),
    "cached_again": _run_reading(
        unit="ratio",
        shows="The share of a repeated prompt that was still cached.",
        formula="prompt tokens not computed again / prompt tokens, of repeated requests",
        better="more",
        rank=31,
    ),
    "unary_s": MetricInfo(
        label="time to a unary answer",
        shows="Time to the whole answer of users who stayed, where it comes in one piece.",
        formula="answer ended - sent, of completed unary requests",
        rank=67,
    ),
    "ttft_urgent_s": MetricInfo(
        label="TTFT of urgent requests",
        shows="Time to the first token of users who stayed, with the most important priority.",
        formula="first token - sent",
        rank=64,
    ),
    "e2e_urgent_s": MetricInfo(
        label="time to the end of urgent requests",
        shows="Time to the last token of users who stayed, with the most important priority.",
        formula="last token - sent, of completed requests",
        rank=65,
    ),
    "ttft_after_stop_s": MetricInfo(
        label="TTFT after a stop",
        shows="Time to the first token of the turn after one that its user stopped.",
        formula="first token - sent, of turns whose history was not cut",
        rank=60,
    ),
    "ttft_after_answer_s": MetricInfo(
        label="TTFT after an answer",
        shows="Time to the first token of the turn after a whole answer.",
        formula="first token - sent, of turns whose history was not cut",
        rank=61,
    ),
    "recomputed_after_stop": _run_reading(
        unit="tokens",
        label="recomputed after a stop",
        shows="Tokens of its history that the turn after a stop computes again.",
        formula="prompt tokens computed - (prompt tokens - history), mean over the turns",
        rank=62,
    ),
    "recomputed_after_answer": _run_reading(
        unit="tokens",
        label="recomputed after an answer",
        shows="Tokens of its history that the turn after a whole answer computes again.",
        formula="prompt tokens computed - (prompt tokens - history), mean over the turns",
        rank=63,
    ),
    "attempts_per_answer": _reading(
        unit="requests",
        shows="Requests sent for each answer that was completed.",
        formula="requests of users / their completed answers",
        better="neither",
        rank=32,
        in_brief=True,
    ),
    "canary_mismatch_rate": _share(
        shows="The share of canary answers that differ from the first one.",
        formula="answers that differ from the known one / answers after it",
        rank=33,
        in_brief=True,
    ),
    "canary_ttft_s": MetricInfo(
        shows="Time to the first token of a canary.", formula="first token - sent", rank=34
    ),
    "canary_itl_s": MetricInfo(
        shows="Time between two tokens of a canary.",
        formula="token event - token event before it",
        rank=35,
    ),
    "early_stop_saved_share": _reading(
        unit="ratio",
        shows="The share of the whole texts that early stopping left unsaid.",
        formula="1 - generated tokens / whole text, each text by the mean of its requests",
        better="more",
        rank=51,
        in_brief=True,
        good="near the share of text after the answer, without answers cut short.",
    ),
    "early_stop_saved_of_max": _reading(
        unit="ratio",
        shows="The share of max_tokens that was not generated.",
        formula="1 - generated tokens / max_tokens, each text by the mean of its requests",
        better="more",
        rank=52,
        in_brief=True,
    ),
    "early_stop_cut_short": _share(
        shows="The share of answers that were stopped before they were complete.",
        formula="answers stopped before the token that completes them / requests of plan `task`",
        rank=53,
        in_brief=True,
        good="0: such an answer was no saving.",
    ),
    "whole_answers_rps": _run_reading(
        unit="rps",
        shows="Complete answers a second, whether or not more text followed.",
        formula="requests of plan `task` whose answer was complete / load window",
        better="more",
        rank=54,
        in_brief=True,
    ),
    "storm_clear_s": MetricInfo(
        shows="From the first leaving of a storm until the server held nothing of it.",
        formula="last blocks reclaimed - first t0, of one storm",
        rank=36,
        in_brief=True,
    ),
    "storm_spread_s": MetricInfo(
        shows="How long the users of one storm took to leave.",
        formula="last t0 - first t0, of one storm",
        rank=37,
    ),
    GHOST_RATE: _share(
        shows="The share of abandoned requests that the server did not stop.",
        formula="abandoned requests not aborted within the settle time / abandoned requests "
        "watched for that time; by occupancy: requests that began only after the deadline / "
        "streams that left",
        rank=19,
        in_brief=True,
        on_web_tab=True,
        good="0 in every run.",
        from_server_alone=True,
        instead=("leaked_slots", "leaked_kv_share"),
    ),
    "leaked_slots": _leak(
        unit="slots",
        shows="Batch slots that stay taken on an idle server.",
        formula="running after the settle time - before the load; by occupancy: requests without a "
        "token even after the natural ends",
        rank=20,
        in_brief=True,
        good="0 in every run.",
    ),
    "leaked_blocks": _leak(
        unit="blocks",
        shows="KV blocks that stay taken on an idle server.",
        formula="free blocks before the load - after the settle time",
        rank=21,
        in_brief=True,
        good="0 in every run.",
        instead=("leaked_kv_share", "leaked_slots"),
    ),
    "leaked_kv_share": _reading(
        unit="ratio",
        shows="The share of the KV cache that stays taken on an idle server.",
        formula="share in use after the settle time - before the load; by occupancy: 1 - the most "
        "tokens held at once after / before",
        may_be_negative=True,
        from_server_alone=True,
        instead=("leaked_blocks", "leaked_slots"),
    ),
    "leaked_slots_per_abandon": _slope(
        unit="slots",
        shows="Batch slots lost with each abandon, over several loops.",
        formula="Theil-Sen slope of running requests at rest over abandons",
        rank=22,
    ),
    "leaked_blocks_per_abandon": _slope(
        unit="blocks",
        shows="KV blocks lost with each abandon, over several loops.",
        formula="Theil-Sen slope of blocks taken at rest over abandons",
        rank=23,
    ),
    "leaked_kv_share_per_abandon": _slope(
        unit="ratio",
        shows="The share of the KV cache lost with each abandon, over several loops.",
        formula="Theil-Sen slope of the share taken at rest over abandons",
    ),
    "memory_per_abandon": _slope(
        unit="bytes",
        shows="Memory that the server's processes grow by with each abandon.",
        formula="Theil-Sen slope of resident memory at rest over abandons",
        rank=24,
    ),
    "handles_per_abandon": _slope(
        unit="handles",
        shows="File descriptors that the server's processes grow by with each abandon.",
        formula="Theil-Sen slope of open file descriptors at rest over abandons",
        rank=25,
    ),
    "slot_utilisation": _run_reading(
        unit="ratio",
        shows="How full the batch was.",
        formula="sum over steps of running requests * seconds / (slots * load window)",
        better="neither",  # slots are also full of ghosts
        rank=26,
        in_brief=True,
    ),
    "throughput_tps": _run_reading(
        unit="tokens/s",
        shows="Tokens a second, of all requests.",
        formula="tokens sampled in the load window / its length",
        better="more",
        rank=27,
        good="flat, or rising.",
        of_tokens=True,
    ),
    "gpu_utilisation": _run_reading(
        unit="ratio",
        shows="The share of time in which the GPU computed.",
        formula="mean of the readings during the load, and of the devices",
        better="neither",  # it also computes for ghosts
        rank=46,
        on_web_tab=True,
    ),
    "gpu_memory_bytes": _run_reading(
        unit="bytes",
        label="GPU memory",
        shows="Memory in use on the GPU, at its highest, by all processes.",
        formula="largest sum over the devices of a reading during the load",
        rank=47,
    ),
    "gpu_power_w": _run_reading(
        unit="W",
        label="GPU power",
        shows="Power that the GPU drew.",
        formula="mean of the readings during the load, summed over the devices",
        better="neither",  # a faster server draws more
        rank=48,
    ),
    "gpu_energy_j": _run_reading(
        unit="J",
        label="GPU energy",
        shows="Energy that the GPU used during the load.",
        formula="the devices' energy counter at the end - at the beginning of the load, else their "
        "power, integrated",
        better="neither",  # it grows with the load
        rank=49,
    ),
    ENERGY_PER_TOKEN: _run_reading(
        unit="J",
        label="energy per token",
        shows="Energy that the GPU used for each token, read or not.",
        formula="gpu_energy_j / tokens sampled in the load window",
        rank=50,
        on_web_tab=True,
        of_tokens=True,
        good="flat, or falling.",
    ),
    "preemptions": _run_reading(
        unit="preemptions",
        shows="Requests that the engine put back into its queue during the load.",
        formula="preemptions in the lifecycle log, else counter after - before",
        rank=43,
        shown="arms",
        on_web_tab=True,
    ),
    "recomputed_tokens": _run_reading(
        unit="tokens",
        shows="Tokens computed once more after a preemption.",
        formula="counter after - before",
        rank=44,
        shown="arms",
    ),
    "forced_reclaims": _run_reading(
        unit="blocks",
        shows="Blocks of cancelled prompts that the prefix cache could not keep: memory was short.",
        formula="counter after - before",
        better="neither",  # more free blocks for others, and less to find again
        rank=66,
        shown="arms",
    ),
    "step_s": MetricInfo(
        shows="How long an engine step takes.", formula="step ended - step started"
    ),
    "client_lag_s": MetricInfo(
        shows="How late the load itself notices: no time below it means anything.",
        formula="timer noticed - timer due",
        on_web_tab=True,
    ),
    "scrape_interval_s": MetricInfo(
        shows="How often the metrics pages were read.", formula="scrape - scrape before it"
    ),
    "gpu_interval_s": MetricInfo(
        label="GPU interval",
        shows="How often the GPU gave a new reading.",
        formula="changed reading - changed reading before it",
    ),
    "over_read_tokens": MetricInfo(
        unit="tokens",
        label="over-read tokens",
        shows="Tokens that a client read beyond its plan before it left.",
        formula="read at t0 - tokens that the plan allows",
    ),
    "start_delay_s": MetricInfo(
        shows="How late requests were sent.",
        formula="sent - intended start",
        rank=41,
        shown="open loop",
    ),
}


def _in_words(name: str) -> str:
    words = name.removesuffix("_s").removesuffix("_rps").removesuffix("_tps").split("_")
    return " ".join(_CAPITALS.get(word, word) for word in words)


METRICS: Final[Mapping[str, MetricInfo]] = {
    name: msgspec.structs.replace(one, name=name, label=one.label or _in_words(name))
    for name, one in _TABLE.items()
}


def spoken(metric: str, figure: str) -> str:
    label = METRICS[metric].label
    return label if figure == "mean" else f"{label} {figure}"


def titled(metric: str, figure: str = "mean") -> str:
    name = spoken(metric, figure)
    return name[0].upper() + name[1:]


def headlines(metrics: Collection[str]) -> Sequence[str]:
    is_open_loop = _OPEN_LOOP_SIGN in metrics
    return _ranked("always", "open loop") if is_open_loop else _ranked("always")


def _ranked(*shown: Shown) -> list[str]:
    ranks = {name: one.rank for name, one in METRICS.items() if one.rank and one.shown in shown}
    return sorted(ranks, key=ranks.__getitem__)


def headline_figures(
    arms: Mapping[str, Mapping[str, Metric]], first: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """The figures that arms or runs are compared by, as (metric, figure): median and p99 for times
    of single requests, else the mean. The metrics of `first` come before the rest."""
    pairs = []
    present = {name for metrics in arms.values() for name in metrics}
    for name in dict.fromkeys([*first, *headlines(present), *_ranked("arms")]):
        found = [metrics[name] for metrics in arms.values() if name in metrics]
        has_times = any(one.unit == "s" and _has(one, "p50") for one in found)
        keys = ("p50", "p99") if has_times else ("mean",)
        pairs += [(name, key) for key in keys if any(_has(one, key) for one in found)]
    return pairs


def _has(metric: Metric, key: str) -> bool:
    if key == "mean" and is_only_limited(metric):
        return True
    return getattr(metric, key) is not None or key in metric.lower_bounds
