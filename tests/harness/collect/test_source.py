"""What is gathered lies on the disk at once, and little of it in memory."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.collect.source import MOST_HELD, Gathered, SourceError, read_gathered
from harness.records import CpuSample

# Gathers two turns of rows and is killed: no time is left to close or to write anything.
KILLED = """
import os, signal, sys
from pathlib import Path
from harness.collect.source import Gathered
from harness.records import CpuSample

gathered = Gathered(Path(sys.argv[1]), "cpu", CpuSample)
for turn in range(2):
    gathered.add([CpuSample(t_ns=turn, process=str(n), cores=0.0, rss_bytes=0) for n in range(3)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def rows(first: int, end: int) -> list[CpuSample]:
    return [CpuSample(t_ns=t, process="p", cores=0, rss_bytes=0) for t in range(first, end)]


def test_memory_does_not_grow_with_what_is_gathered(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path, "cpu", CpuSample)
    turns = 3 * MOST_HELD // 100
    for turn in range(turns):
        gathered.add(rows(100 * turn, 100 * turn + 100))
    assert len(gathered.latest()) == MOST_HELD
    assert [row.t_ns for row in gathered.all()] == list(range(3 * MOST_HELD))
    gathered.close()


def test_news_are_told_once_as_far_as_they_are_held(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path, "cpu", CpuSample)
    gathered.add(rows(0, 3))
    assert gathered.since(0) == (rows(0, 3), 3)
    assert gathered.since(3) == ([], 3)
    gathered.add(rows(3, 5))
    assert gathered.since(3) == (rows(3, 5), 5)
    gathered.add(rows(5, MOST_HELD + 10))
    assert gathered.since(5) == (rows(10, MOST_HELD + 10), MOST_HELD + 10)
    gathered.close()


def test_who_is_killed_loses_nothing_of_the_turns_before(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (path,) = tmp_path.iterdir()
    written = [(turn, str(n)) for turn in range(2) for n in range(3)]
    found = [(row.t_ns, row.process) for row in read_gathered(path, CpuSample)]
    assert found == written
    path.write_bytes(path.read_bytes()[:-12])  # as if it had died while writing the second turn
    found = [(row.t_ns, row.process) for row in read_gathered(path, CpuSample)]
    assert written[:3] == found[:3]
    assert len(found) < len(written)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    Gathered(tmp_path, "cpu", CpuSample).close()
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.symlink_to("/dev/full")
    gathered = Gathered(tmp_path, "cpu", CpuSample)
    with pytest.raises(SourceError, match=r"no longer be written \(No space left on"):
        gathered.add(rows(0, 1))
    gathered.close()
