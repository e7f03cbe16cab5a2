"""The source document's figures of what cancellation saves, next to what was found.

Source: "vLLM v1 Request Cancellation and Early Stopping: Freeing Resources Mid-Generation": its
table of waste (10,000 requests a second, Llama 70B, 15 % cancelled, 800 tokens each) and its last
sentence.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

from harness.store.capacity_result import Claim, Need
from harness.workload.arrivals import FlatArrivals
from harness.workload.load import AbandonLoad
from harness.workload.workload import Workload

RATE: Final = 10_000.0
SHARE: Final = 0.15
SAVED: Final = 800


def is_the_sources(workload: Workload, rate: float) -> bool:
    load = workload.load
    return (
        isinstance(load, AbandonLoad)
        and rate == RATE
        and math.isclose(1 - load.stay_share, SHARE)
        and bool(load.abandon_after_tokens)
        and load.answer_tokens - fmean(load.abandon_after_tokens) == SAVED
    )


class _Waste(NamedTuple):
    """Waste of one replica: tokens a cancel; and time, slots and blocks spent on nobody, as shares
    of all it has. NaN is not known."""

    tokens: float
    time: float
    slots: float
    blocks: float
    blocks_of_all: float
    used_slots: float


def _waste(need: Need, workload: Workload) -> _Waste:
    arrivals = workload.arrivals
    assert isinstance(arrivals, FlatArrivals)
    load_s = min(workload.run.max_seconds, arrivals.seconds)
    known = need.figures
    blocks = known.get("block_seconds_sum", math.nan) / load_s
    slots = known.get("slot_seconds_sum", math.nan) / load_s
    late_slots = slots / (workload.engine.max_num_seqs or math.nan)
    return _Waste(
        tokens=known.get("wasted_tokens", math.nan),
        time=known.get("gpu_seconds_sum", math.nan) / load_s,
        slots=late_slots,
        blocks=blocks,
        blocks_of_all=blocks / (workload.engine.num_blocks or math.nan),
        used_slots=known.get("slot_utilisation", math.nan) - late_slots,
    )


def claims(workload: Workload, rate: float, needs: Sequence[Need]) -> list[Claim]:
    """`needs`: honoured first, ignored last. Empty for another load than the source's."""
    honoured, ignored = needs[0], needs[-1]
    if not is_the_sources(workload, rate) or honoured.gpus is None or ignored.gpus is None:
        return []
    after, before = _waste(honoured, workload), _waste(ignored, workload)
    saved = rate * SHARE * (before.tokens - after.tokens)
    gpus = ignored.gpus.value - honoured.gpus.value
    return [
        Claim(
            what="tokens saved a second",
            source="1.2 million",
            found=f"{saved / 1e6:.3g} million",
            note="The source's product, 10,000 by 15 % by 800, is right.",
        ),
        Claim(
            what="GPUs saved",
            source="24,000 GPU-seconds a second, or 6.7 H100",
            found=f"{gpus:,.0f}",
            note="24,000 GPU-seconds a second are 24,000 GPUs. The 6.7 are that divided by 3,600: "
            "GPU-hours a second. And the source's 20 ms are the time of a step, which all "
            "requests of a batch share.",
        ),
        Claim(
            what="GPU seconds wasted an hour",
            source="720 → 4.5, 20 % of one GPU",
            found=f"{_hour(before)} → {_hour(after)} of each GPU",
            note="24,000 GPU-seconds a second would be 86.4 million an hour: 120,000 times 720.",
        ),
        Claim(
            what="tokens wasted a cancel",
            source="800 → 5",
            found=f"{before.tokens:,.3g} → {after.tokens:,.3g}",
        ),
        Claim(
            what="blocks held for nobody",
            source="3,000 → 20, 15 % of the capacity",
            found=f"{_blocks(before)} → {_blocks(after)} of each replica",
            note="The source does not say of how many replicas.",
        ),
        Claim(
            what="throughput lost",
            source="12-18 % → under 1 %",
            found=f"{1 - ignored.rate.value / honoured.rate.value:.1%}",
            note="Requests a second that a replica can take, ignored against honoured.",
        ),
        Claim(
            what="slots that work for users who stay",
            source="85 % → 98 %",
            found=f"{before.used_slots:.1%} → {after.used_slots:.1%}",
            note="At the highest rate that holds the goal; it leaves slots free for bursts.",
        ),
    ]


def _hour(waste: _Waste) -> str:
    return f"{waste.time * 3600:,.3g}"


def _blocks(waste: _Waste) -> str:
    return f"{waste.blocks:,.0f} ({waste.blocks_of_all:.2%})"
