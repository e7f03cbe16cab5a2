"""The end of each abandoned request, and how long the server took to let go of it.

    t0 ──detect──▶ server saw it ──signal──▶ worker heard it ──wait──▶ removed ──free──▶ freed
    └──────────────────────────────── cancel latency ─────────────────────────────────────┘

A request that the server never stopped is a *ghost*: its latency is right-censored at the settle
time, or at the time it was watched if that is less, even if it came to its natural end before.

A request that the server had finished before its user left has nothing to cancel; its row says
phase "ended". So does one whose last step was running when the server saw its user leave, or when
the abort can have reached the worker.

All server stamps come from the lifecycle log, joined by the client's request id.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.open_requests import RACE, reset_by_us_ns
from harness.analysis.run_facts import RunFacts, is_among, run_facts
from harness.analysis.timeline import KILLED, OF_WORKERS, StepTimes, WorkerSteps, log_of, timeline
from harness.analysis.tokens import tokens_read, without_tokens
from harness.analysis.waste import wasted
from harness.metrics import CANCEL_LATENCY, CANCEL_LATENCY_STEPS
from harness.records import Outcome, Role
from harness.stats import NEVER
from harness.store.frames import RunFrames

TIERS: Final = ("prefill", "decode")
# Events of the frontend are about the whole request, under a name that is no branch's.
_OF_THE_WHOLE: Final = ("arrived", "disconnected", "abort_sent")


def branches_of(left: pd.DataFrame, lifecycle: pd.DataFrame) -> pd.DataFrame:
    """One row for each branch that the log knows, in no particular order.

    `owner`: the position of its request in `left`, whose `t0_ns` it has, too; server_request_id;
    removed_ns, freed_ns, finish_reason and num_generated (null while it has not ended at each
    worker that had it; with tokens that came between its end and its blocks' being freed). A
    request that has not reached a worker yet has one row for all its branches.
    """
    owners = pd.Series(range(len(left)), index=left["request_id"].to_numpy())
    events = lifecycle[is_among(lifecycle["client_request_id"], owners.index)]
    events = events.sort_values("t_ns", kind="stable")
    events = events.drop_duplicates(["request_id", "worker", "event"])
    is_workers = ~events["event"].isin(_OF_THE_WHOLE)
    has_come = is_among(events["client_request_id"], events.loc[is_workers, "client_request_id"])
    known = events[is_workers | ~has_come].drop_duplicates("request_id")
    owner = known["client_request_id"].map(owners).to_numpy(dtype="int64")
    ids = known["request_id"].to_numpy()
    finished = events[(events["event"] == "finished") & events["reason"].notna()]
    is_last = events["event"].isin(["finished", "blocks_freed"])
    generated = events[is_last].groupby("request_id")["num_generated"].max()
    generated = generated[generated.index.isin(finished["request_id"])]
    finished = finished.drop_duplicates("request_id", keep="last").set_index("request_id")
    last = events[events["event"] == "blocks_freed"].drop_duplicates("request_id", keep="last")
    is_killed = is_among(pd.Series(ids), last.loc[last["reason"] == KILLED, "request_id"])
    reason = finished["reason"].reindex(ids).to_numpy()
    return pd.DataFrame(
        {
            "owner": owner,
            "t0_ns": left["t0_ns"].to_numpy()[owner],
            "server_request_id": ids,
            "removed_ns": _last_of(events, _OUT).reindex(ids).to_numpy(),
            "freed_ns": _last_of(events, ("blocks_freed",)).reindex(ids).to_numpy(),
            "finish_reason": np.where(is_killed, KILLED, reason),
            "num_generated": generated.reindex(ids).to_numpy(),
        }
    ).astype({"removed_ns": "Int64", "freed_ns": "Int64", "num_generated": "Int64"})


def ends_of(left: pd.DataFrame, branches: pd.DataFrame) -> pd.DataFrame:
    by_owner = branches.sort_values("removed_ns", kind="stable").groupby("owner")
    found = by_owner.agg(
        removed_ns=("removed_ns", "max"),
        freed_ns=("freed_ns", "max"),
        finish_reason=("finish_reason", "last"),
        final_num_generated=("num_generated", "sum"),
    ).reindex(range(len(left)))
    ended = by_owner[["removed_ns", "freed_ns", "num_generated"]].count()
    have_all = ended.reindex(found.index, fill_value=0).ge(left["n"].to_numpy(), axis="index")
    for column in found:
        found[column] = found[column].where(have_all.get(column, have_all["num_generated"]))
    return found.astype({"finish_reason": object}).set_index(left.index)


def _last_of(events: pd.DataFrame, kinds: Sequence[str]) -> pd.Series:
    """The last such event of each request, if each worker that had the request logged one."""
    of_workers = events[events["event"].isin(OF_WORKERS)]
    had = of_workers.groupby("request_id")["worker"].nunique()
    of_kind = events[events["event"].isin(kinds)]
    by_worker = of_kind.drop_duplicates(["request_id", "worker"], keep="last")
    by_request = by_worker.groupby("request_id")["t_ns"]
    is_all = by_request.size().eq(had.reindex(by_request.size().index))
    last: pd.Series = by_request.max().astype("Int64")[is_all]
    return last


_OUT: Final = ("handed_over", "removed")
_STAMPS: Final = {
    "arrived": "arrived_ns",
    "admitted": "admitted_ns",
    "first_token": "first_token_sampled_ns",
    "disconnected": "detected_ns",
    "abort_sent": "signalled_ns",
    "abort_received": "heard_ns",
}


def cancellations(frames: RunFrames) -> pd.DataFrame:
    """One row for each abandoned request of a user, a filler or a long prompt.

    Identity: request_id, role, trial, plan, way, planned_abandon, max_tokens, finish_reason (the
    server's). Points in time (Int64, ns, null where unknown): t0_ns, events of the lifecycle log.
    phase: waiting, prefill, hand_over (between two workers) or decode at t0; "ended" if the server
    had finished it before, "lost" if it went with a worker that was killed; null if not known.
    worker: the last that had it. told_ns: when the worker that removed it heard of the abort.
    Stages and the cancel latency: in seconds (NaN where unknown), the latter also in steps: the
    number of step ends that it spans.
    `ghost`: not aborted, or still held after the settle time (null: not watched long enough to
    say). `censored`: the cancel latency and its steps are lower limits. By tier: see `_by_tier`.
    Waste: see `wasted`.
    """
    facts = run_facts(frames)
    left = _left(frames.requests)
    log = log_of(frames)
    branches = branches_of(left, log)
    cancels = _with_stamps(left, log).join(ends_of(left, branches))
    steps = WorkerSteps(frames.steps) if facts.has_steps else None
    cancels["phase"] = _phase(cancels, frames, steps, facts)
    cancels = _with_latency(cancels, frames.requests, facts)
    cancels = cancels.assign(**_stages(cancels), **_in_steps(cancels, steps, facts))
    cancels = cancels.join(_by_tier(cancels, log))
    cancels = pd.concat([cancels, wasted(cancels, branches, frames, facts)], axis="columns")
    return cancels.drop(columns=["final_num_generated", "signalled_ns", "removed_by", "n"])


def was_cancelled(cancels: pd.DataFrame) -> pd.Series:
    return cancels[CANCEL_LATENCY].notna()


def is_unfinished(cancels: pd.DataFrame) -> pd.Series:
    return cancels["arrived_ns"].notna() & cancels["freed_ns"].isna()


def _seconds(start_ns: pd.Series, end_ns: pd.Series) -> pd.Series:
    gap = (end_ns - start_ns).to_numpy(dtype=float, na_value=np.nan) / 1e9
    return pd.Series(gap, index=start_ns.index)


def _is_true(claims: pd.Series) -> pd.Series:
    return claims.fillna(value=False).astype(bool)


def _left(requests: pd.DataFrame) -> pd.DataFrame:
    is_abandoned = (requests["outcome"] == Outcome.ABANDONED) & requests["abandoned_ns"].notna()
    is_load = requests["role"].isin([Role.USER, Role.FILLER, Role.LONG_PROMPT])
    read = pd.Series(tokens_read(requests), index=requests.index)
    left = without_tokens(requests)[is_abandoned & is_load]
    columns = ["request_id", "role", "trial", "plan", "way", "planned_abandon", "max_tokens", "n"]
    frame = left[columns].assign(
        t0_ns=left["abandoned_ns"].astype("Int64"), tokens_read=read[left.index]
    )
    return frame.sort_values("t0_ns", kind="stable").reset_index(drop=True)


def _with_stamps(left: pd.DataFrame, lifecycle: pd.DataFrame) -> pd.DataFrame:
    ids = left["request_id"]
    events = lifecycle[is_among(lifecycle["client_request_id"], ids)]
    events = events.sort_values("t_ns", kind="stable")
    first = events.drop_duplicates(["client_request_id", "event"]).set_index("client_request_id")
    stamps = {
        column: ids.map(first.loc[first["event"] == event, "t_ns"].astype("Int64")).astype("Int64")
        for event, column in _STAMPS.items()
    }
    of_workers = events[events["event"].isin(OF_WORKERS)]
    passed_on = (of_workers["event"] == "blocks_freed") & (of_workers["reason"] == "handed_over")
    worker, removed_by = (_last_worker(ids, one) for one in (of_workers, of_workers[~passed_on]))
    heard = events[events["event"] == "abort_received"]
    first_heard = heard.drop_duplicates(["client_request_id", "worker"])
    heard_ns = first_heard.set_index(["client_request_id", "worker"])["t_ns"]
    at = pd.MultiIndex.from_arrays([ids, removed_by])
    return left.assign(
        **stamps,
        worker=worker,
        removed_by=removed_by,
        told_ns=heard_ns.reindex(at).astype("Int64").to_numpy(),
    )


def _last_worker(ids: pd.Series, events: pd.DataFrame) -> pd.Series:
    last = events.drop_duplicates("client_request_id", keep="last")
    worker = ids.map(last.set_index("client_request_id")["worker"]).astype(object)
    return worker.where(worker.notna(), "")


def _phase(
    cancels: pd.DataFrame, frames: RunFrames, steps: WorkerSteps | None, facts: RunFacts
) -> pd.Series:
    phase = pd.Series(None, index=cancels.index, dtype=object)
    if not facts.clocks_agree:
        return phase
    lives, t0 = timeline(frames), cancels["t0_ns"]
    t0_of_life = lives["client_request_id"].map(cancels.set_index("request_id")["t0_ns"])
    t0_of_life = t0_of_life.astype("Int64").fillna(0)
    is_over = _is_true(lives["out_ns"] <= t0_of_life)
    is_back = (lives["reason"] == "preempted") & is_over
    is_between = (lives["reason"] == "handed_over") & is_over
    is_in = (lives["in_ns"] <= t0_of_life) & ~is_back & ~is_between
    is_running = is_among(cancels["request_id"], lives.loc[is_in, "client_request_id"])
    is_handed_over = is_among(cancels["request_id"], lives.loc[is_between, "client_request_id"])
    phase[cancels["arrived_ns"].notna()] = "waiting"
    phase[is_handed_over] = "hand_over"
    phase[is_running] = "prefill"
    phase[is_running & _is_true(cancels["first_token_sampled_ns"] <= t0)] = "decode"
    phase[_is_true(cancels["removed_ns"] <= t0)] = "ended"
    if steps is not None:
        phase[_ended_with_its_step(cancels, steps, facts)] = "ended"
    phase[cancels["finish_reason"] == KILLED] = "lost"
    return phase


def _ended_with_its_step(cancels: pd.DataFrame, steps: WorkerSteps, facts: RunFacts) -> pd.Series:
    """Whether the request ended naturally with no whole step between its end and the server's
    seeing the disconnect (or t0, if the server saw it only after the end).

    An abort that was sent and not heard before the end was still on its way, no longer than the
    slowest that was heard, so the step is looked for after that. A client that raced the last token
    could have saved at most one step.
    """
    is_natural = cancels["finish_reason"].notna() & (cancels["finish_reason"] != "abort")
    ended = cancels["removed_ns"].fillna(0).to_numpy(dtype=np.int64)
    seen = cancels["detected_ns"].to_numpy(dtype=np.int64, na_value=NEVER)
    since = np.where(seen <= ended, seen, cancels["t0_ns"].to_numpy(dtype=np.int64))
    is_on_its_way = cancels["signalled_ns"].notna() & cancels["heard_ns"].isna()
    slowest_s = _seconds(cancels["signalled_ns"], cancels["heard_ns"]).max()
    if slowest_s > 0:
        since = since + is_on_its_way * int(min(slowest_s, facts.settle_s) * 1e9)
    at_once = ~steps.ask(StepTimes.has_whole_step, cancels["removed_by"], since, ended)
    return is_natural & cancels["removed_ns"].notna() & (at_once | (cancels["plan"] == RACE))


def _with_latency(cancels: pd.DataFrame, requests: pd.DataFrame, facts: RunFacts) -> pd.DataFrame:
    """Add the cancel latency, censored, ghost and was_reset_by_us.

    Only a request that was aborted within the settle time has a latency that is known. Any other is
    a ghost, censored at min(settle time, time watched), even if it ended by itself sooner. A
    connection that was left open was watched until the load reset it.
    """
    is_known = cancels["arrived_ns"].notna() & ~cancels["phase"].isin(["ended", "lost"])
    is_aborted = cancels["finish_reason"] == "abort"
    if not facts.clocks_agree:
        has_ended = is_known & cancels["finish_reason"].notna()
        return cancels.assign(
            was_reset_by_us=False,
            censored=False,
            ghost=(~is_aborted).astype("boolean").where(has_ended),
            **{CANCEL_LATENCY: np.nan},
        )
    latency = _seconds(cancels["t0_ns"], cancels["freed_ns"])
    reset_ns = pd.Series(reset_by_us_ns(cancels, requests, facts), index=cancels.index)
    noticed_ns = cancels[["detected_ns", "freed_ns"]].min(axis="columns").fillna(NEVER)
    was_reset = is_known & (reset_ns < NEVER) & (noticed_ns >= reset_ns)
    until_ns = reset_ns.where(was_reset, NEVER).clip(upper=facts.observed_until_ns)
    watched = (until_ns - cancels["t0_ns"]).astype(float) / 1e9
    is_let_go = is_known & is_aborted & (latency <= facts.settle_s) & ~was_reset
    is_censored = is_known & ~is_let_go
    limit = watched.clip(lower=0.0, upper=facts.settle_s)
    has_ended = cancels["freed_ns"].notna() & ~was_reset
    can_say = is_let_go | has_ended | (watched >= facts.settle_s)
    return cancels.assign(
        was_reset_by_us=was_reset,
        censored=is_censored,
        ghost=is_censored.astype("boolean").where(is_known & can_say),
        **{CANCEL_LATENCY: latency.where(is_let_go, limit).where(is_known)},
    )


def _stages(cancels: pd.DataFrame) -> dict[str, pd.Series]:
    """Each the time since the one before, NaN where the request got no further.

    Only an abort ends the wait: a request that ran to its natural end was not waiting to be freed.
    A connection that ended after its request was over, or that the load itself reset, was not
    detected. `set_s` is the part of `signal_s` until the request's cancellation token was set.
    """
    is_aborted = cancels["finish_reason"] == "abort"
    heard, removed = cancels["heard_ns"], cancels["removed_ns"]
    was_over = _is_true(removed < cancels["detected_ns"]) & ~is_aborted
    detected = cancels["detected_ns"].mask(was_over | cancels["was_reset_by_us"])
    return {
        "detect_s": _seconds(cancels["t0_ns"], detected).where(was_cancelled(cancels)),
        "signal_s": _seconds(detected, heard),
        "set_s": _seconds(detected, cancels["signalled_ns"]),
        "wait_s": _seconds(heard, removed).where(is_aborted),
        "free_s": _seconds(removed, cancels["freed_ns"]).where(is_aborted),
    }


def _in_steps(
    cancels: pd.DataFrame, steps: WorkerSteps | None, facts: RunFacts
) -> dict[str, pd.Series]:
    """`removal_s` is the part of `wait_s` that follows the step boundary: unknown without a step
    after it."""
    if steps is None:
        never = pd.Series(pd.NA, index=cancels.index, dtype="boolean")
        return {
            CANCEL_LATENCY_STEPS: never.astype(float),
            "removed_at_first_boundary": never,
            "removal_s": never.astype(float),
        }
    known = cancels[was_cancelled(cancels)]
    t0 = known["t0_ns"].to_numpy(dtype=np.int64)
    freed = np.where(
        known["censored"],
        t0 + np.rint(known[CANCEL_LATENCY].to_numpy() * 1e9).astype(np.int64),
        known["freed_ns"].to_numpy(dtype=np.int64, na_value=0),
    )
    passed = steps.ask(StepTimes.boundaries_passed, known["worker"], t0, freed)
    heard = cancels[cancels["told_ns"].notna()]
    heard_ns = heard["told_ns"].to_numpy(dtype=np.int64)
    still_there = max(facts.observed_until_ns, int(heard_ns.max(initial=0)))
    removed_ns = heard["removed_ns"].to_numpy(dtype=np.int64, na_value=still_there)
    waited = steps.ask(StepTimes.has_whole_step, heard["removed_by"], heard_ns, removed_ns)
    at_once = pd.Series(~waited, index=heard.index, dtype="boolean")
    return {
        CANCEL_LATENCY_STEPS: pd.Series(passed, known.index, dtype=float).reindex(cancels.index),
        "removed_at_first_boundary": at_once.reindex(cancels.index),
        "removal_s": _seconds(_boundary_ns(cancels, steps), cancels["removed_ns"]),
    }


def _by_tier(cancels: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """`hop_s`: from the first tier's hearing of the abort until the next tier heard of it. For each
    tier: t0 until it held nothing; NaN if it held nothing at t0, infinite if it never let go.
    """
    ids = cancels["request_id"]
    events = log[is_among(log["client_request_id"], ids) & log["event"].isin(OF_WORKERS)]
    tier = events["worker"].str.replace(r"-\d+$", "", regex=True)
    heard = events[events["event"] == "abort_received"]
    heard_ns = heard.groupby(["client_request_id", tier])["t_ns"].min().groupby(level=0)
    hop_ns = (heard_ns.max() - heard_ns.min())[heard_ns.size() > 1]
    found = {"hop_s": ids.map(hop_ns).astype(float) / 1e9}
    freed = events[events["event"] == "blocks_freed"]
    for name in TIERS:
        num_had = events[tier == name].groupby("client_request_id")["request_id"].nunique()
        freed_ns = freed[tier[freed.index] == name].groupby("client_request_id")
        num_freed = freed_ns["request_id"].nunique()
        is_all = num_freed.eq(num_had.reindex(num_freed.index))
        let_go_ns = ids.map(freed_ns["t_ns"].max()[is_all]).astype("Int64")
        held_s = _seconds(cancels["t0_ns"], let_go_ns).fillna(np.inf)
        is_its = is_among(ids, num_had.index) & was_cancelled(cancels) & (held_s > 0)
        found[f"{name}_tier_s"] = held_s.where(is_its)
    return pd.DataFrame(found)


def _boundary_ns(cancels: pd.DataFrame, steps: WorkerSteps) -> pd.Series:
    removed_ns = cancels["removed_ns"].to_numpy(dtype=np.int64, na_value=NEVER)
    started_ns = steps.ask(StepTimes.boundary_ns, cancels["removed_by"], removed_ns)
    boundary_ns = pd.Series(started_ns, index=cancels.index, dtype="Int64")
    return boundary_ns.where(started_ns < removed_ns)
