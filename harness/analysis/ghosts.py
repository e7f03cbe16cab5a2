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
from harness.analysis.open_requests import LEFT, RACE, is_unopened, open_requests
from harness.analysis.scraped import typical_step_s
from harness.analysis.stats import Floats, rate_upper95
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
    n = open_requests(frames.requests).n_left
    there = _still_there(facts)
    if there is None:
        return NotMeasurable(f"{facts.engine}'s running requests were not read when it was idle")
    is_at_rest, there = facts.still_computing is False, int(np.clip(there, 0, n))
    lost = there if is_at_rest else None
    lasting = _lasting(frames, facts)
    if there == (lost or 0) and lasting is not None and 2 * lasting < n:
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
    held, aborted = open_requests(frames.requests), facts.idle_change("aborted")
    if aborted is None or facts.trust.get("aborted") != "exact":
        return NotMeasurable(f"{facts.engine} has no counter of aborts that can be believed")
    if facts.idle_later.get("aborted", facts.idle_after["aborted"]) != facts.idle_after["aborted"]:
        return NotMeasurable(f"{facts.metric_names['aborted']} still moved after the settle time")
    n, missing = held.n_left, round(held.n_left - aborted)
    unseen, ended = _unsure(frames), _may_have_ended(frames, facts)
    there = _still_there(facts)
    is_unlikely = missing < 0 or (there is None and not aborted)
    if there is not None and ended is not None:
        is_unlikely |= missing > max(0, there) + unseen + ended
    if is_unlikely:
        return NotMeasurable(
            f"{facts.metric_names['aborted']} moved by {aborted:g} for {n} requests left, which "
            "no other reading explains: it does not count all of them, or others too"
        )
    return Ghosts(n=n, low=max(0, missing - unseen), high=missing)


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
    _add_what_is_there(figure, found)
    return figure


def _add_what_is_there(figure: Metric, found: Sequence[Ghosts]) -> None:
    going_on = [one.still_generating for one in found if one.still_generating is not None]
    if going_on:
        figure.others["still_generating"] = sum(going_on)
    if any(one.lost_slots is None for one in found):
        figure.of = "ghosts or lost slots"
    elif lost := sum(one.lost_slots or 0 for one in found):
        figure.others["lost_slots"] = float(lost)


def best_first(figures: dict[str, Figure]) -> dict[str, Figure]:
    """Figures with a mean before those with only an upper limit."""
    return dict(sorted(figures.items(), key=lambda pair: _has_no_mean(pair[1])))


def _has_no_mean(figure: Figure) -> bool:
    return isinstance(figure, Metric) and figure.mean is None


def _still_there(facts: Facts) -> int | None:
    running, waiting = (facts.idle_change(role) for role in ("running", "waiting"))
    if running is None or facts.trust.get("running") == "stuck":
        return None
    return round(running + (waiting or 0.0))


def _left(frames: RunFrames) -> pd.DataFrame:
    """The requests left, one row for each answer that they asked for."""
    read = pd.Series(tokens_read(frames.requests), index=frames.requests.index)
    rows = without_tokens(frames.requests).assign(read=read / frames.requests["n"])
    rows = rows[rows["outcome"].isin(LEFT) & ~is_unopened(rows)]
    return rows.loc[rows.index.repeat(rows["n"])]


def _time_left_s(left: pd.DataFrame, frames: RunFrames) -> Floats | None:
    """How long each would have gone on at the pace of a typical step; None if no step was seen."""
    step_s = typical_step_s(frames)
    if step_s is None:
        return None
    return (left["max_tokens"] - left["read"]).to_numpy(dtype=float) * step_s


def _lasting(frames: RunFrames, facts: Facts) -> int | None:
    """How many had so much left that a ghost among them would still run after the settle time."""
    time_left_s = _time_left_s(_left(frames), frames)
    if time_left_s is None or not np.isfinite(facts.settle_s):
        return None
    return int((time_left_s >= 2 * facts.settle_s).sum())


def _may_have_ended(frames: RunFrames, facts: Facts) -> int | None:
    """How many may have come to a natural end within the settle time."""
    left = _left(frames)
    time_left_s = _time_left_s(left, frames)
    if time_left_s is None:
        return None
    since_ns = left["abandoned_ns"].fillna(left["ended_ns"]).to_numpy(dtype=np.int64)
    watched_s = (facts.observed_until_ns - since_ns) / 1e9
    return int((time_left_s < watched_s).sum())


def _unsure(frames: RunFrames) -> int:
    """How many were left without any answer, or with the end on its way."""
    left = _left(frames)
    is_race = left["max_tokens"] - left["read"] <= _ON_THE_WAY
    is_race |= left["plan"] == RACE
    return int((left["first_token_ns"].isna() | is_race).sum())
