"""Ends that nobody planned: whatever they are, the rows are kept and no process stays behind."""

import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from harness.collect.source import gathered_path
from tests.e2e.running import Harness, Run, is_gone, scripted_server, wait_until

pytestmark = pytest.mark.e2e

ENOUGH_ROWS = 10


def num_rows_so_far(run: Run) -> int:
    """Rows that the load has put on the disk, while it still runs."""
    shards = (run.folder / "shards").glob("requests-*.ndjson")
    return sum(shard.read_bytes().count(b"\n") for shard in shards)


def num_events_so_far(run: Run) -> int:
    """Events of the engine's log that the collector has put on the disk, while the run goes on."""
    shard = gathered_path(run.folder / "shards", "lifecycle")
    return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(shard.read_bytes()).count(b"\n")


@contextmanager
def midway(folder: Path, *arguments: str) -> Iterator[tuple[Harness, set[int]]]:
    """A run in the middle of its load, its engine's log read before; all processes below it."""
    harness = Harness("cancel_steps", folder / "run", *arguments)
    try:
        wait_until(lambda: num_rows_so_far(harness.run) >= ENOUGH_ROWS, "the load is under way")
        wait_until(lambda: num_events_so_far(harness.run) > 0, "the engine's log is being read")
        below = {child.pid for child in psutil.Process(harness.pid).children(recursive=True)}
        assert below
        yield harness, below
        wait_until(lambda: all(is_gone(pid) for pid in below), "no process is left")
    finally:
        harness.end()


def assert_kept(run: Run, status: str) -> None:
    """All rows that there were are in the run's folder, and judged."""
    outcomes = run.summary["outcomes"]
    assert len(run.rows("requests")) >= ENOUGH_ROWS
    assert sum(outcomes.values()) == len(run.rows("requests"))
    assert outcomes["abandoned"] > 0
    assert run.summary["status"] == run.manifest["status"] == status
    assert run.rows("lifecycle")
    assert (run.folder / "report.html").exists()


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    with midway(tmp_path) as (harness, _):
        harness.send(signal.SIGINT)
        assert harness.wait() == 130, harness.output
        assert_kept(harness.run, "interrupted")
        assert harness.run.summary["outcomes"]["cut_off"] > 0
        assert str(harness.run.folder) in harness.output.replace("\n", "")
        assert "Traceback" not in harness.output


def test_ctrl_c_before_the_load_leaves_nothing_running(tmp_path: Path) -> None:
    harness = Harness("cancel_steps", tmp_path / "run")
    try:
        wait_until(lambda: (tmp_path / "run" / "engine.log").exists(), "the engine is starting")
        below = {child.pid for child in psutil.Process(harness.pid).children(recursive=True)}
        harness.send(signal.SIGINT)
        assert harness.wait() == 130, harness.output
        assert "Traceback" not in harness.output
        wait_until(lambda: all(is_gone(pid) for pid in below), "no process is left")
    finally:
        harness.end()


def test_a_server_that_dies_is_a_failed_run_with_its_rows(tmp_path: Path) -> None:
    with scripted_server(step_s=0.02, slots=4) as server:
        target = ("--target", server.url, "--engine", "reference")
        with midway(tmp_path, *target) as (harness, _):
            server.process.kill()
            assert harness.wait() == 5, harness.output
            assert_kept(harness.run, "target_failed")
            assert server.url in harness.output
            assert "Traceback" not in harness.output


def test_our_engine_dying_is_a_failed_run_with_its_rows(tmp_path: Path) -> None:
    with midway(tmp_path) as (harness, below):
        engine = int(harness.run.manifest["target"]["config"]["worker_pid"])
        assert engine in below
        psutil.Process(engine).kill()
        assert harness.wait() == 5, harness.output
        assert_kept(harness.run, "target_failed")
        assert "Traceback" not in harness.output


def test_when_the_harness_is_killed_its_children_end_by_themselves(tmp_path: Path) -> None:
    with midway(tmp_path) as (harness, below):
        harness.send(signal.SIGKILL)
        harness.wait()
        assert len(below) >= 3, "frontend, worker and load"
    assert num_rows_so_far(harness.run) >= ENOUGH_ROWS
    assert harness.run.manifest["status"] == "interrupted"
