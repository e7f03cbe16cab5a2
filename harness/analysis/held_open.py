"""How many requests the clients hold open, and when they leave: the client's side of every balance.

A request is held from its sending until its client has read its end or goes away. What the server
shows beyond that is held for nobody.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.analysis.stats import Floats, Ints
from harness.analysis.token_times import without_tokens
from harness.records import Outcome, WireClose

# Their server cannot know why they went: to it they are all the same.
LEFT = (Outcome.ABANDONED, Outcome.CUT_OFF, Outcome.TIMED_OUT)
RACE = "last_token"  # the plan of those who leave as the last token is made


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """When answers were asked for and let go of by their clients, each sorted by itself (ns).

    A request for n answers stands n times. `left_ns`: of those that went away before the end;
    `unanswered_ns`: of those among them that had no answer at all yet; `uncounted_ns`: of these and
    those who raced for the last token: the server may have aborted nothing of theirs.
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
        """How many are held at each time."""
        begun = np.searchsorted(self.started_ns, t_ns, side="right")
        return (begun - np.searchsorted(self.ended_ns, t_ns, side="right")).astype(float)

    def left_by(self, t_ns: Ints) -> Ints:
        """How many have gone away by each time."""
        return np.searchsorted(self.left_ns, t_ns, side="right")


def num_abandoned(requests: pd.DataFrame) -> int:
    """How many requests were left on purpose: without any there is nothing to tell of a cancel."""
    return int((requests["outcome"] == Outcome.ABANDONED).sum())


def is_unopened(requests: pd.DataFrame) -> pd.Series:
    """Which requests were given up before there was a connection: no server ever had them."""
    return requests["wire_close"] == WireClose.UNOPENED


def held_open(requests: pd.DataFrame) -> Held:
    """Of all requests that the server took. Those that it refused, that failed without a token, or
    that never had a connection it never held."""
    is_refused = requests["outcome"] == Outcome.REJECTED
    is_refused |= (requests["outcome"] == Outcome.FAILED) & requests["first_token_ns"].isna()
    taken = without_tokens(requests)[~is_refused & ~is_unopened(requests)]
    answers = taken["n"].to_numpy(dtype=np.int64) if "n" in taken else np.ones(len(taken), np.int64)
    until = taken["abandoned_ns"].fillna(taken["ended_ns"]).to_numpy(dtype=np.int64)
    is_left = taken["outcome"].isin(LEFT).to_numpy()
    is_mute = is_left & taken["first_token_ns"].isna().to_numpy()
    may_be_uncounted = is_mute | (is_left & (taken["plan"] == RACE).to_numpy())
    return Held(
        started_ns=np.sort(np.repeat(taken["sent_ns"].to_numpy(dtype=np.int64), answers)),
        ended_ns=np.sort(np.repeat(until, answers)),
        left_ns=np.sort(np.repeat(until[is_left], answers[is_left])),
        unanswered_ns=np.sort(np.repeat(until[is_mute], answers[is_mute])),
        uncounted_ns=np.sort(np.repeat(until[may_be_uncounted], answers[may_be_uncounted])),
    )
