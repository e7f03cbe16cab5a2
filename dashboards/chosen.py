"""Which requests the page lists: the worst, and a random sample of the others.

A run may have a million requests and a page cannot. So the worst are listed, in this order:
ghosts; what went wrong (failed, timed out, rejected); then by how far a request lies in the tail of
its own kind, the cancel latency of those who left, the first token of those who stayed. A sample of
the rest, drawn with the run's seed, shows what is usual: the same run always lists the same.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.stats import Floats, Ints
from harness.records import Outcome

WORST: Final = 2_000
SAMPLE: Final = 500
_WRONG: Final = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.REJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Positions of rows, the worst first, then the sample; `total` is of how many."""

    positions: Ints
    worst: int
    total: int
    seed: int

    @property
    def words(self) -> str:
        """Which requests are listed, and how many they are."""
        if len(self.positions) == self.total:
            return f"All {self.total:,} requests of the run are listed, the worst first."
        return (
            f"Of {self.total:,} requests the worst {self.worst:,} are listed, and a random sample "
            f"of {len(self.positions) - self.worst:,} of the others (seed {self.seed})."
        )


def choose(
    requests: pd.DataFrame,
    cancels: pd.DataFrame,
    *,
    seed: int,
    worst: int = WORST,
    sample: int = SAMPLE,
) -> Chosen:
    """Choose rows of `requests`; `cancels` is `cancellations` of the same run."""
    order = worst_first(requests, cancels)
    total = len(order)
    if total <= worst + sample:
        return Chosen(positions=order, worst=total, total=total, seed=seed)
    others = order[worst:]
    drawn = np.sort(np.random.default_rng(seed).choice(len(others), sample, replace=False))
    return Chosen(
        positions=np.concatenate([order[:worst], others[drawn]]),
        worst=worst,
        total=total,
        seed=seed,
    )


def worst_first(requests: pd.DataFrame, cancels: pd.DataFrame) -> Ints:
    """The positions of all rows, the worst first; of equals the earlier."""
    left = cancels.set_index("request_id")
    ids = requests["request_id"]
    is_ghost = ids.isin(left.index[left["ghost"].fillna(value=False).astype(bool)])
    is_wrong = requests["outcome"].isin(_WRONG)
    kind = np.select([is_ghost.to_numpy(), is_wrong.to_numpy()], [0, 1], default=2)
    let_go = left["cancel_latency_s"].reindex(ids).to_numpy(dtype=float)
    order: Ints = np.lexsort((-_tail(let_go, _ttft(requests)), kind))
    return order


def _tail(let_go: Floats, ttft: Floats) -> Floats:
    """Where in its own kind's distribution each request lies: 1 is the largest, 0 not known."""
    has_left = ~np.isnan(let_go)
    shares: Floats = np.where(has_left, _share(let_go), _share(np.where(has_left, np.nan, ttft)))
    return shares


def _share(values: Floats) -> Floats:
    ranks = pd.Series(values).rank(pct=True, method="max").fillna(0.0)
    return np.asarray(ranks, dtype=np.float64)


def _ttft(requests: pd.DataFrame) -> Floats:
    gap = requests["first_token_ns"] - requests["sent_ns"]
    return gap.to_numpy(dtype=float, na_value=np.nan)
