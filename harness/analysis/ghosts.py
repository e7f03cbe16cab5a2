"""Ghosts as seen from outside, where a server shows nothing of single requests.

By gauge: requests still in the server after the settle time, when all should be over. A ghost that
came to its natural end before then is not seen, so this is a lower bound. If few requests had
enough left to generate to last so long, an empty server shows nothing.

By a counter of aborts: requests that were left and not aborted. It sees ghosts that ended by
themselves, but only if the counter can be believed. A counter that stands still for another reason
would make every request a ghost, so the ghosts may not outnumber the requests that are still there
or may have ended since.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import Figure, NotMeasurable, rate
from harness.analysis.open_requests import LEFT, RACE, is_unopened
from harness.analysis.scraped import typical_step_s
from harness.analysis.stats import rate_upper95
from harness.analysis.tokens import tokens_read, without_tokens
from harness.records import Metric
from harness.store.frames import RunFrames

# With no more tokens than this to come, the end may be on its way before a server can know.
_ON_THE_WAY: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ghosts:
    """At least `low` of `n` requests that were left went on, and at most `high` (None: not known).

    `lost_slots`: slots held by no request; None where slots and ghosts cannot be told apart.
    `still_generating`: tokens counted after the settle time, when no client waits for any.
    """

    n: int
    low: int
    high: int | None
    lost_slots: int | None = 0
    still_generating: float | None = None


def ghosts_by_gauge(frames: RunFrames, facts: Facts) -> Ghosts | NotMeasurable:
    """(running + waiting, idle after the settle time - before), of the requests that were left.

    The gauge counts a lost slot like a ghost. If the server is known to compute nothing any more,
    all of them are lost slots; else they may be.
    """
    left, there = _left(frames, facts), _still_there(facts)
    n = len(left)
    if there is None:
        return NotMeasurable(f"{facts.engine}'s running requests were not read when it was idle")
    is_at_rest, there = facts.still_computing is False, int(np.clip(there, 0, n))
    lost = there if is_at_rest else None
    # A ghost that would still run after the settle time needs so much left to generate.
    lasting = int((left["time_left_s"] >= 2 * facts.settle_s).sum())
    is_known = left["time_left_s"].notna().all() and np.isfinite(facts.settle_s)
    if there == (lost or 0) and is_known and 2 * lasting < n:
        return NotMeasurable(
            f"no ghost was there after the settle time, but only {lasting} of {n} requests left "
            f"had twice that time ({facts.settle_s:g} s) left to run: a ghost among the others "
            "would have ended by itself"
        )
    going_on = facts.generated_later
    return Ghosts(
        n=n,
        low=there - (lost or 0),
        high=None,
        lost_slots=lost if there else 0,
        still_generating=going_on if going_on or is_at_rest else None,
    )


def ghosts_by_counter(frames: RunFrames, facts: Facts) -> Ghosts | NotMeasurable:
    """Requests that were left - aborts counted, idle after the settle time - before.

    A client that left before it had read anything may be gone before the server saw the request,
    and one with the end on the way may have had it first: it is not known whether these are ghosts.
    """
    left, aborted = _left(frames, facts), facts.idle_change("aborted")
    if aborted is None or facts.trust.get("aborted") != "exact":
        return NotMeasurable(f"{facts.engine} has no counter of aborts that can be believed")
    if facts.idle_later.get("aborted", facts.idle_after["aborted"]) != facts.idle_after["aborted"]:
        return NotMeasurable(f"{facts.metric_names['aborted']} still moved after the settle time")
    n, missing, there = len(left), round(len(left) - aborted), _still_there(facts)
    unsure = int(left["is_unsure"].sum())
    is_unlikely = missing < 0 or (there is None and not aborted)
    if there is not None and left["time_left_s"].notna().all():
        may_have_ended = int((left["time_left_s"] < left["watched_s"]).sum())
        is_unlikely |= missing > max(0, there) + unsure + may_have_ended
    if is_unlikely:
        return NotMeasurable(
            f"{facts.metric_names['aborted']} moved by {aborted:g} for {n} requests left, which "
            "no other reading explains: it does not count all of them, or others too"
        )
    return Ghosts(n=n, low=max(0, missing - unsure), high=missing)


def _left(frames: RunFrames, facts: Facts) -> pd.DataFrame:
    """The requests that their clients left, one row for each answer that they asked for.

    `time_left_s`: how long it would have gone on at the pace of a typical step (NaN if no step was
    seen); `watched_s`: for how long the server was observed since; `is_unsure`: left without any
    answer, or with the end on its way.
    """
    read = pd.Series(tokens_read(frames.requests), index=frames.requests.index)
    rows = without_tokens(frames.requests)
    to_come = rows["max_tokens"] - read / rows["n"]
    since_ns = rows["abandoned_ns"].fillna(rows["ended_ns"]).astype("int64")
    is_race = (to_come <= _ON_THE_WAY) | (rows["plan"] == RACE)
    step_s = typical_step_s(frames)
    found = pd.DataFrame(
        {
            "time_left_s": to_come * (np.nan if step_s is None else step_s),
            "watched_s": (facts.observed_until_ns - since_ns) / 1e9,
            "is_unsure": rows["first_token_ns"].isna() | is_race,
        }
    )
    is_left = rows["outcome"].isin(LEFT) & ~is_unopened(rows)
    return found[is_left].loc[found.index[is_left].repeat(rows.loc[is_left, "n"])]


def _still_there(facts: Facts) -> int | None:
    running, waiting = (facts.idle_change(role) for role in ("running", "waiting"))
    if running is None or facts.trust.get("running") == "stuck":
        return None
    return round(running + (waiting or 0.0))


def ghost_rate(found: Sequence[Ghosts], method: str) -> Metric:
    """The share of requests that went on, of one run or of several.

    With at least one certain ghost it is a lower bound, without a word about how many more there
    may be. If there may be none, only the upper limit is known (95 %).
    """
    n, low = sum(one.n for one in found), sum(one.low for one in found)
    highs = [one.high for one in found if one.high is not None]
    is_bounded = len(highs) == len(found)
    if is_bounded and sum(highs) == low:
        return rate(low, n, method=method)
    figure = Metric(unit="ratio", n=n, mean=low / n, method=method, bound="lower")
    if is_bounded and not low:
        figure.mean, figure.bound = None, "upper"
        figure.upper95 = rate_upper95(sum(highs), n)
    going_on = [one.still_generating for one in found if one.still_generating is not None]
    if going_on:
        figure.others["still_generating"] = sum(going_on)
    if any(one.lost_slots is None for one in found):
        figure.of = "ghosts or lost slots"
    elif lost := sum(one.lost_slots or 0 for one in found):
        figure.others["lost_slots"] = float(lost)
    return figure


def best_first(figures: dict[str, Figure]) -> dict[str, Figure]:
    def has_no_mean(name: str) -> bool:
        figure = figures[name]
        return isinstance(figure, Metric) and figure.mean is None

    return {name: figures[name] for name in sorted(figures, key=has_no_mean)}
