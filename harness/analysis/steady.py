"""Which part of the load is warm-up, and whether there is a steady part at all.

The series is the number of tokens that all clients read in each of 200 equal parts of the load
window. The rule is MSER-5: take means of 5 parts each; leave out so many means at the beginning
that the standard error of the rest is smallest,

    d* = argmin over d of  variance of the values from d on / (their number),

looking only at the first half. If the best place to cut is at the end of that half, the window is
not steady: it was still changing. Source: White, Cobb and Spratt, Winter Simulation Conference
2000, 755-760; White, Simulation 69 (1997), 323-334.

No figure leaves anything out because of it: abandoned requests are what is measured, at whatever
load. It is told how much of the window was warm-up, and what the throughput was after it.
"""

from typing import Final

import msgspec
import numpy as np

from harness.analysis.facts import Facts
from harness.analysis.frames import RunFrames
from harness.analysis.stats import Floats
from harness.analysis.token_times import read_by

PARTS: Final = 200
BATCH: Final = 5
FEWEST_TOKENS: Final = 400  # two a part, on average
RULE: Final = "MSER-5 on the tokens read in 200 parts of the load window"


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict; null where there was not enough to judge by, with the reason in `note`."""

    rule: str = RULE
    is_steady: bool | None = None
    warmup_s: float | None = None
    warmup_share: float | None = None
    steady_tps: float | None = None
    note: str | None = None


def steady_window(frames: RunFrames, facts: Facts) -> Steady:
    """Judge the load window."""
    if facts.load_s <= 0 or frames.requests.empty:
        return Steady(note="there was no load")
    edges = np.linspace(facts.load_started_ns, facts.load_ended_ns, PARTS + 1).astype(np.int64)
    counts = np.diff(read_by(frames.requests, edges))
    total = float(counts.sum())
    if total < FEWEST_TOKENS:
        note = f"not enough data: {total:.0f} tokens were read, and {FEWEST_TOKENS} are needed"
        return Steady(note=note)
    means = counts.reshape(-1, BATCH).mean(axis=1)
    cut, is_steady = truncation(means)
    part_s = facts.load_s / PARTS
    return Steady(
        is_steady=is_steady,
        warmup_s=cut * BATCH * part_s,
        warmup_share=cut / len(means),
        steady_tps=float(means[cut:].mean() / part_s) if is_steady else None,
    )


def truncation(means: Floats) -> tuple[int, bool]:
    """How many values to leave out at the beginning, and whether the rest is steady."""
    half = len(means) // 2
    errors = [float(means[d:].var()) / (len(means) - d) for d in range(half + 1)]
    cut = int(np.argmin(errors))
    return cut, cut < half
