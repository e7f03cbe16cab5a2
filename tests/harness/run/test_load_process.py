"""The end of a load of several processes: slow workers are awaited, dead ones are not."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from harness.client.shards import ShardReader, ShardWriter
from harness.records import ProcessMark
from harness.run.load_process import LAST_ROWS_S, LoadProcess
from harness.store.run_folder import RunFolder
from tests.e2e.running import is_gone, wait_until
from tests.harness.client.asking import PLAN

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


def no_pause(_: float) -> None:
    pytest.fail("it waits")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def test_a_killed_worker_is_not_awaited(folder: RunFolder) -> None:
    load = LoadProcess(pause=no_pause)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        write_mark(folder, worker.pid, "began")
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert load.let_workers_end(folder, OURS) == set()
        worker.wait()
        assert load.let_workers_end(folder, OURS) == set()


def test_a_load_without_workers_or_interrupted_does_not_wait(folder: RunFolder) -> None:
    write_mark(folder, HERE, "began")
    load = LoadProcess(pause=no_pause)
    assert load.let_workers_end(folder, OURS + 1) == set(), "another process has its number"
    assert load.let_workers_end(folder, OURS, interrupted=lambda: True) == {HERE}
    write_mark(folder, HERE, "ended")
    assert load.let_workers_end(folder, OURS) == set()


class Watched:
    """A measurement that shows nothing and whose server lives."""

    def __init__(self, folder: RunFolder, interrupted: Callable[[], bool]) -> None:
        self.folder = folder
        self._interrupted = interrupted

    @property
    def is_interrupted(self) -> bool:
        return self._interrupted()

    def check_server(self) -> None:
        """It lives."""

    def watch(self, *_: object) -> None:
        """Nothing is recorded."""

    def show(self, *_: object) -> None:
        """Nothing is shown."""


# The worker of a load: it writes its last row some time after its master has ended.
WORKER = """
import os, sys
from pathlib import Path
from harness.store.run_folder import RunFolder
from tests.harness.run.test_load_process import write_mark

folder, stays = RunFolder(Path(sys.argv[1])), sys.argv[2] == "True"
reader, writer = os.pipe()
if os.fork():
    os.read(reader, 1)
    if stays:
        sys.stdin.read()
    (folder.path / "master ended").touch()
    os._exit(0)
write_mark(folder, os.getpid(), "began")
os.write(writer, b".")
with open(folder.path / "go") as go:
    go.read()
write_mark(folder, os.getpid(), "ended")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_load_is_over_when_its_workers_are(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool, hangs: bool
) -> None:
    """Whether it ends by itself or is interrupted. A worker that hangs is not left behind."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    os.mkfifo(folder.path / "go")

    def let_it_end(_: float) -> None:
        if "ended" not in events_of(folder):
            (folder.path / "go").write_text("go")
            wait_until(lambda: "ended" in events_of(folder), "the worker has written its last row")

    load = LoadProcess(
        command=lambda *_: [sys.executable, "-c", WORKER, str(folder.path), str(is_interrupted)],
        last_rows_s=0 if hangs else LAST_ROWS_S,
        pause=let_it_end,
    )
    run = Watched(folder, lambda: is_interrupted and bool(marks_of(folder)))
    with ExitStack() as until_over, ExitStack() as until_settled:
        load.prepare(folder, processes=1, until_over=until_over)
        load.run(PLAN, run, until_settled=until_settled)
        if not is_interrupted and not hangs:
            assert events_of(folder) == ["began", "ended"]
    assert events_of(folder) == (["began"] if hangs else ["began", "ended"])
    assert (folder.path / "master ended").exists(), "it had the time to write its last rows"
    (worker,) = {mark.pid for mark in marks_of(folder)}
    wait_until(lambda: is_gone(worker), "the worker is gone")
