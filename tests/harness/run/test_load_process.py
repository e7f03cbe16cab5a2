"""The end of a load of several processes: whoever still writes is waited for, the dead are not."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from harness.load.rows import ShardReader, ShardWriter
from harness.records import ProcessMark
from harness.run import load_process
from harness.run.load_process import LAST_ROWS_S, LoadProcess, let_workers_end
from harness.store.run_folder import RunFolder
from tests.e2e.running import is_gone, wait_until
from tests.harness.load.asking import PLAN

HERE, OURS = os.getpid(), os.getsid(0)


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


def marks_of(folder: RunFolder) -> list[ProcessMark]:
    return ShardReader(folder.shards, ProcessMark).read_new()


def events_of(folder: RunFolder) -> list[str]:
    return [mark.event for mark in marks_of(folder)]


class Watched:
    """A measurement that shows nothing and whose server lives."""

    def __init__(self, folder: RunFolder, *, interrupted: Callable[[], bool]) -> None:
        self.folder = folder
        self._interrupted = interrupted

    @property
    def is_interrupted(self) -> bool:
        return self._interrupted()

    def check_server(self) -> None:
        """It lives."""

    def watch(self, *_: object) -> None:
        """Nothing is recorded."""

    def show(self, _: object) -> None:
        """Nothing is shown."""


def no_pause(_: float) -> None:
    pytest.fail("it waits")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


class TestLetWorkersEnd:
    def test_one_that_is_slow_to_end_is_waited_for(self, folder: RunFolder) -> None:
        pauses = 0

        def end_at_the_third(_: float) -> None:
            nonlocal pauses
            pauses += 1
            if pauses == 3:
                write_mark(folder, HERE, "ended")

        write_mark(folder, HERE, "began")
        assert let_workers_end(folder, OURS, pause=end_at_the_third) == set()
        assert pauses == 3

    def test_one_that_was_killed_is_not(self, folder: RunFolder) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
            write_mark(folder, worker.pid, "began")
            worker.kill()
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
            assert let_workers_end(folder, OURS, pause=no_pause) == set()
            worker.wait()
            assert let_workers_end(folder, OURS, pause=no_pause) == set()

    def test_another_process_of_the_same_number_is_not(self, folder: RunFolder) -> None:
        write_mark(folder, HERE, "began")
        assert let_workers_end(folder, OURS + 1, pause=no_pause) == set()

    def test_nor_is_anybody_where_all_have_ended(self, folder: RunFolder) -> None:
        write_mark(folder, HERE, "began")
        write_mark(folder, HERE, "ended")
        assert let_workers_end(folder, OURS, pause=no_pause) == set()

    def test_one_that_never_ends_is_named_when_the_time_is_up(self, folder: RunFolder) -> None:
        now_s = 0.0

        def pause(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

        write_mark(folder, HERE, "began")
        assert let_workers_end(folder, OURS, clock_s=lambda: now_s, pause=pause) == {HERE}
        assert now_s == pytest.approx(LAST_ROWS_S, abs=0.1)

    def test_nobody_waits_who_is_interrupted(self, folder: RunFolder) -> None:
        write_mark(folder, HERE, "began")
        assert let_workers_end(folder, OURS, interrupted=lambda: True, pause=no_pause) == {HERE}


# The worker of a load whose master has gone before.
SLOW_WORKER = """
import os, sys, time
from pathlib import Path
from harness.store.run_folder import RunFolder
from tests.harness.run.test_load_process import write_mark

folder, stays, hangs = RunFolder(Path(sys.argv[1])), sys.argv[2] == "True", sys.argv[3] == "True"
reader, writer = os.pipe()
if os.fork():
    os.read(reader, 1)
    if stays:
        sys.stdin.read()
    os._exit(0)
master = os.getppid()
write_mark(folder, os.getpid(), "began")
os.write(writer, b".")
while os.getppid() == master or hangs:
    time.sleep(0.01)
time.sleep(0.3)
write_mark(folder, os.getpid(), "ended")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_load_is_over_when_its_workers_are(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool, hangs: bool
) -> None:
    """Whether it ends by itself or is stopped. A worker that hangs is not left behind."""
    program = folder.path.parent / "slow_worker.py"
    program.write_text(SLOW_WORKER)
    command = [sys.executable, str(program), str(folder.path), str(is_interrupted), str(hangs)]
    monkeypatch.setattr(load_process, "load_command", lambda *_: command)
    if hangs:
        monkeypatch.setattr(load_process, "LAST_ROWS_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    run = Watched(folder, interrupted=lambda: is_interrupted and bool(marks_of(folder)))
    with ExitStack() as until_settled:
        LoadProcess().run(PLAN, run, until_settled=until_settled)
        if not is_interrupted and not hangs:
            assert events_of(folder) == ["began", "ended"]
    assert events_of(folder) == (["began"] if hangs else ["began", "ended"])
    (worker,) = {mark.pid for mark in marks_of(folder)}
    wait_until(lambda: is_gone(worker), "the worker is gone")
