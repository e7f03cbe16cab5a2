"""The lifecycle log as one frame: when each branch was in the batch.

A branch is one of the answers that a request asked for. It enters the batch when it is admitted, is
put back into the queue by a preemption, and enters again when it is resumed: each stay is a life of
its own. The blocks of its last life are given back when it is removed, or a little later.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import pandas as pd

from harness.store.frames import RunFrames

_ENTERS: Final = ("admitted", "resumed")
_LEAVES: Final = ("preempted", "removed")
_FREES: Final = "blocks_freed"


@lru_cache(maxsize=2)  # several figures derive from that of one run
def timeline(frames: RunFrames) -> pd.DataFrame:
    """One row a life, by branch.

    client_request_id and server_request_id, the latter the branch's own; life, from 0; in_ns;
    out_ns and reason, preempted or removed (null while it was in the batch when the log ended);
    freed_ns, when that life's blocks were given back (null if a preemption ended it); freed_order,
    the rank of that event in the log; blocks, those it had on entering.
    """
    log = frames.lifecycle
    events = log[log["event"].isin((*_ENTERS, *_LEAVES, _FREES))]
    events = events.sort_values("t_ns", kind="stable")
    branch, ids = pd.factorize(events["request_id"])
    kind = events["event"]
    life = kind.isin(_ENTERS).groupby(branch).cumsum().to_numpy(dtype=np.int64) - 1
    events = events.assign(branch=branch, life=life, order=np.arange(len(events)))[life >= 0]
    kind, key = events["event"], ["branch", "life"]
    entered = events[kind.isin(_ENTERS)].set_index(key)
    left = events[kind.isin(_LEAVES)].drop_duplicates(key).set_index(key).reindex(entered.index)
    freed = events[kind == _FREES].drop_duplicates(key).set_index(key).reindex(entered.index)
    is_preempted = left["event"] == "preempted"
    return (
        pd.DataFrame(
            {
                "client_request_id": entered["client_request_id"],
                "server_request_id": ids[entered.index.get_level_values("branch")],
                "in_ns": entered["t_ns"],
                "out_ns": left["t_ns"].astype("Int64"),
                "reason": left["event"],
                "freed_ns": freed["t_ns"].astype("Int64").mask(is_preempted),
                "freed_order": freed["order"].astype("Int64"),
                "blocks": entered["num_blocks"],
            }
        )
        .reset_index("life")
        .reset_index(drop=True)
    )
