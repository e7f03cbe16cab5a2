"""A run against the scripted server, and the server's own account of it.

The harness's own stamps are used only for what no server can know: when a request was sent, and t0,
when it was abandoned. How late the server heard of both is held apart.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.e2e.running import Run, measure, scripted_server
from tools.truth.scripted_engine import Script

Work = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Observed:
    script: Script
    run: Run
    truth: dict[str, Any]

    @cached_property
    def works(self) -> dict[str, Work]:
        return {work["client_id"]: work for work in self.truth["requests"]}

    def left(self) -> Iterator[tuple[int, Work]]:
        """The time at which each client went away before its end (or was cut off), and its work."""
        for row in self.run.rows("requests"):
            work = self.works.get(row["request_id"])
            if work is not None and row["outcome"] in ("abandoned", "cut_off", "timed_out"):
                yield row["abandoned_ns"] or row["ended_ns"], work


def observe(folder: Path, script: Script, workload: str, *, engine: str) -> Observed:
    folder.mkdir(parents=True, exist_ok=True)
    load = folder / "load.toml"
    load.write_text(workload)
    with scripted_server(**asdict(script)) as server:
        run = measure(load, folder / "run", "--target", server.url, "--engine", engine)
        return Observed(script=script, run=run, truth=server.truth())


class Truth:
    """The server's knowledge of one run, joined with the rows of the users by request id.

    `works`: requests as the harness could read of them; `all_works`: as they were. `left`: the
    abandoned requests, `stayed`: requests planned to be read to their end, each with its work on
    the server. `unseen`: rows of requests that never came to the server. `token_lags_s`: from
    sending to reading, each token of each request that read any.
    """

    def __init__(
        self, truth: dict[str, Any], rows: Sequence[dict[str, Any]], window: dict[str, int]
    ) -> None:
        self.script = truth["script"]
        self.window_ns = (window["load_started_ns"], window["load_ended_ns"])
        self.settled_ns = window["settled_ns"]
        reads_ns = truth["reads_ns"]
        steps_ns, lifecycle_ns = (
            reads_ns[f"/walkaway/{log}"][-1] for log in ("steps", "lifecycle")
        )
        self.all_works: list[dict[str, Any]] = truth["requests"]
        works = [as_read(work, steps_ns, lifecycle_ns) for work in self.all_works]
        self.works = {work["client_id"]: work for work in works}
        self.steps = [(started, ended) for started, ended in truth["steps_ns"]]
        self.ended_ns: list[int] = [ended for _, ended in self.steps]
        self.rows = [
            (r, self.works[r["request_id"]]) for r in rows if r["request_id"] in self.works
        ]
        self.unseen = [row for row in rows if row["request_id"] not in self.works]
        self.left = [(r["abandoned_ns"], r, w) for r, w in self.rows if r["outcome"] == "abandoned"]
        self.stayed = [(row, work) for row, work in self.rows if row["planned_abandon"] is None]
        self.metrics_read_ns: list[int] = reads_ns["/metrics"]
        self.token_lags_s = [
            lags_s(work["sent_times_ns"], row["token_times_ns"])
            for row, work in self.rows
            if row["token_times_ns"]
        ]

    @property
    def longest_token_lag_s(self) -> float:
        return max(max(lags) for lags in self.token_lags_s)

    def load_ns(self) -> tuple[int, int]:
        """The arrival of the first request, and the sending of the last token that was read."""
        read = [
            work["sent_times_ns"][row["tokens_read"] - 1]
            for row, work in self.rows
            if row["tokens_read"]
        ]
        return min(work["arrived_ns"] for _, work in self.rows), max(read)

    def steps_within(self, since_ns: int, until_ns: int) -> int:
        ended = self.ended_ns
        return bisect.bisect_right(ended, until_ns) - bisect.bisect_right(ended, since_ns)

    def started_ns(self, ended_ns: int) -> int:
        started: int = self.steps[bisect.bisect_left(self.ended_ns, ended_ns)][0]
        return started

    def batch(self) -> dict[int, dict[str, int]]:
        """The tokens computed for each request in each step, by the step's end."""
        found: dict[int, dict[str, int]] = {ended: {} for ended in self.ended_ns}
        for client_id, work in self.works.items():
            for number, ended in enumerate(work["token_times_ns"]):
                found[ended][client_id] = 1 if number else work["prompt_tokens"]
        return found

    def blocks_held(self, work: dict[str, Any]) -> list[tuple[int, int]]:
        """Times, and the blocks held from each on. A step needs room for all computed in it."""
        size = self.script["block_size"]
        return [
            (self.started_ns(ended), math.ceil((work["prompt_tokens"] + number) / size))
            for number, ended in enumerate(work["token_times_ns"])
        ]


def lags_s(happened_ns: Sequence[int], seen_ns: Sequence[int]) -> list[float]:
    return [seconds(*pair) for pair in zip(happened_ns, seen_ns, strict=False)]


def seconds(start_ns: int, end_ns: int) -> float:
    return (end_ns - start_ns) / 1e9


def as_read(work: dict[str, Any], steps_ns: int, lifecycle_ns: int) -> dict[str, Any]:
    """A request as it stood when the harness last read the logs; the server may have gone on."""
    ends = {key: work[key] for key in ("removed_ns", "freed_ns")}
    known = {key: t if t is not None and t <= lifecycle_ns else None for key, t in ends.items()}
    return {
        **work,
        **known,
        "token_times_ns": [t for t in work["token_times_ns"] if t <= steps_ns],
        "finish_reason": work["finish_reason"] if known["freed_ns"] is not None else None,
    }
