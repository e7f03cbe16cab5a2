"""Capacity spent on users who had left: tokens, and time on slots, blocks and the device.

    generated = read by the client at t0 + in flight at t0 + sampled after t0
                                           └──────── wasted ────────────┘

Slots and blocks are held in steps: a level changes at an event and stays until the next one. The
integrals below are exact for such a function, between t0 and the moment of giving back.
"""

from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts, is_among
from harness.analysis.stats import Floats, Ints
from harness.analysis.step_log import computed_tokens, shared_blocks
from harness.analysis.timeline import timeline
from harness.store.frames import RunFrames

_SINCE_T0: Final = (
    "wasted_after_close_tokens",
    "slot_seconds",
    "block_seconds",
    "gpu_seconds",
)


def waste_columns(
    cancels: pd.DataFrame, branches: pd.DataFrame, frames: RunFrames, facts: Facts
) -> pd.DataFrame:
    """The waste of each abandoned request, over all its branches; NaN if not known.

    generated_tokens: all sampled for it, read or not; for a request that never finished, those in
    the step log (the true number may be larger). wasted_tokens = generated - read at t0;
    wasted_after_close_tokens = sampled in steps that ended after t0; wasted_in_flight_tokens the
    difference. slot_seconds: time in the batch after t0. block_seconds: integral of the blocks held
    after t0. gpu_seconds: sum over steps of (duration after t0) * (its share of the step's
    scheduled tokens). An unfinished request counts until the end of the observation. Blocks that
    several branches share count for each of them.
    """
    computed = _computed(branches, frames, facts)
    generated = cancels["final_num_generated"]
    if computed is not None:
        sampled = _of_owners(_sum(computed["sampled"], computed, len(branches)), branches, cancels)
        known = cancels["arrived_ns"].notna()
        so_far = pd.Series(sampled, index=cancels.index).round().astype("Int64").where(known)
        generated = generated.fillna(so_far)
    columns = pd.DataFrame({"generated_tokens": generated}, index=cancels.index)
    as_float = generated.to_numpy(dtype=float, na_value=np.nan)
    columns["wasted_tokens"] = as_float - cancels["tokens_read"]
    columns = columns.assign(**_since_t0(cancels, branches, frames, facts, computed))
    in_flight = columns["wasted_tokens"] - columns["wasted_after_close_tokens"]
    return columns.assign(wasted_in_flight_tokens=in_flight)


def _computed(branches: pd.DataFrame, frames: RunFrames, facts: Facts) -> pd.DataFrame | None:
    if not facts.has_steps or not facts.has_lifecycle:
        return None
    return computed_tokens(frames.steps, pd.Index(branches["server_request_id"]))


def _since_t0(
    cancels: pd.DataFrame,
    branches: pd.DataFrame,
    frames: RunFrames,
    facts: Facts,
    computed: pd.DataFrame | None,
) -> dict[str, Floats]:
    """The columns that subtract t0 from the server's stamps."""
    columns = dict.fromkeys(_SINCE_T0, np.full(len(cancels), np.nan))
    if not facts.clocks_agree or not facts.has_lifecycle:
        return columns
    known = cancels["arrived_ns"].notna().to_numpy()

    def of_each(values: Floats) -> Floats:
        return np.where(known, _of_owners(values, branches, cancels), np.nan)

    n, t0 = len(branches), branches["t0_ns"].to_numpy(dtype=np.int64)
    moves = _batch_changes(branches, timeline(frames))
    removed, freed = (_end_of(branches[name], t0, facts) for name in ("removed_ns", "freed_ns"))
    columns["slot_seconds"] = of_each(integral(moves, t0, removed))
    if computed is None:
        return columns
    started, ended = computed["started_ns"].to_numpy(), computed["ended_ns"].to_numpy()
    since = t0[computed["request"]]
    after = _sum(computed["sampled"].where(ended > since, 0), computed, n)
    columns["wasted_after_close_tokens"] = of_each(after)
    busy = np.clip(ended - np.maximum(started, since), 0, None) / 1e9
    columns["gpu_seconds"] = of_each(_sum(computed["share"] * busy, computed, n))
    if facts.block_size is not None:
        blocks = _block_changes(computed, moves, facts.block_size)
        columns["block_seconds"] = of_each(integral(blocks, t0, freed))
    return columns


def _of_owners(values: Floats, branches: pd.DataFrame, cancels: pd.DataFrame) -> Floats:
    return _total(branches["owner"].to_numpy(dtype=np.int64), values, len(cancels))


