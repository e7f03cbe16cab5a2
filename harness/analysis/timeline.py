"""The server's logs as frames: the lives of its requests, its clock, and the requests of each step.

A branch is one of the answers that a request asked for. It enters the batch when it is admitted, is
put back into the queue by a preemption, and enters again when it is resumed: each stay is a life of
its own. The blocks of its last life are given back when it is removed, or a little later. A worker
that hands a branch over to the next one keeps its blocks until that one has them: a branch can live
at two workers, and its blocks are free when each has given them back.

A step's tokens exist when the step has ended, so a token was sampled after t0 exactly if its step
ended after t0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.stats import NEVER, Bools, Ints
from harness.store.frames import RunFrames

T = TypeVar("T", bound=np.generic)
# Logged by the worker that has the request. A frontend's events name its first worker.
OF_WORKERS: Final = (
    "admitted",
    "first_token",
    "preempted",
    "resumed",
    "handed_over",
    "taken_over",
    "abort_received",
    "removed",
    "blocks_freed",
)
_ENTERS: Final = ("admitted", "resumed")
_LEAVES: Final = ("preempted", "handed_over", "removed")
_FREES: Final = "blocks_freed"
KILLED: Final = "killed"  # the reason for which a killed worker's requests ended there


@lru_cache(maxsize=2)
def log_of(frames: RunFrames) -> pd.DataFrame:
    """The lifecycle log, in which a kill removes, frees and finishes all that its worker had."""
    log = frames.lifecycle
    kills = frames.manifest.get("kills") or []
    for kill in (one for one in kills if one["kind"] == "worker"):
        is_its = (log["worker"] == kill["name"]) & log["event"].isin(OF_WORKERS)
        its = log[is_its & (log["t_ns"] <= kill["t_ns"])]
        freed = its.loc[its["event"] == "blocks_freed", "request_id"]
        held = its[~its["request_id"].isin(freed)].drop_duplicates("request_id", keep="last")
        ends = [
            held.assign(t_ns=kill["t_ns"], event=event, reason=KILLED)
            for event in ("removed", "blocks_freed", "finished")
        ]
        log = pd.concat([log, *ends], ignore_index=True) if len(held) else log
    return log


@lru_cache(maxsize=2)  # several figures derive from that of one run
def timeline(frames: RunFrames) -> pd.DataFrame:
    """One row a life, by branch.

    client_request_id and server_request_id, the latter the branch's own; worker; life, from 0 over
    all workers; in_ns; out_ns and reason, as in `_LEAVES` (null while it was in the batch when the
    log ended);
    freed_ns, when that life's blocks were given back (null if a preemption ended it); freed_order,
    the rank of that event in the log; blocks, the number that it had on entering.
    """
    log = log_of(frames)
    events = log[log["event"].isin((*_ENTERS, *_LEAVES, _FREES))]
    events = events.sort_values("t_ns", kind="stable")
    branch, _ = pd.factorize(pd.MultiIndex.from_frame(events[["request_id", "worker"]]))
    kind = events["event"]
    life = kind.isin(_ENTERS).groupby(branch).cumsum().to_numpy(dtype=np.int64) - 1
    events = events.assign(branch=branch, life=life, order=np.arange(len(events)))[life >= 0]
    kind, key = events["event"], ["branch", "life"]
    entered = events[kind.isin(_ENTERS)].set_index(key)
    left = events[kind.isin(_LEAVES)].drop_duplicates(key).set_index(key).reindex(entered.index)
    freed = events[kind == _FREES].drop_duplicates(key).set_index(key).reindex(entered.index)
    is_preempted = left["event"] == "preempted"
    names = entered["request_id"].to_numpy()
    return pd.DataFrame(
        {
            "client_request_id": entered["client_request_id"],
            "server_request_id": names,
            "worker": entered["worker"],
            "life": entered.groupby(names).cumcount(),
            "in_ns": entered["t_ns"],
            "out_ns": left["t_ns"].astype("Int64"),
            "reason": left["event"],
            "freed_ns": freed["t_ns"].astype("Int64").mask(is_preempted),
            "freed_order": freed["order"].astype("Int64"),
            "blocks": entered["num_blocks"],
        }
    ).reset_index(drop=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Nanoseconds, both ascending."""

    started_ns: Ints
    ended_ns: Ints

    @classmethod
    def of(cls, steps: pd.DataFrame) -> Self:
        return cls(
            started_ns=np.sort(steps["started_ns"].to_numpy(dtype=np.int64)),
            ended_ns=np.sort(steps["ended_ns"].to_numpy(dtype=np.int64)),
        )

    @property
    def n(self) -> int:
        return len(self.ended_ns)

    def boundaries_passed(self, since_ns: Ints, until_ns: Ints) -> Ints:
        passed = np.searchsorted(self.ended_ns, until_ns, side="right")
        return passed - np.searchsorted(self.ended_ns, since_ns, side="right")

    def has_whole_step(self, since_ns: Ints, until_ns: Ints) -> Bools:
        if not self.n:
            return np.zeros(len(since_ns), dtype=bool)
        following = np.searchsorted(self.started_ns, since_ns, side="right")
        ended = self.ended_ns[np.minimum(following, self.n - 1)]
        return (following < self.n) & (ended < until_ns)

    def boundary_ns(self, t_ns: Ints) -> Ints:
        """The start of the step that `next_schedule` names; `NEVER` if no step followed."""
        return np.append(self.started_ns, NEVER)[self.next_schedule(t_ns)]

    def next_schedule(self, t_ns: Ints) -> Ints:
        """Index of the step whose schedule an event at t belongs to or comes before.

        Events at a boundary are stamped between the start of the coming step and its end, a natural
        end after the end of its own step: both belong to the first step that ends later. Equals `n`
        if no step followed.
        """
        return np.searchsorted(self.ended_ns, t_ns, side="right")


