"""What requests that still run hold when the watching ends: in use, and so not lost.

A leak is what is missing from the idle gauges in the end. Slots and blocks of a ghost that still
runs are missing too, but known to be in somebody's hands: the lifecycle log says whose request has
a slot, and the step log for how many tokens it got blocks.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import Figure
from harness.analysis.frames import RunFrames
from harness.analysis.ids import is_among
from harness.analysis.step_log import computed_tokens, shared_blocks
from harness.records import Metric

_GOT_A_SLOT = ("admitted", "resumed")
_MOVES = (*_GOT_A_SLOT, "preempted", "removed")


def leaks_in_use(
    frames: RunFrames, facts: Facts, figures: Mapping[str, Figure]
) -> dict[str, float]:
    """How many of the leaked `slots` and `blocks` requests of this run hold that still run.

    Only what is known and more than none. The gauges are read a moment before the end of the logs,
    so no more than was leaked.
    """
    leaked = {name: figures.get(f"leaked_{name}") for name in ("slots", "blocks")}
    missing = {name: one.mean or 0.0 for name, one in leaked.items() if isinstance(one, Metric)}
    if not any(missing.values()):
        return {}
    running = _running(frames)
    held = {"slots": len(running), "blocks": _blocks_of(running, frames, facts)}
    in_use = {name: min(held[name], value) for name, value in missing.items()}
    return {name: value for name, value in in_use.items() if value > 0}


def leaks_lost(facts: Facts) -> list[str]:
    """Which of `slots` and `blocks` are lost where they are missing, and not merely still in use.

    With the exact log what is in use is known. Else there is proof only if the server computes
    nothing any more, or, of blocks, if nothing runs that could hold them.
    """
    if facts.has_lifecycle or facts.still_computing is False:
        return ["slots", "blocks"]
    return ["blocks"] if facts.idle_change("running") == 0 else []


def _running(frames: RunFrames) -> pd.DataFrame:
    """When each request that has a slot at the end of the log got it (`t_ns`), and how many blocks
    it had then, by the server's id."""
    log = frames.lifecycle
    is_ours = is_among(log["client_request_id"], frames.requests["request_id"])
    moves = log[is_ours & log["event"].isin(_MOVES)].sort_values("t_ns", kind="stable")
    last = moves.drop_duplicates("request_id", keep="last").set_index("request_id")
    return last.loc[last["event"].isin(_GOT_A_SLOT), ["t_ns", "num_blocks"]]


def _blocks_of(running: pd.DataFrame, frames: RunFrames, facts: Facts) -> int:
    """Enough blocks for the tokens computed for each since it got its slot, and those of the cached
    prefix that it got with it; 0 if nobody told."""
    if running.empty or frames.steps.empty or facts.block_size is None:
        return 0
    computed = computed_tokens(frames.steps, running.index)
    since = running["t_ns"].to_numpy(dtype=np.int64)[computed["request"]]
    scheduled = computed[computed["ended_ns"] > since].groupby("request")["scheduled"]
    tokens, first = scheduled.sum(), scheduled.first()
    had = running["num_blocks"].to_numpy(dtype=np.int64)[tokens.index]
    shared = shared_blocks(had, first.to_numpy(dtype=np.int64), facts.block_size)
    return int(np.ceil(tokens / facts.block_size).sum() + shared.sum())
