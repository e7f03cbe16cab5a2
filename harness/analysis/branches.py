"""A request for n answers is n requests to the worker: its *branches*.

The client leaves all of them at once, and its request is gone when the last branch is. So what
begins is that of the first branch, what ends is that of the last one, and tokens are of all.
A branch is known by the server's own id; all carry the client's.
"""

from typing import Final

import pandas as pd

from harness.analysis.ids import is_among

# What the frontend says of the request as a whole, under a name that is no branch's.
_OF_THE_WHOLE: Final = ("arrived", "disconnected", "abort_sent")


def branches_of(left: pd.DataFrame, lifecycle: pd.DataFrame) -> pd.DataFrame:
    """One row a branch that the log knows, in no particular order.

    `owner`: the position of its request in `left`, whose `t0_ns` it has, too; server_request_id;
    removed_ns, freed_ns, finish_reason and num_generated (null while it has not ended). One that
    has not come to the worker yet stands for all of its request.
    """
    owners = pd.Series(range(len(left)), index=left["request_id"].to_numpy())
    events = lifecycle[is_among(lifecycle["client_request_id"], owners.index)]
    events = events.sort_values("t_ns", kind="stable").drop_duplicates(["request_id", "event"])
    is_workers = ~events["event"].isin(_OF_THE_WHOLE)
    has_come = is_among(events["client_request_id"], events.loc[is_workers, "client_request_id"])
    told = events[is_workers | ~has_come].drop_duplicates("request_id")
    owner = told["client_request_id"].map(owners).to_numpy(dtype="int64")
    ids = told["request_id"].to_numpy()
    finished = _of(events, "finished")
    return pd.DataFrame(
        {
            "owner": owner,
            "t0_ns": left["t0_ns"].to_numpy()[owner],
            "server_request_id": ids,
            "removed_ns": _of(events, "removed")["t_ns"].reindex(ids).to_numpy(),
            "freed_ns": _of(events, "blocks_freed")["t_ns"].reindex(ids).to_numpy(),
            "finish_reason": finished["reason"].reindex(ids).to_numpy(),
            "num_generated": finished["num_generated"].reindex(ids).to_numpy(),
        }
    ).astype({"removed_ns": "Int64", "freed_ns": "Int64", "num_generated": "Int64"})


def ends_of(left: pd.DataFrame, branches: pd.DataFrame) -> pd.DataFrame:
    """For each request of `left`: removed_ns and freed_ns of the branch that was last, how that
    one finished, and the tokens of all (final_num_generated). Null while not all of them have
    ended."""
    by_owner = branches.sort_values("removed_ns", kind="stable").groupby("owner")
    answers = left["n"].to_numpy()
    found = pd.DataFrame(
        {
            "removed_ns": by_owner["removed_ns"].max(),
            "freed_ns": by_owner["freed_ns"].max(),
            "finish_reason": by_owner["finish_reason"].last(),
            "final_num_generated": by_owner["num_generated"].sum(),
        }
    ).reindex(range(len(left)))
    counted = {
        "removed_ns": "removed_ns",
        "freed_ns": "freed_ns",
        "finish_reason": "num_generated",
        "final_num_generated": "num_generated",
    }
    for column, evidence in counted.items():
        number = by_owner[evidence].count().reindex(range(len(left)), fill_value=0)
        found[column] = found[column].where(number.to_numpy() >= answers)
    found["finish_reason"] = found["finish_reason"].astype(object)
    return found.set_index(left.index)


def _of(events: pd.DataFrame, event: str) -> pd.DataFrame:
    return events[events["event"] == event].set_index("request_id")
