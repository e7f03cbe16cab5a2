"""How many requests the clients hold open, and when they leave."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from harness.analysis.run_facts import RunFacts
from harness.analysis.tokens import without_tokens
from harness.records import Outcome, Way, WireClose
from harness.stats import NEVER, Floats, Ints
from harness.store.frames import RunFrames

# A server cannot know why a client went away: to it these are all alike.
LEFT = (Outcome.ABANDONED, Outcome.CUT_OFF, Outcome.TIMED_OUT)
RACE = "last_token"  # the plan of clients that leave as the last token is made
QUEUED = "queued"  # the plan of clients that leave while they wait


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequests:
    """The times (ns) at which clients asked for answers and let go of them, each array sorted.

    A request for n answers stands n times. `left_ns`: clients that went away before the end.
    `unanswered_ns`: the clients among these that had no answer yet. `uncounted_ns`: the unanswered,
    and races for the last token: the server may have aborted nothing.
    """

    started_ns: Ints
    ended_ns: Ints
    left_ns: Ints
    unanswered_ns: Ints
    uncounted_ns: Ints

    @property
    def n_left(self) -> int:
        return len(self.left_ns)

    def at(self, t_ns: Ints) -> Floats:
        begun = np.searchsorted(self.started_ns, t_ns, side="right")
        return (begun - np.searchsorted(self.ended_ns, t_ns, side="right")).astype(float)


def most_open(started_ns: ArrayLike, ended_ns: ArrayLike) -> int:
    """The most that were open at one moment; one that ends then is not."""
    started, ended = np.sort(started_ns), np.sort(ended_ns)
    over = np.searchsorted(ended, started, side="right")
    return int((np.arange(1, len(started) + 1) - over).max(initial=0))


def num_abandoned(requests: pd.DataFrame) -> int:
    return int((requests["outcome"] == Outcome.ABANDONED).sum())


def let_go_ns(requests: pd.DataFrame) -> pd.Series:
    return requests["abandoned_ns"].fillna(requests["ended_ns"]).astype(np.int64)


def is_unopened(requests: pd.DataFrame) -> pd.Series:
    return requests["wire_close"] == WireClose.UNOPENED


def open_requests(requests: pd.DataFrame) -> OpenRequests:
    is_refused = requests["outcome"] == Outcome.REJECTED
    is_refused |= (requests["outcome"] == Outcome.FAILED) & requests["first_token_ns"].isna()
    taken = without_tokens(requests)[~is_refused & ~is_unopened(requests)]
    answers = taken["n"].to_numpy(dtype=np.int64)
    until = let_go_ns(taken).to_numpy()
    is_left = taken["outcome"].isin(LEFT).to_numpy()
    is_mute = is_left & taken["first_token_ns"].isna().to_numpy()
    may_be_uncounted = is_mute | (is_left & (taken["plan"] == RACE).to_numpy())
    return OpenRequests(
        started_ns=np.sort(np.repeat(taken["sent_ns"].to_numpy(dtype=np.int64), answers)),
        ended_ns=np.sort(np.repeat(until, answers)),
        left_ns=np.sort(np.repeat(until[is_left], answers[is_left])),
        unanswered_ns=np.sort(np.repeat(until[is_mute], answers[is_mute])),
        uncounted_ns=np.sort(np.repeat(until[may_be_uncounted], answers[may_be_uncounted])),
    )


@lru_cache(maxsize=1)  # several figures derive from that of one run
def open_in_run(frames: RunFrames) -> OpenRequests:
    return open_requests(frames.requests)


_HELD: Final = [way for way in Way if way.stays_open]


def reset_by_us_ns(left: pd.DataFrame, requests: pd.DataFrame, facts: RunFacts) -> Ints:
    """The earliest moment, for each request that was left, at which the load may have reset its
    connection, NEVER if the connection ended as the client left.

    A run that ended too early to record until when it held them has them held until all requests of
    the load had ended. With several loads on one server (`run.loops`) a request belongs to the load
    before the next idle reading.
    """
    t0_ns = left["t0_ns"].to_numpy(dtype=np.int64)
    held_ns = np.array([*facts.held_until_ns, NEVER], dtype=np.int64)
    recorded = held_ns[np.searchsorted(held_ns, t0_ns)]
    idle_ns = np.array([t_ns for t_ns, _ in facts.idle_loops], dtype=np.int64)
    ended_ns = requests["ended_ns"].to_numpy(dtype=np.int64)
    load_end = pd.Series(ended_ns).groupby(np.searchsorted(idle_ns, ended_ns)).max()
    own_end = pd.Series(np.searchsorted(idle_ns, t0_ns)).map(load_end).fillna(NEVER)
    resets = np.where(recorded < NEVER, recorded, own_end.to_numpy(dtype=np.int64))
    return np.where(left["way"].isin(_HELD), resets, NEVER)


def reset_warnings(requests: pd.DataFrame, cancels: pd.DataFrame, facts: RunFacts) -> Iterator[str]:
    held = int(requests.loc[requests["abandoned_ns"].notna(), "way"].isin(_HELD).sum())
    if not held:
        return
    what = f"{held} users left their connections open (stop_reading, vanish)"
    if not facts.has_lifecycle or not facts.clocks_agree:
        yield (
            f"{what}; these are reset when the server had time to settle: where it had not noticed "
            "before, latencies by gauge and counter are of that reset"
        )
        return
    unnoticed = int(cancels["was_reset_by_us"].sum())
    if unnoticed:
        yield (
            f"{what}, of which the server had not noticed {unnoticed} when the run ended and "
            "reset them: their latencies are censored there"
        )
