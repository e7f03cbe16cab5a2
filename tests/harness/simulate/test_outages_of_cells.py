"""Users of replicas that die or drain."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from harness.simulate.cluster import run_cell
from harness.simulate.rows import CellFacts
from tests.harness.simulate.made_plans import made_plan

S = 1_000_000_000
Rows = list[dict[str, Any]]


def _simulated(
    folder: Path, *outages: dict[str, Any], load: dict[str, Any] | None = None
) -> tuple[CellFacts, Rows, Rows]:
    """Four replicas, at about half of what they can do for 20 s."""
    cluster = {"replicas": 4, "outages": list(outages)}
    folder.mkdir(exist_ok=True)
    made_plan(arrivals={"rate": 20.0}, load_s=20.0, cluster=cluster, load=load or {}).write(folder)
    facts = run_cell(folder, 0, lambda _: True)
    read = [
        pq.read_table(folder / "cell-0" / name)
        for name in ("requests.parquet", "lifecycle.parquet")
    ]
    requests, events = (table.to_pylist() for table in read)
    names = [one["request_id"] for one in requests]
    assert len(names) == len(set(names)) == facts.sent
    return facts, requests, events


def _admitted_ns(events: Rows, worker: str) -> list[int]:
    return [
        one["t_ns"] - S for one in events if one["event"] == "admitted" and one["worker"] == worker
    ]


def _workers_away(events: Rows, begin_s: float, end_s: float) -> list[str]:
    names = [f"worker-{n}" for n in range(4)]
    return [
        name
        for name in names
        if not any(begin_s * S < t_ns < end_s * S for t_ns in _admitted_ns(events, name))
    ]


def test_requests_of_a_dead_replica_fail_and_it_serves_again_later(tmp_path: Path) -> None:
    dies = {"at_s": 5.0, "kind": "die", "share": 0.5, "back_after_s": 5.0}
    facts, requests, events = _simulated(tmp_path, dies)
    failed = [one for one in requests if one["outcome"] == "failed"]
    assert failed
    assert all(5 * S <= one["ended_ns"] - S < 5.1 * S for one in failed)
    away = _workers_away(events, 5.0, 10.0)
    assert len(away) == 2
    assert all(max(_admitted_ns(events, name)) > 10 * S for name in away)
    assert len(facts.after) == 4
    assert all(one.free_blocks == 64 and not one.running for one in facts.after)


def test_users_ask_again_when_their_replica_died(tmp_path: Path) -> None:
    dies = {"at_s": 5.0, "kind": "die", "share": 0.5}
    once, requests, _ = _simulated(tmp_path / "once", dies)
    load = {"ask_again_after": ["failed"], "retry_pause_s": 0.5}
    again, retried, _ = _simulated(tmp_path / "again", dies, load=load)
    num_failed = Counter(one["outcome"] for one in requests)["failed"]
    assert (once.retries, once.sent) == (0, once.planned)
    assert again.retries == num_failed > 0
    assert again.sent == again.planned + num_failed
    repeats = [one for one in retried if one["repeats"] is not None]
    assert {one["outcome"] for one in repeats} <= {"completed", "abandoned"}
    assert len(again.after) == 2  # the others never came back


def test_a_rolling_drain_fails_nobody(tmp_path: Path) -> None:
    rolls = {"at_s": 2.0, "kind": "drain", "share": 1.0, "back_after_s": 1.0, "rolling": True}
    _, requests, events = _simulated(tmp_path, rolls)
    assert {one["outcome"] for one in requests} <= {"completed", "abandoned", "cut_off"}
    gaps = []
    for number in range(4):
        times = sorted(_admitted_ns(events, f"worker-{number}"))
        longest = max(itertools.pairwise(times), key=lambda gap: gap[1] - gap[0])
        assert longest[1] - longest[0] > S  # it was away for a second, and drained before
        gaps.append(longest)
    gaps.sort()  # one after another, but for the time between two admissions
    assert all(back <= next_gone + S for (_, back), (next_gone, _) in itertools.pairwise(gaps))


def test_without_a_replica_requests_are_refused(tmp_path: Path) -> None:
    dies = {"at_s": 5.0, "kind": "die", "share": 1.0}
    facts, requests, _ = _simulated(tmp_path, dies)
    late = [one for one in requests if one["sent_ns"] - S > 5.01 * S]
    assert {(one["outcome"], one["status_code"]) for one in late} == {("rejected", 503)}
    assert facts.after == []
