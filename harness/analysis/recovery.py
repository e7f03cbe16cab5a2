"""How soon a freed slot worked for another request, from inside.

Before the schedule of a step, the worker's queue holds as many requests as the step log shows
waiting after the step, plus the requests that the step took, minus the requests that it preempted.
A slot given back is *wanted* if a request waits for it then, and there was no room anyway. Wanted
slots are paired with the requests that are taken next, first come, first served.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.figure import Figures, Sample, proportion, same_reason, sampled
from harness.analysis.run_facts import RunFacts, is_among
from harness.analysis.timeline import StepTimes, timeline
from harness.metrics import NOBODY_LEFT
from harness.stats import Ints
from harness.store.frames import RunFrames

_REFILL_COLUMNS: Final = ("request_id", "refill_s", "censored", "next_schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """The scheduler's view at one step: slots given back, requests waiting and taken.

    `freed` holds indices into the list of freed slots. `num_free` counts the slots into which
    requests could go, including those just given back; null if not known.
    """

    step: int
    freed: list[int]
    taken_ns: list[int]
    num_wanting: int
    num_free: int | None = None


@dataclass(slots=True, kw_only=True)
class Refill:
    """A slot given back while a request waited, and when and in which step the next request took
    it. Not taken (null): when no request wanted it any more, or the observation ended."""

    freed: int
    freed_before: int
    until_ns: int
    taken_in: int | None = None


def pair_refills(
    schedules: Sequence[StepSchedule], started_ns: Sequence[int], observed_until_ns: int
) -> list[Refill]:
    refills: list[Refill] = []
    open_slots: deque[Refill] = deque()
    for schedule in schedules:
        open_slots += [
            Refill(freed=freed, freed_before=schedule.step, until_ns=observed_until_ns)
            for freed in schedule.freed
        ]
        num_idle = max(0, (schedule.num_free or 0) - len(open_slots))
        while len(open_slots) > max(0, schedule.num_wanting - num_idle):
            unwanted = open_slots.pop()
            if unwanted.freed_before < schedule.step:
                unwanted.until_ns = int(started_ns[schedule.step])
                refills.append(unwanted)
        # An idle slot was given back earlier than any open one, so that the first to come take it.
        for taken_ns in schedule.taken_ns[num_idle : num_idle + len(open_slots)]:
            refill = open_slots.popleft()
            refill.until_ns, refill.taken_in = taken_ns, schedule.step
            refills.append(refill)
    return refills + list(open_slots)


def slot_refills(frames: RunFrames, facts: RunFacts) -> pd.DataFrame:
    """One row for each wanted slot: request_id (the client's, of the request that had it),
    refill_s, censored, next_schedule (whether the very next schedule took it)."""
    lives, log = timeline(frames), frames.steps
    parts = [
        _refills_of(log[log["worker"] == worker], lives[lives["worker"] == worker], facts)
        for worker in log["worker"].unique()
    ]
    return pd.concat(parts, ignore_index=True)


def _refills_of(log: pd.DataFrame, lives: pd.DataFrame, facts: RunFacts) -> pd.DataFrame:
    """A request that is handed over gives its slot back before its blocks, and is not cancelled."""
    steps = StepTimes.of(log)
    is_handed_over = lives["reason"] == "handed_over"
    lives = lives.assign(freed_ns=lives["freed_ns"].mask(is_handed_over, lives["out_ns"]))
    freed = lives[lives["freed_ns"].notna()].sort_values(["freed_ns", "freed_order"])
    given = steps.next_schedule(freed["freed_ns"].to_numpy(dtype=np.int64))
    is_scheduled = given < steps.n  # else no step followed that could take the slot
    freed, given = freed[is_scheduled], given[is_scheduled]
    schedules = _schedules(log, lives, steps, given, facts.worker_slots)
    refills = pair_refills(schedules, steps.started_ns.tolist(), facts.observed_until_ns)
    freed = freed.iloc[[refill.freed for refill in refills]]
    until_ns = np.array([refill.until_ns for refill in refills], dtype=np.int64)
    found = pd.DataFrame(
        {
            "request_id": freed["client_request_id"].to_numpy(),
            "refill_s": (until_ns - freed["freed_ns"].to_numpy(dtype=np.int64)) / 1e9,
            "censored": [refill.taken_in is None for refill in refills],
            "next_schedule": [refill.taken_in == refill.freed_before for refill in refills],
        }
    )
    return found[(freed["reason"] != "handed_over").to_numpy()]


def _schedules(
    steps: pd.DataFrame, lives: pd.DataFrame, times: StepTimes, given: Ints, slots: int | None
) -> list[StepSchedule]:
    in_order = steps.sort_values("started_ns", kind="stable")
    num_waiting = in_order["num_waiting"].to_numpy()
    num_running = in_order["num_running"].to_numpy()
    freed, taken = defaultdict(list), defaultdict(list)
    for position, step in enumerate(given.tolist()):
        freed[step].append(position)
    taken_ns = np.sort(lives["in_ns"].to_numpy(dtype=np.int64))
    for step, t_ns in zip(times.next_schedule(taken_ns).tolist(), taken_ns.tolist(), strict=True):
        taken[step].append(t_ns)
    preempted_ns = lives.loc[lives["reason"] == "preempted", "out_ns"].to_numpy(dtype=np.int64)
    preempted = Counter(times.next_schedule(preempted_ns).tolist())
    schedules = []
    for step in sorted(step for step in taken.keys() | freed.keys() if step < times.n):
        change = len(taken[step]) - preempted[step]
        num_free = None
        # A request left waiting although slots were free lacked room for another reason: blocks.
        if slots is not None and (step == 0 or num_waiting[step - 1] == 0):
            num_free = slots - int(num_running[step]) + change
        schedules.append(
            StepSchedule(
                step=step,
                freed=freed[step],
                taken_ns=taken[step],
                num_wanting=int(num_waiting[step]) + change,
                num_free=num_free,
            )
        )
    return schedules


def refills_after_abandons(
    frames: RunFrames, cancels: pd.DataFrame, facts: RunFacts
) -> pd.DataFrame:
    if cancels.empty or facts.lacks("lifecycle", "steps"):
        return pd.DataFrame({name: [] for name in _REFILL_COLUMNS})
    refills = slot_refills(frames, facts)
    return refills[is_among(refills["request_id"], cancels["request_id"])]


def refill_figures(refills: pd.DataFrame, cancels: pd.DataFrame, facts: RunFacts) -> Figures:
    why = NOBODY_LEFT if cancels.empty else facts.lacks("lifecycle", "steps")
    if why is not None:
        return same_reason(("slot_refill_s", "refilled_next_schedule"), why)
    why = "no abandoned request gave a slot back while the server was watched"
    if (cancels["admitted_ns"].notna() & cancels["freed_ns"].notna()).any():
        why = "no request waited for a slot when an abandoned one was freed"
    at_once = refills["next_schedule"]
    return {
        "slot_refill_s": sampled(
            "slot_refill_s", Sample.of(refills, "refill_s"), why, method="exact"
        ),
        "refilled_next_schedule": proportion(
            "refilled_next_schedule", at_once, why, method="exact"
        ),
    }
