"""Runs that end early: the rows are kept and no process stays behind."""

import json
import os
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from harness.collect.source import gathered_path
from tests.e2e.running import (
    UNDECIDED,
    Harness,
    Run,
    scripted_server,
    set_flags,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.e2e

ENOUGH_ROWS = 10


def num_rows_so_far(run: Run) -> int:
    shards = (run.folder / "shards").glob("requests-*.ndjson")
    return sum(shard.read_bytes().count(b"\n") for shard in shards)


def num_events_so_far(run: Run) -> int:
    shard = gathered_path(run.folder / "shards", "lifecycle")
    return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(shard.read_bytes()).count(b"\n")


@contextmanager
def midway(folder: Path, *arguments: str) -> Iterator[tuple[Harness, set[int]]]:
    """A run in the middle of its load, its engine's log read before; all processes below it."""
    with Harness("cancel_steps", folder / "run", *arguments) as harness:
        wait_until(lambda: num_rows_so_far(harness.run) >= ENOUGH_ROWS, "the load is under way")
        wait_until(lambda: num_events_so_far(harness.run) > 0, "the engine's log is being read")
        below = harness.below()
        yield harness, below
        wait_until_gone(below)
        assert "Traceback" not in harness.output


def assert_kept(run: Run, status: str) -> None:
    outcomes = run.summary["outcomes"]
    assert len(run.rows("requests")) >= ENOUGH_ROWS
    assert sum(outcomes.values()) == len(run.rows("requests"))
    assert outcomes["abandoned"] > 0
    assert run.summary["status"] == run.manifest["status"] == status
    assert run.rows("lifecycle")
    assert (run.folder / "report.html").exists()


def test_an_interrupted_run_keeps_its_rows(tmp_path: Path) -> None:
    with midway(tmp_path) as (harness, _):
        harness.send(signal.SIGINT)
        assert harness.wait() == 130, harness.output
        assert_kept(harness.run, "interrupted")
        assert harness.run.summary["outcomes"]["cut_off"] > 0
        assert "error: interrupted\nwhat was collected is in" in harness.output
        assert str(harness.run.folder) in harness.output.replace("\n", "")


@pytest.mark.slow
def test_ctrl_c_before_the_load_leaves_nothing_running(tmp_path: Path) -> None:
    with Harness("cancel_steps", tmp_path / "run") as harness:
        wait_until((tmp_path / "run" / "engine.log").exists, "the engine is starting")
        below = harness.below()
        harness.send(signal.SIGINT)
        assert harness.wait() == 130, harness.output
        wait_until_gone(below)
    assert "Traceback" not in harness.output


@pytest.mark.slow
def test_a_server_that_dies_is_a_failed_run_with_its_rows(tmp_path: Path) -> None:
    with scripted_server(step_s=0.02, slots=4) as server:
        target = ("--target", server.url, "--engine", "reference")
        with midway(tmp_path, *target) as (harness, _):
            server.process.kill()
            assert harness.wait() == 5, harness.output
            assert_kept(harness.run, "target_failed")
            assert server.url in harness.output


def test_our_engine_dying_is_a_failed_run_with_its_rows(tmp_path: Path) -> None:
    with midway(tmp_path) as (harness, below):
        victim = int(harness.run.manifest["target"]["config"]["frontend_pid"])
        assert victim in below
        psutil.Process(victim).kill()
        assert harness.wait() == 5, harness.output
        assert_kept(harness.run, "target_failed")
        assert "error: the engine died with code -9" in harness.output


@pytest.mark.slow
def test_when_the_harness_is_killed_its_children_end_by_themselves(tmp_path: Path) -> None:
    with midway(tmp_path) as (harness, below):
        harness.send(signal.SIGKILL)
        harness.wait()
        assert len(below) >= 3, "frontend, worker and load"
    assert num_rows_so_far(harness.run) >= ENOUGH_ROWS
    assert harness.run.manifest["status"] == "interrupted"


# One of several load processes dies: the run continues, says so, and loses nothing else...

ENOUGH_EACH = 3
ABANDONS = 200


@pytest.mark.slow
def test_a_load_process_that_is_killed_costs_what_it_had_not_written(tmp_path: Path) -> None:
    settings = set_flags(
        f"load.stop_after_abandons={ABANDONS}", "engine.runner=simulated", "engine.sim_fixed_ms=10"
    )
    shards = tmp_path / "run" / "shards"

    def rows_of(pid: int) -> list[str]:
        (shard,) = shards.glob(f"requests-*-{pid}.ndjson")
        lines = shard.read_text().split("\n")[:-1]  # what is after the last newline is half a row
        return [json.loads(line)["request_id"] for line in lines]

    def writers() -> list[int]:
        found = (int(path.stem.rpartition("-")[2]) for path in shards.glob("requests-*.ndjson"))
        return sorted(pid for pid in found if len(rows_of(pid)) >= ENOUGH_EACH)

    with Harness("demo", tmp_path / "run", "--processes", "4", *settings) as harness:
        wait_until(lambda: len(writers()) == 4, "all four have written rows", timeout_s=60)
        victim = writers()[1]
        os.kill(victim, signal.SIGKILL)
        wait_until_gone([victim])
        kept = rows_of(victim)
        # A busy machine makes the run invalid, which no row depends on.
        assert harness.wait() in (0, UNDECIDED), harness.output
    run = harness.run
    (dead,) = [one for one in run.manifest["load_processes"] if one["ended_ns"] is None]
    assert (dead["pid"], dead["requests"]) == (victim, len(kept))
    rows = run.rows("requests")
    written = {row["request_id"] for row in rows}
    assert set(kept) <= written
    assert len(written) == sum(one["requests"] for one in run.manifest["load_processes"])
    assert run.summary["outcomes"]["abandoned"] >= ABANDONS - len(kept)

    # Every request that reached the server has a row, except requests that the dead process had
    # in flight.
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
    wait_until_gone(run.pids())
