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
from harness.analysis.step_log import computed_tokens
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


def _running(frames: RunFrames) -> pd.Series:
    """When each request that has a slot at the end of the log got it, by the server's id."""
    log = frames.lifecycle
    is_ours = log["client_request_id"].isin(frames.requests["request_id"])
    moves = log[is_ours & log["event"].isin(_MOVES)].sort_values("t_ns", kind="stable")
    last = moves.drop_duplicates("request_id", keep="last").set_index("request_id")
    return last.loc[last["event"].isin(_GOT_A_SLOT), "t_ns"]


def _blocks_of(running: pd.Series, frames: RunFrames, facts: Facts) -> int:
    """Enough blocks for the tokens computed for each since it got its slot; 0 if nobody told."""
    if running.empty or frames.steps.empty or facts.block_size is None:
        return 0
    computed = computed_tokens(frames.steps, running.index)
    since = running.to_numpy(dtype=np.int64)[computed["request"]]
    tokens = computed[computed["ended_ns"] > since].groupby("request")["scheduled"].sum()
    return int(np.ceil(tokens / facts.block_size).sum())
