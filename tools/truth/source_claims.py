"""The source's claims next to what `walkaway simulate capacity cluster` found: the table in
docs/simulation.md, from the folder of that command: `python -m tools.truth.source_claims DIR`.

Source: "vLLM v1 Request Cancellation and Early Stopping: Freeing Resources Mid-Generation": its
table of waste (10,000 requests a second, Llama 70B, 15 % cancelled, 800 tokens each) and its last
sentence.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from harness.simulate.capacity import RUNS
from harness.store.capacity_result import CapacityResult, Need, read_capacity
from harness.store.run_folder import RunFolder

RATE: Final = 10_000.0
SHARE: Final = 0.15
HEAD: Final = "| what | the source | simulated |\n| --- | ---: | ---: |\n"


class Waste(NamedTuple):
    """Waste of one replica: tokens a cancel; and time, slots and blocks spent on nobody, as shares
    of all it has. NaN is not known."""

    tokens: float
    time: float
    slots: float
    blocks: float
    blocks_of_all: float
    used_slots: float


def waste_of(need: Need, workload: dict[str, Any]) -> Waste:
    known, engine = need.figures, workload["engine"]
    load_s = min(workload["run"]["max_seconds"], workload["arrivals"]["seconds"])
    blocks = known.get("block_seconds_sum", math.nan) / load_s
    slots = known.get("slot_seconds_sum", math.nan) / load_s / engine["max_num_seqs"]
    return Waste(
        tokens=known.get("wasted_tokens", math.nan),
        time=known.get("gpu_seconds_sum", math.nan) / load_s,
        slots=slots,
        blocks=blocks,
        blocks_of_all=blocks / engine["num_blocks"],
        used_slots=known.get("slot_utilisation", math.nan) - slots,
    )


def claims(result: CapacityResult, workload: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What, the source's figure, and the figure found, from cancels ignored to honoured."""
    honoured, ignored = result.needs[0], result.needs[-1]
    after, before = waste_of(honoured, workload), waste_of(ignored, workload)
    saved = RATE * SHARE * (before.tokens - after.tokens)
    yield "tokens saved a second", "1.2 million", f"{saved / 1e6:.3g} million"
    if honoured.gpus is not None and ignored.gpus is not None:
        gpus = ignored.gpus.value - honoured.gpus.value
        yield "GPUs saved", "24,000 GPU-seconds a second, or 6.7 H100", f"{gpus:,.0f}"
    hours = f"{before.time * 3600:,.3g} → {after.time * 3600:,.3g} of each GPU"
    yield "GPU seconds wasted an hour", "720 → 4.5, 20 % of one GPU", hours
    yield "tokens wasted a cancel", "800 → 5", f"{before.tokens:,.3g} → {after.tokens:,.3g}"
    blocks = f"{_blocks(before)} → {_blocks(after)} of each replica"
    yield "blocks held for nobody", "3,000 → 20, 15 % of the capacity", blocks
    lost = 1 - ignored.rate.value / honoured.rate.value
    yield "throughput lost", "12-18 % → under 1 %", f"{lost:.1%}"
    used = f"{before.used_slots:.1%} → {after.used_slots:.1%}"
    yield "slots that work for users who stay", "85 % → 98 %", used


def _blocks(waste: Waste) -> str:
    return f"{waste.blocks:,.0f} ({waste.blocks_of_all:.2%})"


def main(folder: Path) -> None:
    result = read_capacity(folder)
    if (result.workload, result.rate) != ("cluster", RATE):
        sys.exit(f"{folder}: is not of the source's load: `walkaway simulate capacity cluster`")
    run = RunFolder(folder / RUNS / result.needs[0].runs[0])
    rows = claims(result, run.read_manifest()["workload"])
    sys.stdout.write(HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
