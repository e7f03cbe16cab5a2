"""A run as a timeline for Perfetto and chrome://tracing.

Rows stand in four groups: clients (a row a user, a slice a request, and in it the wait for the
first token), batch slots and queue (as many rows as were taken at once: the log does not number
them), and steps with the numbers of running and waiting requests. A mark in the client's row shows
an abandon; marks in the slot's or queue's row show when it was detected, removed and freed. A
request that was never freed reaches to the end of the log, and its slice says so. The engine's rows
need the clients' clock.

Events are those of the Trace Event Format (Google, 2016): X a slice with its length, i a mark, C a
counter, M a name. Times are microseconds after the first.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pandas as pd

from harness.analysis.facts import Facts, run_facts
from harness.store.frames import RunFrames

CLIENTS, SLOTS, QUEUE, STEPS = 1, 2, 3, 4
PROCESSES: Final = {
    CLIENTS: "clients",
    SLOTS: "engine: batch slots",
    QUEUE: "engine: queue",
    STEPS: "engine: steps",
}
APART: Final = 1_000_000  # Perfetto takes numbers of rows for threads of one machine
MARKS: Final = {"disconnected": "detect", "removed": "remove", "blocks_freed": "free"}
ENTERED: Final = {"arrived": QUEUE, "admitted": SLOTS, "preempted": QUEUE, "resumed": SLOTS}
GONE: Final = frozenset({"blocks_freed", "finished"})
KEPT: Final = "never freed"
COUNTERS: Final = {  # Perfetto shows the name and what is counted: "running requests"
    "num_running": ("running", "requests"),
    "num_waiting": ("waiting", "requests"),
    "free_blocks": ("free", "blocks"),
}
SCRAPED: Final = ("running", "waiting")

Event = dict[str, Any]


@dataclass(slots=True)
class Rows:
    """Numbers the rows of one group so that no two slices of a row overlap.

    An owner (a user, the batch slots) has as many rows as it had slices at once. Slices must come
    in the order of their starts.
    """

    process: int
    names: dict[int, str] = field(default_factory=dict)
    _free_ns: dict[Hashable, dict[int, int]] = field(default_factory=dict)

    def take(self, owner: str, start_ns: int, end_ns: int) -> int:
        """The number of the first row of this owner that is free at `start_ns`."""
        rows = self._free_ns.setdefault(owner, {})
        row = next((row for row, free_ns in rows.items() if free_ns <= start_ns), None)
        if row is None:
            row = self.process * APART + len(self.names) + 1
            self.names[row] = owner if not rows else f"{owner} ({len(rows) + 1})"
        rows[row] = end_ns
        return row


def chrome_trace(frames: RunFrames) -> dict[str, Any]:
    """The content of the file. Needs at least one request."""
    facts = run_facts(frames)
    is_seen = facts.has_lifecycle and facts.clocks_agree
    clients, slots, queue = Rows(CLIENTS), Rows(SLOTS), Rows(QUEUE)
    events = [*_clients(frames.requests, clients)]
    if is_seen:
        events += _requests(frames.lifecycle, slots, queue)
    if facts.has_steps and facts.clocks_agree:
        events += _steps(frames.steps)
    else:
        events += _scraped(frames.server_metrics, facts)
    origin_ns = min(event["ts"] for event in events)
    for event in events:
        event["ts"] = (event["ts"] - origin_ns) / 1000
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*_names((clients, slots, queue)), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "run_id": str(frames.manifest.get("run_id")),
            "engine": facts.engine,
            "engine_rows": "yes" if is_seen else facts.needs_lifecycle,
        },
    }


def _clients(requests: pd.DataFrame, rows: Rows) -> Iterator[Event]:
    columns = ["request_id", "user", "outcome", "plan", "tokens_read", "sent_ns", "ended_ns"]
    columns += ["first_token_ns", "abandoned_ns"]
    for one in requests[columns].sort_values("sent_ns").to_dict("records"):
        times = {key: _time(one[key]) for key in ("first_token_ns", "abandoned_ns")}
        sent_ns, ended_ns = int(one["sent_ns"]), int(one["ended_ns"])
        row = rows.take(f"user {one['user']}", sent_ns, ended_ns)
        args = {key: one[key] for key in ("request_id", "plan", "tokens_read")}
        yield _slice(str(one["outcome"]), CLIENTS, row, sent_ns, ended_ns, args)
        if (first_ns := times["first_token_ns"]) is not None:
            yield _slice("until the first token", CLIENTS, row, sent_ns, min(first_ns, ended_ns))
        if (left_ns := times["abandoned_ns"]) is not None:
            yield _mark("abandon", CLIENTS, row, left_ns, {"request_id": one["request_id"]})


def _requests(lifecycle: pd.DataFrame, slots: Rows, queue: Rows) -> Iterator[Event]:
    """Each request's stretches in queue and slots by the log, and marks in the last of them."""
    ordered = lifecycle.sort_values("seq")
    names = _client_names(ordered)
    until_ns = int(ordered["t_ns"].max())
    stretches = sorted(
        (start_ns, until_ns if end_ns is None else end_ns, where, str(request), end_ns is None)
        for request, log in ordered.groupby("request_id", sort=False)
        for start_ns, end_ns, where in _stretches(log["event"].tolist(), log["t_ns"].tolist())
    )
    place_of: dict[str, tuple[int, int]] = {}
    for start_ns, end_ns, where, request, is_kept in stretches:
        rows, owner = (slots, "slot") if where == SLOTS else (queue, "queue")
        place_of[request] = where, rows.take(owner, start_ns, end_ns)
        name = f"{names[request]}, {KEPT}" if is_kept else names[request]
        yield _slice(name, *place_of[request], start_ns, end_ns)
    marks = ordered[ordered["event"].isin(MARKS) & ordered["request_id"].isin(place_of)]
    columns = marks["t_ns"], marks["event"], marks["request_id"]
    for t_ns, event, request in zip(*columns, strict=True):
        yield _mark(MARKS[event], *place_of[request], int(t_ns), {"request_id": names[request]})


