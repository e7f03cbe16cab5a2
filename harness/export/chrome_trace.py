"""A run as a timeline for Perfetto and chrome://tracing.

Four groups of rows: clients, batch slots and queue (as many rows as were taken at once), and steps.
Marks show an abandon, and when it was detected, removed and freed. A request that was never freed
reaches to the end of the log. The engine's rows need the clients' clock.

Events are those of the Trace Event Format (Google, 2016): X a slice with its length, i a mark, C a
counter, M a name. Times are microseconds after the first.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pandas as pd

from harness.analysis.run_facts import RunFacts, run_facts
from harness.analysis.scraped import readings_of
from harness.analysis.timeline import level_of_all, log_of
from harness.analysis.tokens import without_tokens
from harness.store.frames import RunFrames

CLIENTS, SLOTS, QUEUE, STEPS = 1, 2, 3, 4
PROCESSES: Final = {
    CLIENTS: "clients",
    SLOTS: "engine: batch slots",
    QUEUE: "engine: queue",
    STEPS: "engine: steps",
}
OWNERS: Final = {SLOTS: "slot", QUEUE: "queue"}
APART: Final = 1_000_000  # Perfetto takes numbers of rows for threads of one machine
MARKS: Final = {"disconnected": "detect", "removed": "remove", "blocks_freed": "free"}
ENTERED: Final = {
    "arrived": QUEUE,
    "taken_over": QUEUE,
    "admitted": SLOTS,
    "preempted": QUEUE,
    "resumed": SLOTS,
}
GONE: Final = ("handed_over", "blocks_freed", "finished")
STAY: Final = ["request_id", "worker"]  # a request can be at two workers at once
COUNTERS: Final = {  # Perfetto shows the name and what is counted: "running requests"
    "num_running": ("running", "requests"),
    "num_waiting": ("waiting", "requests"),
    "free_blocks": ("free", "blocks"),
}

TOOL: Final = "walkaway export"
MARK: Final = f'"tool": "{TOOL}"'.encode()

Event = dict[str, Any]
Row = tuple[int, int]  # the group, and the number of the row


@dataclass(slots=True)
class Rows:
    """Numbers rows so that no two slices of a row overlap.

    An owner (a user, the batch slots) has as many rows as it had slices at once. Slices of a group
    must come in the order of their starts.
    """

    names: dict[Row, str] = field(default_factory=dict)
    _free_ns: dict[tuple[int, str], dict[Row, int]] = field(default_factory=dict)
    _count: Counter[int] = field(default_factory=Counter)

    def take(self, group: int, owner: str, start_ns: int, end_ns: int) -> Row:
        rows = self._free_ns.setdefault((group, owner), {})
        row = next((row for row, free_ns in rows.items() if free_ns <= start_ns), None)
        if row is None:
            self._count[group] += 1
            row = group, group * APART + self._count[group]
            self.names[row] = owner if not rows else f"{owner} ({len(rows) + 1})"
        rows[row] = end_ns
        return row


def chrome_trace(frames: RunFrames) -> dict[str, Any]:
    facts = run_facts(frames)
    why_unseen = facts.lacks("lifecycle", "clock")
    rows = Rows()
    events = [*_clients(frames.requests, rows)]
    if why_unseen is None:
        events += _requests(log_of(frames), rows)
    if facts.lacks("steps", "clock") is None:
        events += _steps(frames.steps, rows)
    else:
        events += _scraped(frames, facts)
    events += _gpus(frames.gpu)
    origin_ns = min(event["ts"] for event in events)
    for event in events:
        event["ts"] = (event["ts"] - origin_ns) / 1000
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "otherData": {
            "tool": TOOL,  # so first: how a file is known as ours
            "run_id": str(frames.manifest.get("run_id")),
            "engine": facts.engine,
            "engine_rows": why_unseen or "yes",
        },
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(rows), *events],
    }


def _clients(requests: pd.DataFrame, rows: Rows) -> Iterator[Event]:
    for one in without_tokens(requests).sort_values("sent_ns").to_dict("records"):
        sent_ns, ended_ns = int(one["sent_ns"]), int(one["ended_ns"])
        row = rows.take(CLIENTS, f"user {one['user']}", sent_ns, ended_ns)
        args = {key: one[key] for key in ("request_id", "plan", "tokens_read")}
        yield _slice(str(one["outcome"]), row, sent_ns, ended_ns, args)
        if pd.notna(one["first_token_ns"]):
            first_ns = min(int(one["first_token_ns"]), ended_ns)
            yield _slice("until the first token", row, sent_ns, first_ns)
        if pd.notna(one["abandoned_ns"]):
            yield _mark("abandon", row, int(one["abandoned_ns"]), one["request_id"])


def _requests(lifecycle: pd.DataFrame, rows: Rows) -> Iterator[Event]:
    log = lifecycle.sort_values(["t_ns", "seq"], kind="stable")  # each frontend numbers its own
    log = log.assign(name=log["client_request_id"].fillna(log["request_id"]))
    row_of: dict[tuple[str, str], Row] = {}
    for start_ns, end_ns, where, *stay, name in _stretches(log):
        row_of[stay[0], stay[1]] = rows.take(where, OWNERS[where], start_ns, end_ns)
        yield _slice(name, row_of[stay[0], stay[1]], start_ns, end_ns)
    for one in log[log["event"].isin(MARKS)].to_dict("records"):
        if (row := row_of.get((one["request_id"], one["worker"]))) is not None:
            yield _mark(MARKS[one["event"]], row, int(one["t_ns"]), one["name"])


def _stretches(log: pd.DataFrame) -> Iterator[tuple[int, int, int, str, str, str]]:
    moves = log[log["event"].isin([*ENTERED, *GONE])]
    left_ns = moves.groupby(STAY)["t_ns"].shift(-1)
    left_ns = left_ns.fillna(moves.groupby("request_id")["t_ns"].shift(-1))  # its worker was lost
    begun = moves[moves["event"].isin(ENTERED)]
    until_ns = left_ns[begun.index].fillna(log["t_ns"].max()).astype("int64")
    names = begun["name"].mask(left_ns[begun.index].isna(), begun["name"] + ", never freed")
    where = begun["event"].map(ENTERED)
    stays = (begun[key] for key in STAY)
    yield from sorted(zip(begun["t_ns"], until_ns, where, *stays, names, strict=True))


def _steps(steps: pd.DataFrame, rows: Rows) -> Iterator[Event]:
    ordered = steps.sort_values("started_ns", kind="stable")
    levels = {column: level_of_all(ordered, column).to_list() for column in COUNTERS}
    workers = sorted(steps["worker"].unique())
    row_of = {worker: (STEPS, STEPS * APART + place) for place, worker in enumerate(workers)}
    if len(workers) > 1:
        rows.names |= {row: worker for worker, row in row_of.items()}
    plain = ordered.drop(columns=["request_ids", "sampled_tokens"]).to_dict("records")
    for place, one in enumerate(plain):
        start_ns, end_ns = int(one["started_ns"]), int(one["ended_ns"])
        args = {"step": int(one["step"]), "tokens": int(sum(one["scheduled_tokens"]))}
        yield _slice(f"step {one['step']}", row_of[one["worker"]], start_ns, end_ns, args)
        for column, (name, what) in COUNTERS.items():
            yield _counter(name, what, start_ns, int(levels[column][place]))


def _scraped(frames: RunFrames, facts: RunFacts) -> Iterator[Event]:
    for role in ("running", "waiting"):
        if (readings := readings_of(frames, facts, role)) is not None:
            for t_ns, level in zip(readings.t_ns, readings.level, strict=True):
                yield _counter(role, "requests (scraped)", int(t_ns), float(level))


def _gpus(gpu: pd.DataFrame) -> Iterator[Event]:
    for column, what in {"utilisation": "busy, share of time", "power_w": "watts"}.items():
        for one in gpu.dropna(subset=column).to_dict("records"):
            yield _counter(f"GPU {one['gpu']}", what, int(one["t_ns"]), float(one[column]))


def _names(rows: Rows) -> Iterator[Event]:
    for group, name in PROCESSES.items():
        yield _event("M", "process_name", (group, 0), {"name": name})
        yield _event("M", "process_sort_index", (group, 0), {"sort_index": group})
    for row, name in {(STEPS, STEPS * APART): "steps", **rows.names}.items():
        yield _event("M", "thread_name", row, {"name": name})


def _slice(
    name: str, row: Row, start_ns: int, end_ns: int, args: Mapping[str, Any] | None = None
) -> Event:
    length_us = (end_ns - start_ns) / 1000
    return _event("X", name, row, args or {}, ts=start_ns, dur=length_us)


def _mark(name: str, row: Row, t_ns: int, request: str) -> Event:
    return _event("i", name, row, {"request_id": request}, ts=t_ns, s="t")  # as high as its row


def _counter(name: str, what: str, t_ns: int, value: float) -> Event:
    return _event("C", name, (STEPS, 0), {what: value}, ts=t_ns)


def _event(phase: str, name: str, row: Row, args: Mapping[str, Any], **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": row[0], "tid": row[1], "args": dict(args), **more}
