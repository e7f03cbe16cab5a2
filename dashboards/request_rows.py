"""What the page knows of single requests: columns for the table, stamps for the timeline.

All of it goes to the browser as JSON, a list a column, and is put into the page there as text. Time
is in milliseconds since the request was sent; what is not known is null.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from dashboards.chosen import Chosen, choose
from dashboards.source import Run
from harness.analysis.cancellation import is_unfinished
from harness.analysis.stats import Ints
from harness.analysis.tokens import without_tokens

MOST_TICKS: Final = 60  # token marks of one request that a timeline can show apart
_TEXTS: Final = ("request_id", "arm", "role", "outcome", "plan", "way", "wire_close", "error")
_NUMBERS: Final = ("planned_abandon", "prompt_tokens", "tokens_read", "max_tokens", "status_code")
_CLIENT_STAMPS: Final = {
    "intended": "intended_start_ns",
    "first_token": "first_token_ns",
    "last_token": "last_token_ns",
    "left": "abandoned_ns",
    "ended": "ended_ns",
}
_BEGINS: Final = {
    "arrived": "arrived",
    "admitted": "admitted",
    "preempted": "preempted",
    "resumed": "resumed",
    "saw": "disconnected",
    "heard": "abort_received",
}
_ENDS: Final = {"removed": "removed", "freed": "blocks_freed"}


def request_rows(run: Run) -> tuple[Chosen, Mapping[str, Any]]:
    """The rows that are listed, and their data: `columns`, `stamps`, `ticks` and `worst`."""
    requests = run.frames.requests
    chosen = choose(requests, run.cancels, seed=run.manifest.seed)
    rows = requests.iloc[chosen.positions].reset_index(drop=True)
    sent_ns = rows["sent_ns"].to_numpy(dtype=np.int64)
    return chosen, {
        "worst": chosen.worst,
        "watched_s": run.manifest.settle_s,
        "columns": {**_columns(rows), **_cancel_columns(rows, run.cancels)},
        "stamps": _stamps(rows, run, sent_ns),
        "ticks": _ticks(rows["token_times_ns"], sent_ns),
    }


def _columns(rows: pd.DataFrame) -> dict[str, list[Any]]:
    plain = without_tokens(rows)
    texts = {name: _objects(plain[name]) for name in _TEXTS}
    return texts | {name: _objects(plain[name]) for name in _NUMBERS}


def _cancel_columns(rows: pd.DataFrame, cancels: pd.DataFrame) -> dict[str, list[Any]]:
    """What became of those who left; null for the others."""
    left = cancels.set_index("request_id").reindex(rows["request_id"])
    names = ("phase", "ghost", "censored", "finish_reason", "cancel_latency_steps", "wasted_tokens")
    found = {name: _objects(left[name]) for name in names}
    found["is_unfinished"] = is_unfinished(left).tolist()
    return found | {"let_go_ms": _milliseconds(left["cancel_latency_s"] * 1e3)}


def _stamps(rows: pd.DataFrame, run: Run, sent_ns: Ints) -> dict[str, list[float | None]]:
    """When each thing happened; what the server stamped only where its clock is the client's."""
    stamps = {name: _since(rows[column], sent_ns) for name, column in _CLIENT_STAMPS.items()}
    if not run.manifest.clock.comparable:
        return stamps
    events = run.frames.lifecycle
    events = events[events["client_request_id"].isin(rows["request_id"])]
    for names, keep in ((_BEGINS, "min"), (_ENDS, "max")):
        for name, event in names.items():
            of_event = events[events["event"] == event].groupby("client_request_id")["t_ns"]
            t_ns = of_event.agg(keep).astype("Int64")
            stamps[name] = _since(t_ns.reindex(rows["request_id"]), sent_ns)
    return stamps


def _since(stamps: pd.Series, sent_ns: Ints) -> list[float | None]:
    """Milliseconds since the sending. In whole numbers first: a float has too few digits for ns."""
    known = stamps.notna().to_numpy()
    whole = stamps.astype("Int64").to_numpy(dtype=np.int64, na_value=0)
    return _milliseconds(pd.Series(np.where(known, (whole - sent_ns) / 1e6, np.nan)))


def _milliseconds(values: pd.Series) -> list[float | None]:
    rounded = values.to_numpy(dtype=float, na_value=np.nan).round(3)
    return [None if np.isnan(one) else one for one in rounded.tolist()]


def _ticks(token_times: pd.Series, sent_ns: Ints) -> list[list[float]]:
    """When text came, in tenths of milliseconds; of many events every so-manieth."""
    lists: Sequence[list[int]] = pa.array(token_times, type=pa.list_(pa.int64())).to_pylist()
    return [
        [round((t - sent) / 1e6, 1) for t in times[:: max(1, -(-len(times) // MOST_TICKS))]]
        for times, sent in zip(lists, sent_ns.tolist(), strict=True)
    ]


def _objects(column: pd.Series) -> list[Any]:
    return [None if pd.isna(one) else one for one in column.tolist()]
