"""The sample of requests that a page lists, and their data.

The worst requests are listed, in this order: ghosts; requests that failed, timed out or were
refused; then by how far a request lies in the tail of its own kind: abandoned requests by cancel
latency, the others by first token. A sample of the rest, drawn with the run's seed, shows usual
requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from harness.analysis.cancellations import is_unfinished
from harness.analysis.tokens import without_tokens
from harness.export.library import Run
from harness.metrics import CANCEL_LATENCY, CANCEL_LATENCY_STEPS
from harness.records import WENT_WRONG
from harness.stats import Floats, Ints

WORST: Final = 2_000
SAMPLE: Final = 500
MOST_TICKS: Final = 60  # token marks of one request that a timeline can show apart
_OF_REQUEST: Final = (
    *("request_id", "arm", "role", "outcome", "plan", "way", "wire_close", "error"),
    *("planned_abandon", "prompt_tokens", "tokens_read", "max_tokens", "status_code"),
)
_OF_CANCEL: Final = (
    "phase",
    "ghost",
    "censored",
    "finish_reason",
    CANCEL_LATENCY_STEPS,
    "wasted_tokens",
)
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


@dataclass(frozen=True, slots=True)
class RequestSample:
    """Positions of rows, the worst first, then the sample; `total`: the number of requests."""

    positions: Ints
    worst: int
    total: int
    seed: int

    @property
    def text(self) -> str:
        if len(self.positions) == self.total:
            return f"All {self.total:,} requests of the run are listed, the worst first."
        return (
            f"The worst {self.worst:,} of {self.total:,} requests are listed, and a random sample "
            f"of {len(self.positions) - self.worst:,} of the others (seed {self.seed})."
        )


def sample_requests(
    requests: pd.DataFrame,
    cancels: pd.DataFrame,
    *,
    seed: int,
    worst: int = WORST,
    sample: int = SAMPLE,
) -> RequestSample:
    order = worst_first(requests, cancels)
    total = len(order)
    if total <= worst + sample:
        return RequestSample(order, total, total, seed)
    others = order[worst:]
    drawn = np.sort(np.random.default_rng(seed).choice(len(others), sample, replace=False))
    return RequestSample(np.concatenate([order[:worst], others[drawn]]), worst, total, seed)


def worst_first(requests: pd.DataFrame, cancels: pd.DataFrame) -> Ints:
    left = cancels.set_index("request_id")
    ids = requests["request_id"]
    is_ghost = ids.isin(left.index[left["ghost"].fillna(value=False).astype(bool)])
    is_wrong = requests["outcome"].isin(WENT_WRONG)
    kind = np.select([is_ghost.to_numpy(), is_wrong.to_numpy()], [0, 1], default=2)
    let_go = left[CANCEL_LATENCY].reindex(ids).to_numpy(dtype=float)
    gap = requests["first_token_ns"] - requests["sent_ns"]
    ttft = gap.to_numpy(dtype=float, na_value=np.nan)
    order: Ints = np.lexsort((-_tail(let_go, ttft), kind))
    return order


def _tail(let_go: Floats, ttft: Floats) -> Floats:
    """The place of each request in the distribution of its kind: 1 is the largest, 0 not known."""
    has_left = ~np.isnan(let_go)
    shares: Floats = np.where(has_left, _share(let_go), _share(np.where(has_left, np.nan, ttft)))
    return shares


def _share(values: Floats) -> Floats:
    ranks = pd.Series(values).rank(pct=True, method="max").fillna(0.0)
    return np.asarray(ranks, dtype=np.float64)


def request_rows(run: Run) -> tuple[RequestSample, Mapping[str, Any]]:
    requests = run.frames.requests
    sample = sample_requests(requests, run.cancellations, seed=run.manifest.seed)
    rows = requests.iloc[sample.positions].reset_index(drop=True)
    sent_ns = rows["sent_ns"].to_numpy(dtype=np.int64)
    return sample, {
        "worst": sample.worst,
        "watched_s": run.manifest.settle_s,
        "columns": _columns(rows, run.cancellations),
        "stamps": _stamps(rows, run, sent_ns),
        "ticks": _ticks(rows["token_times_ns"], sent_ns),
    }


def _columns(rows: pd.DataFrame, cancels: pd.DataFrame) -> dict[str, list[Any]]:
    plain = without_tokens(rows)
    left = cancels.set_index("request_id").reindex(rows["request_id"])
    return {
        **{name: _objects(plain[name]) for name in _OF_REQUEST},
        **{name: _objects(left[name]) for name in _OF_CANCEL},
        "is_unfinished": is_unfinished(left).tolist(),
        "let_go_ms": _milliseconds(left[CANCEL_LATENCY] * 1e3),
    }


def _stamps(rows: pd.DataFrame, run: Run, sent_ns: Ints) -> dict[str, list[float | None]]:
    """The server's stamps are left out unless its clock is the client's."""
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
    """Milliseconds since the sending, subtracted as integers: a float has too few digits for ns."""
    known = stamps.notna().to_numpy()
    whole = stamps.astype("Int64").to_numpy(dtype=np.int64, na_value=0)
    return _milliseconds(pd.Series(np.where(known, (whole - sent_ns) / 1e6, np.nan)))


def _milliseconds(values: pd.Series) -> list[float | None]:
    rounded = values.to_numpy(dtype=float, na_value=np.nan).round(3)
    return [None if np.isnan(one) else one for one in rounded.tolist()]


def _ticks(token_times: pd.Series, sent_ns: Ints) -> list[list[float]]:
    lists: Sequence[list[int]] = pa.array(token_times, type=pa.list_(pa.int64())).to_pylist()
    return [
        [round((t - sent) / 1e6, 1) for t in times[:: max(1, -(-len(times) // MOST_TICKS))]]
        for times, sent in zip(lists, sent_ns.tolist(), strict=True)
    ]


def _objects(column: pd.Series) -> list[Any]:
    return [None if pd.isna(one) else one for one in column.tolist()]