def _stretches(
    events: Sequence[str], times: Sequence[int]
) -> Iterator[tuple[int, int | None, int]]:
    """When a request was in the queue or in a batch slot (from, to, which); `to` is None if the log
    has no end."""
    since: int | None = None
    where = QUEUE
    for event, t_ns in zip(events, times, strict=True):
        if event not in ENTERED and event not in GONE:
            continue
        if since is not None:
            yield since, t_ns, where
        since, where = (None, QUEUE) if event in GONE else (t_ns, ENTERED[event])
    if since is not None:
        yield since, None, where


def _client_names(lifecycle: pd.DataFrame) -> dict[str, str]:
    """The client's name of each request, else the engine's."""
    pairs = lifecycle[["request_id", "client_request_id"]].drop_duplicates("request_id")
    return {
        own: own if pd.isna(name) else str(name)
        for own, name in zip(pairs["request_id"], pairs["client_request_id"], strict=True)
    }


def _steps(steps: pd.DataFrame) -> Iterator[Event]:
    for one in steps.drop(columns=["request_ids", "sampled_tokens"]).to_dict("records"):
        start_ns, end_ns = int(one["started_ns"]), int(one["ended_ns"])
        args = {"step": int(one["step"]), "tokens": int(sum(one["scheduled_tokens"]))}
        yield _slice(f"step {one['step']}", STEPS, STEPS * APART, start_ns, end_ns, args)
        for column, (name, what) in COUNTERS.items():
            yield _counter(name, what, start_ns, int(one[column]))


def _scraped(samples: pd.DataFrame, facts: Facts) -> Iterator[Event]:
    """Running and waiting requests by the metrics page, for a server without a step log."""
    for role in SCRAPED:
        of_role = samples[samples["name"] == facts.metric_names.get(role)]
        for t_ns, value in of_role.groupby("t_ns")["value"].sum().items():
            yield _counter(role, "requests (scraped)", int(str(t_ns)), float(value))


def _names(of_processes: Iterable[Rows]) -> Iterator[Event]:
    for process, name in PROCESSES.items():
        yield _about("process_name", process, 0, {"name": name})
        yield _about("process_sort_index", process, 0, {"sort_index": process})
    yield _about("thread_name", STEPS, STEPS * APART, {"name": "steps"})
    for rows in of_processes:
        for row, name in rows.names.items():
            yield _about("thread_name", rows.process, row, {"name": name})


def _about(what: str, process: int, row: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": dict(args)}


def _slice(
    name: str,
    process: int,
    row: int,
    start_ns: int,
    end_ns: int,
    args: Mapping[str, Any] | None = None,
) -> Event:
    length_us = (end_ns - start_ns) / 1000
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": row,
        "ts": start_ns,
        "dur": length_us,
        "args": dict(args or {}),
    }


def _mark(name: str, process: int, row: int, t_ns: int, args: Mapping[str, Any]) -> Event:
    return {
        "ph": "i",
        "s": "t",  # as high as its row
        "name": name,
        "pid": process,
        "tid": row,
        "ts": t_ns,
        "args": dict(args),
    }


def _counter(name: str, what: str, t_ns: int, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": STEPS, "tid": 0, "ts": t_ns, "args": {what: value}}


def _time(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)
