"""The load in several processes: one dies, and nothing else is lost; the run says so and ends."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.running import Harness, is_gone, wait_until

pytestmark = pytest.mark.e2e

ENOUGH_ROWS = 3
ABANDONS = 200


def test_a_load_process_that_is_killed_costs_what_it_had_not_written(tmp_path: Path) -> None:
    harness = Harness(
        "demo",
        tmp_path / "run",
        *("--processes", "4", "--set", f"load.stop_after_abandons={ABANDONS}"),
        *("--set", "engine.runner=simulated", "--set", "engine.sim_fixed_ms=10"),
    )
    shards = harness.run.folder / "shards"

    def rows_of(pid: int) -> list[str]:
        (shard,) = shards.glob(f"requests-*-{pid}.ndjson")
        lines = shard.read_text().split("\n")[:-1]  # what is after the last newline is half a row
        return [json.loads(line)["request_id"] for line in lines]

    def writers() -> list[int]:
        found = (int(path.stem.rpartition("-")[2]) for path in shards.glob("requests-*.ndjson"))
        return sorted(pid for pid in found if len(rows_of(pid)) >= ENOUGH_ROWS)

    try:
        wait_until(lambda: len(writers()) == 4, "all four have written rows", timeout_s=60)
        victim = writers()[1]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: is_gone(victim), "it is dead")
        kept = rows_of(victim)
        assert harness.wait() == 0, harness.output
    finally:
        harness.end()

    run = harness.run
    (dead,) = [one for one in run.manifest["load_processes"] if one["ended_ns"] is None]
    assert (dead["pid"], dead["requests"]) == (victim, len(kept))
    rows = run.rows("requests")
    written = {row["request_id"] for row in rows}
    assert set(kept) <= written
    assert len(written) == sum(one["requests"] for one in run.manifest["load_processes"])
    assert run.summary["outcomes"]["abandoned"] >= ABANDONS - len(kept)

    # Whoever reached the server has a row, but for those whom the dead process had in flight.
    came = {event["client_request_id"] for event in run.rows("lifecycle")} - {None}
    lost = {name for name in came - written if name.startswith("walkaway-")}
    tag = kept[0].split("-")[1]
    assert {name.split("-")[1] for name in lost} <= {tag}
    assert len(lost) <= 12

    (said,) = [one["text"] for one in run.summary["validity"] if "died" in one["text"]]
    assert f"pid {victim}" in said
    assert f"{len(kept)} requests" in said
    assert f"pid {victim}" in harness.output.replace("\n", "")
    assert f"pid {victim}" in (run.folder / "report.html").read_text()
    assert all(is_gone(pid) for pid in run.pids())
