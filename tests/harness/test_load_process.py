"""The end of a load of several processes: whoever still writes is waited for, the dead are not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from harness.load.rows import ShardWriter
from harness.load_process import LAST_ROWS_S, let_workers_end
from harness.records import ProcessMark
from harness.store import RunFolder


def write_mark(folder: RunFolder, pid: int, event: Literal["began", "ended"]) -> None:
    mark = ProcessMark(
        event=event,
        host="h",
        pid=pid,
        worker=0,
        clock="clock of h",
        t_ns=1,
        at="2026-11-21T10:00:00+00:00",
        url="http://server:1",
        model="m",
    )
    with ShardWriter(folder.shards, ProcessMark, pid) as shard:
        shard.write(mark)


def no_pause(_: float) -> None:
    pytest.fail("it waits")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def test_a_worker_that_is_slow_to_end_is_waited_for(folder: RunFolder) -> None:
    pauses = 0

    def end_at_the_third(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            write_mark(folder, os.getpid(), "ended")

    write_mark(folder, os.getpid(), "began")
    let_workers_end(folder, pause=end_at_the_third)
    assert pauses == 3


def test_one_that_was_killed_is_not_waited_for(folder: RunFolder) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        write_mark(folder, worker.pid, "began")
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        let_workers_end(folder, pause=no_pause)
        worker.wait()
        let_workers_end(folder, pause=no_pause)


def test_one_that_never_ends_is_not_waited_for_without_an_end(folder: RunFolder) -> None:
    now_s = 0.0

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    write_mark(folder, os.getpid(), "began")
    let_workers_end(folder, clock_s=lambda: now_s, pause=pause)
    assert now_s == pytest.approx(LAST_ROWS_S, abs=0.1)


def test_nobody_is_waited_for_where_all_have_ended(folder: RunFolder) -> None:
    write_mark(folder, os.getpid(), "began")
    write_mark(folder, os.getpid(), "ended")
    let_workers_end(folder, pause=no_pause)