def _sum(values: pd.Series, computed: pd.DataFrame, n: int) -> Floats:
    return _total(computed["request"].to_numpy(), values.to_numpy(dtype=float), n)


def _total(request: Ints, values: Floats, n: int) -> Floats:
    return np.bincount(request, weights=values, minlength=n).astype(float)


def _end_of(stamps: pd.Series, t0: Ints, facts: Facts) -> Ints:
    last = np.maximum(t0, facts.observed_until_ns)
    return np.where(stamps.isna(), last, stamps.to_numpy(dtype=np.int64, na_value=0))


def _batch_changes(branches: pd.DataFrame, lives: pd.DataFrame) -> pd.DataFrame:
    """When each branch entered the batch (level 1) and was put back into the queue (level 0)."""
    positions = pd.Series(np.arange(len(branches)), index=branches["server_request_id"])
    lives = lives[is_among(lives["server_request_id"], positions.index)]
    lives = lives.assign(request=lives["server_request_id"].map(positions).astype(np.int64))
    entered = lives.rename(columns={"in_ns": "t_ns"}).assign(level=1.0)
    lost = lives[lives["reason"] == "preempted"].rename(columns={"out_ns": "t_ns"})
    columns = ["request", "life", "t_ns", "level", "blocks"]
    changes = pd.concat([entered[columns], lost.assign(level=0.0, blocks=0)[columns]])
    return changes.astype({"t_ns": np.int64}).sort_values(["request", "t_ns"], kind="stable")


def _block_changes(computed: pd.DataFrame, moves: pd.DataFrame, block_size: int) -> pd.DataFrame:
    """How many blocks each request held from when on.

    A request's blocks cover its computed tokens, and room is made when a step is scheduled: from
    the start of a step on it holds ceil(tokens scheduled so far / block size) blocks, and those of
    a cached prefix, for which nothing was scheduled. A preemption takes them all, and counting
    starts again.
    """
    lost = moves[moves["level"] == 0].assign(scheduled=0, is_loss=1)
    grown = computed.rename(columns={"started_ns": "t_ns"})[["request", "t_ns", "scheduled"]]
    changes = pd.concat(
        [grown.assign(is_loss=0), lost[["request", "t_ns", "scheduled", "is_loss"]]]
    )
    changes = changes.sort_values(["request", "t_ns"], kind="stable").reset_index(drop=True)
    life = changes.groupby("request")["is_loss"].cumsum()
    lives = changes.groupby([changes["request"], life])
    own = np.ceil(lives["scheduled"].cumsum() / block_size)
    shared = _shared_in_life(changes.assign(life=life), moves, block_size)
    has_any = (own > 0).astype(float)
    return changes.assign(level=own + shared * has_any)[["request", "t_ns", "level"]]


def _shared_in_life(changes: pd.DataFrame, moves: pd.DataFrame, block_size: int) -> Floats:
    """For each change, the blocks of a cached prefix held in that life of its request."""
    keys = ["request", "life"]
    first = changes[changes["scheduled"] > 0].drop_duplicates(keys)[[*keys, "scheduled"]]
    entered = moves.loc[moves["level"] == 1, [*keys, "blocks"]]
    begun = first.merge(entered, on=keys, how="left").fillna({"blocks": 0})
    begun["shared"] = shared_blocks(
        begun["blocks"].to_numpy(dtype=np.int64),
        begun["scheduled"].to_numpy(dtype=np.int64),
        block_size,
    )
    of_change = changes[keys].merge(begun[[*keys, "shared"]], on=keys, how="left")
    return of_change["shared"].fillna(0).to_numpy(dtype=float)


def integral(changes: pd.DataFrame, since_ns: Ints, until_ns: Ints) -> Floats:
    """The area in level-seconds under each request's level between its `since` and its `until`."""
    changes = changes.sort_values(["request", "t_ns"], kind="stable")
    request, t_ns = changes["request"].to_numpy(), changes["t_ns"].to_numpy()
    until = until_ns[request]
    is_last = np.append(request[1:] != request[:-1], True)[: len(request)]
    next_ns = np.where(is_last, until, np.append(t_ns[1:], 0)[: len(t_ns)])
    held_ns = np.minimum(next_ns, until) - np.maximum(t_ns, since_ns[request])
    area = changes["level"].to_numpy() * np.clip(held_ns, 0, None) / 1e9
    return _total(request, area, len(since_ns))
