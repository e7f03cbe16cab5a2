"""Planned kills of the server's processes: what they took with them, and what they left behind.

A killed worker's memory is free at once. Requests of a killed frontend are still at the workers.
A request that a killed worker had taken over, or handed over, may be at another worker.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from harness.analysis.figure import Figures, Sample, proportion, sampled
from harness.analysis.run_facts import RunFacts, is_among
from harness.analysis.timeline import OF_WORKERS, log_of
from harness.analysis.tokens import without_tokens
from harness.records import Outcome
from harness.stats import NEVER, Bools
from harness.store.frames import RunFrames

_WRONG: Final = (Outcome.FAILED, Outcome.REJECTED)


class _Kill(NamedTuple):
    t_ns: int
    kind: str
    name: str
    number: int
    back_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillEffects:
    """`left`: what killed processes left at (other) workers: request_id, freed_s (the time from the
    kill until each of these had freed it) and censored. `others_failed`: for each request that went
    through no killed process, whether it failed; `is_killed`: for each request, whether it failed
    with a kill. `kind`: of the processes to be killed, None without a plan for that."""

    kind: str | None
    has_several: bool
    left: pd.DataFrame
    others_failed: pd.Series
    is_killed: pd.Series


def _kills(frames: RunFrames) -> list[_Kill]:
    return [
        _Kill(one["t_ns"], one["kind"], one["name"], one["index"], one["back_ns"] or NEVER)
        for one in frames.manifest.get("kills") or []
    ]


def kill_effects(frames: RunFrames, facts: RunFacts) -> KillEffects:
    kills, requests = _kills(frames), without_tokens(frames.requests)
    log = log_of(frames)
    of_workers = log[log["event"].isin(OF_WORKERS)]
    pairs = of_workers.groupby(["request_id", "worker"]).agg(
        client_request_id=("client_request_id", "last"), since_ns=("t_ns", "min")
    )
    freed = of_workers[of_workers["event"] == "blocks_freed"]
    freed_ns = freed.groupby(["request_id", "worker"])["t_ns"].max()
    freed_ns = freed_ns.astype("Int64").reindex(pairs.index).fillna(NEVER)
    pairs = pairs.assign(freed_ns=freed_ns.astype(np.int64)).reset_index()
    through = np.zeros(len(requests), dtype=bool)
    left = []
    for kill in kills:
        held = pairs[(pairs["since_ns"] <= kill.t_ns) & (pairs["freed_ns"] >= kill.t_ns)]
        through |= _went_through(requests, held, log, kill)
        left.append(_left_by(held, kill, facts))
    columns = pd.DataFrame({"request_id": [], "freed_s": [], "censored": []})
    is_wrong = requests["outcome"].isin(_WRONG)
    workload = frames.manifest.get("workload") or {}
    engine = workload.get("engine") or {}
    return KillEffects(
        kind=(workload.get("load") or {}).get("kill"),
        has_several=max(engine.get("frontends", 1), engine.get("workers", 1)) > 1,
        left=pd.concat([columns, *left]).drop_duplicates("request_id"),
        others_failed=is_wrong[~through],
        is_killed=is_wrong & through,
    )


def _went_through(
    requests: pd.DataFrame, held: pd.DataFrame, log: pd.DataFrame, kill: _Kill
) -> Bools:
    """A worker may die before it logs a request, which its frontend's last event then names."""
    was_open = (requests["sent_ns"] <= kill.back_ns) & (requests["ended_ns"] >= kill.t_ns)
    if kill.kind == "frontend":
        is_its = (requests["frontend"] == kill.number).to_numpy(dtype=bool)
    else:
        its = held.loc[held["worker"] == kill.name, "client_request_id"]
        last = log[log["t_ns"] <= kill.t_ns].sort_values("t_ns", kind="stable")
        last = last.drop_duplicates("client_request_id", keep="last")
        sent = last.loc[last["worker"] == kill.name, "client_request_id"]
        is_its = is_among(requests["request_id"], its) | is_among(requests["request_id"], sent)
    found: Bools = was_open.to_numpy(dtype=bool) & is_its
    return found


def _left_by(held: pd.DataFrame, kill: _Kill, facts: RunFacts) -> pd.DataFrame:
    if kill.kind == "frontend":
        mine = held[held["request_id"].str.startswith((f"{kill.name}-", f"{kill.name}."))]
    else:
        its = held.loc[held["worker"] == kill.name, "request_id"]
        mine = held[is_among(held["request_id"], its) & (held["worker"] != kill.name)]
    freed_ns = mine.groupby("request_id")["freed_ns"].max()
    until_ns = freed_ns.clip(upper=facts.observed_until_ns)
    return pd.DataFrame(
        {
            "request_id": freed_ns.index,
            "freed_s": ((until_ns - kill.t_ns) / 1e9).to_numpy(dtype=float),
            "censored": (freed_ns == NEVER).to_numpy(dtype=bool),
        }
    )


def kill_figures(runs: Sequence[KillEffects]) -> Figures:
    """Figures of an engine with several processes; of a kill, where one was planned."""
    if not runs[0].has_several:
        return {}
    others, kind = pd.concat([one.others_failed for one in runs]), runs[0].kind
    why = "no request was sent that went through no killed process"
    found = {"others_failed_rate": proportion("others_failed_rate", others, why, method="client")}
    if kind is not None:
        left = pd.concat([one.left for one in runs])
        sample = Sample.of(left, "freed_s")
        why = f"no killed {kind} left a request at a worker that lived on"
        found["freed_after_kill_s"] = sampled("freed_after_kill_s", sample, why, method="exact")
    return found


def about_kills(frames: RunFrames, effects: KillEffects) -> Iterator[str]:
    if kills := _kills(frames):
        lost = int(effects.is_killed.sum())
        yield (
            f"{len(kills)} planned kills of a {kills[0].kind}: {lost} requests failed or were "
            "refused with them, which is no fault of the server"
        )
