"""Capacity spent on each abandoned request after t0: tokens, and time on slots, blocks and device.

    generated = read by the client at t0 + in flight at t0 + sampled after t0
                                           └──────── wasted ────────────┘

A level of slots or blocks changes at an event and stays until the next one: the sums are exact.
"""

from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.gpu import energy_curves
from harness.analysis.run_facts import RunFacts, is_among
from harness.analysis.timeline import computed_tokens, shared_blocks, timeline
from harness.stats import Floats, Ints
from harness.store.frames import RunFrames

_SINCE_T0: Final = (
    "wasted_after_close_tokens",
    "slot_seconds",
    "block_seconds",
    "gpu_seconds",
    "gpu_joules",
)


def wasted(
    cancels: pd.DataFrame, branches: pd.DataFrame, frames: RunFrames, facts: RunFacts
) -> pd.DataFrame:
    """The waste of each abandoned request, over all its branches; NaN if not known.

    generated_tokens: all tokens sampled for it, read or not; for a request that never finished, the
    tokens in the step log (the true number may be larger). An unfinished request counts until the
    end of the observation. Blocks that several branches share count for each of them.
    """
    spent = _spent(branches, frames, facts).groupby(branches["owner"]).sum(min_count=1)
    spent = spent.reindex(cancels.index).where(cancels["arrived_ns"].notna())
    sampled = spent.pop("sampled").round().astype("Int64")
    generated = cancels["final_num_generated"].fillna(sampled)
    unread = generated.to_numpy(dtype=float, na_value=np.nan) - cancels["tokens_read"]
    return spent.assign(
        generated_tokens=generated,
        wasted_tokens=unread,
        wasted_in_flight_tokens=unread - spent["wasted_after_close_tokens"],
    )


def _spent(branches: pd.DataFrame, frames: RunFrames, facts: RunFacts) -> pd.DataFrame:
    n, t0 = len(branches), branches["t0_ns"].to_numpy(dtype=np.int64)
    spent = pd.DataFrame(np.nan, index=branches.index, columns=["sampled", *_SINCE_T0])
    if not facts.has_lifecycle:
        return spent
    lives = _lives(branches, timeline(frames))
    if facts.clocks_agree:
        removed = _end_of(branches["removed_ns"], t0, facts)
        request = lives["request"].to_numpy()
        out = lives["out_ns"].fillna(pd.Series(removed[request], index=lives.index))
        since, until = (one.to_numpy(dtype=np.int64) for one in (lives["in_ns"], out))
        held = _held_ns(request, since, until, t0, removed)
        spent["slot_seconds"] = np.bincount(request, held / 1e9, n)
    if facts.lacks("steps", "token lists"):
        return spent
    computed = computed_tokens(frames.steps, pd.Index(branches["server_request_id"]))
    request = computed["request"].to_numpy()
    spent["sampled"] = np.bincount(request, computed["sampled"], n)
    if not facts.clocks_agree:
        return spent
    started, ended = computed["started_ns"].to_numpy(), computed["ended_ns"].to_numpy()
    after = computed["sampled"].where(ended > t0[request], 0)
    spent["wasted_after_close_tokens"] = np.bincount(request, after, n)
    busy = computed["share"] * (_held_ns(request, started, ended, t0, None) / 1e9)
    spent["gpu_seconds"] = np.bincount(request, busy, n)
    for curve in energy_curves(frames, facts)[:1]:
        joules = curve.between(np.minimum(np.maximum(started, t0[request]), ended), ended)
        spent["gpu_joules"] = np.bincount(
            request, np.where(ended > t0[request], joules * computed["share"], 0.0), n
        )
    if facts.block_size is not None:
        freed = _end_of(branches["freed_ns"], t0, facts)
        spent["block_seconds"] = _block_seconds(computed, lives, t0, freed, facts.block_size)
    return spent


def _end_of(stamps: pd.Series, t0: Ints, facts: RunFacts) -> Ints:
    last = np.maximum(t0, facts.observed_until_ns)
    return np.where(stamps.isna(), last, stamps.to_numpy(dtype=np.int64, na_value=0))


def _held_ns(request: Ints, since_ns: Ints, until_ns: Ints, t0: Ints, end: Ints | None) -> Ints:
    until_ns = until_ns if end is None else np.minimum(until_ns, end[request])
    return np.clip(until_ns - np.maximum(since_ns, t0[request]), 0, None)


def _lives(branches: pd.DataFrame, lives: pd.DataFrame) -> pd.DataFrame:
    positions = pd.Series(np.arange(len(branches)), index=branches["server_request_id"])
    lives = lives[is_among(lives["server_request_id"], positions.index)]
    return lives.assign(request=lives["server_request_id"].map(positions).astype(np.int64))


def _block_seconds(
    computed: pd.DataFrame, lives: pd.DataFrame, t0: Ints, freed: Ints, block_size: int
) -> Floats:
    """The integral of the blocks that each request held.

    A request's blocks cover its computed tokens, and room is made when a step is scheduled: from
    the start of a step on it holds ceil(tokens scheduled so far / block size) blocks, and the
    blocks of a cached prefix, for which nothing was scheduled. A preemption takes them all, and
    counting starts again, as it does at the worker that a request was handed over to.
    """
    rows = computed.assign(life=0)
    is_moved = lives["reason"].isin(["preempted", "handed_over"])
    lost = lives.loc[is_moved, ["request", "out_ns", "life"]]
    if len(lost):
        rows = pd.merge_asof(
            computed.sort_values("started_ns", kind="stable"),
            lost.astype({"out_ns": np.int64}).sort_values("out_ns"),
            left_on="started_ns",
            right_on="out_ns",
            by="request",
            allow_exact_matches=False,
        )
        rows = rows.assign(life=rows["life"].add(1).fillna(0).astype(np.int64))
    rows = rows.sort_values(["request", "started_ns"], kind="stable")
    keys = ["request", "life"]
    is_first = ~rows.duplicated(keys).to_numpy()
    which = np.cumsum(is_first) - 1
    own = rows["scheduled"].to_numpy()
    before = (np.cumsum(own) - own)[is_first]
    columns = [*keys, "blocks", "out_ns", "reason", "freed_ns"]
    of_life = rows.loc[is_first, [*keys, "scheduled"]].merge(lives[columns], on=keys, how="left")
    shared = shared_blocks(
        of_life["blocks"].fillna(0).to_numpy(dtype=np.int64),
        of_life["scheduled"].to_numpy(dtype=np.int64),
        block_size,
    )
    level = np.ceil((np.cumsum(own) - before[which]) / block_size) + shared[which]
    is_preempted = (of_life["reason"] == "preempted").to_numpy()
    lost_ns = of_life["out_ns"].to_numpy(dtype=np.int64, na_value=0)
    own_end = of_life["freed_ns"].where(of_life["reason"] == "handed_over").astype("Int64")
    own_end = own_end.fillna(pd.Series(freed[of_life["request"].to_numpy()], of_life.index))
    life_end = np.where(is_preempted, lost_ns, own_end.to_numpy(dtype=np.int64))
    request, started = rows["request"].to_numpy(), rows["started_ns"].to_numpy()
    is_last = np.append(is_first[1:], True)[: len(rows)]
    until = np.where(is_last, life_end[which], np.append(started[1:], 0)[: len(rows)])
    area = level * _held_ns(request, started, until, t0, freed) / 1e9
    return np.bincount(request, area, len(t0)).astype(float)