class WorkerSteps:
    """The step times of each worker. A question about a request goes to its worker's step times, or
    to the first worker's if no worker had the request."""

    def __init__(self, steps: pd.DataFrame) -> None:
        by_worker = {str(worker): rows for worker, rows in steps.groupby("worker")}
        self._times = [StepTimes.of(rows) for rows in by_worker.values()]
        self._names = pd.Index(by_worker)

    def ask(
        self, question: Callable[..., npt.NDArray[T]], workers: pd.Series, *stamps: Ints
    ) -> npt.NDArray[T]:
        """`question` is a method of `StepTimes`, asked with each worker's part of the stamps."""
        if len(self._times) == 1:
            return question(self._times[0], *stamps)
        place = np.maximum(self._names.get_indexer(pd.Index(workers)), 0)
        answers = [
            question(times, *(one[place == number] for one in stamps))
            for number, times in enumerate(self._times)
        ]
        answer = np.empty(len(place), dtype=answers[0].dtype)
        for number, one in enumerate(answers):
            answer[place == number] = one
        return answer


def level_of_all(steps: pd.DataFrame, column: str) -> pd.Series:
    """The sum at each step, which must be in order, of the latest value of every worker."""
    of = {one: steps[column].where(steps["worker"] == one) for one in steps["worker"].unique()}
    total: pd.Series = pd.DataFrame(of, index=steps.index).ffill().bfill().sum(axis="columns")
    return total


def num_sampled(steps: pd.DataFrame) -> int:
    return int(_flat(steps["sampled_tokens"], np.int64).sum())


def computed_tokens(steps: pd.DataFrame, server_ids: pd.Index) -> pd.DataFrame:
    """One row for each step and each of these requests that it computed tokens for, in step order.

    Columns: `request` (position in `server_ids`), `started_ns`, `ended_ns`, `scheduled`, `sampled`
    and `share` = scheduled tokens of the request / scheduled tokens of the step.
    """
    ordered = steps.sort_values("started_ns", kind="stable")
    lengths = ordered["request_ids"].map(len).to_numpy(dtype=np.int64)
    scheduled = _flat(ordered["scheduled_tokens"], np.int64)
    step = np.repeat(np.arange(len(ordered)), lengths)
    totals = np.bincount(step, weights=scheduled, minlength=len(ordered))
    # As plain objects: turning millions of ids into pandas strings costs more than the look-up.
    ids = pd.Index(_flat(ordered["request_ids"], object), dtype=object)
    request = server_ids.astype(object).get_indexer(ids)
    kept = request >= 0
    step, request, scheduled = step[kept], request[kept], scheduled[kept]
    return pd.DataFrame(
        {
            "request": request,
            "started_ns": ordered["started_ns"].to_numpy(dtype=np.int64)[step],
            "ended_ns": ordered["ended_ns"].to_numpy(dtype=np.int64)[step],
            "scheduled": scheduled,
            "sampled": _flat(ordered["sampled_tokens"], np.int64)[kept],
            "share": scheduled / totals[step],
        }
    )


def shared_blocks(num_blocks: Ints, first_tokens: Ints, block_size: int) -> Ints:
    """Blocks of a cached prefix that a request got on admission: the blocks in its block table
    then, beyond the need of its first step's tokens."""
    return np.maximum(0, num_blocks - np.ceil(first_tokens / block_size).astype(np.int64))


def _flat(lists: pd.Series, dtype: type) -> np.ndarray:
    arrays = lists.to_list()
    if not arrays:
        return np.empty(0, dtype=dtype)
    return np.concatenate(arrays).astype(dtype, copy=False)
