"""Sources are polled with jittered pauses, and their rows lie on the disk at once."""

import random
import signal
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.collect.source import (
    MOST_HELD,
    Gathered,
    Notes,
    SourceError,
    jittered,
    poll,
    read_gathered,
)
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


def test_a_failing_source_is_noted_once_and_polled_again_after_each_pause() -> None:
    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            if len(waited) == 3:
                self.set()
            return False

    def tick() -> None:
        raise SourceError("no answer")

    waited: list[float | None] = []
    pauses, notes = iter([0.1, 0.3, 0.2]), Notes()
    poll(tick, pause_s=lambda: next(pauses), stop=Stop(), complain=notes.warn)
    assert waited == [0.1, 0.3, 0.2]
    assert (notes.warnings(), notes.texts()) == (["no answer"], [])


@pytest.mark.parametrize(
    ("interval_s", "shortest_s", "least_s", "most_s"),
    [
        (0.4, None, 0.3, 0.5),
        (2.0, 1.1, 1.5, 2.5),
        (1.2, 1.1, 1.1, 1.3),
        (1.1, 1.1, 1.1, 1.1),
        (0.4, 1.1, 0.3, 0.5),  # the user asks for more than the server bears
    ],
)
def test_pauses_are_uniform_around_the_interval_and_follow_from_the_seed(
    interval_s: float, shortest_s: float | None, least_s: float, most_s: float
) -> None:
    def draw(seed: int) -> list[float]:
        pause_s = jittered(interval_s, random.Random(seed), shortest_s=shortest_s)
        return [pause_s() for _ in range(2000)]

    found = draw(1)
    assert min(found) == pytest.approx(least_s, rel=0.001)
    assert max(found) == pytest.approx(most_s, rel=0.001)
    assert statistics.fmean(found) == pytest.approx(interval_s, rel=0.01)
    assert statistics.pstdev(found) == pytest.approx((most_s - least_s) / 12**0.5, rel=0.05)
    assert found == draw(1)
    assert (found == draw(2)) == (least_s == most_s)


def rows(first: int, end: int) -> list[CpuSample]:
    return [CpuSample(t_ns=t, process="p", cores=0, rss_bytes=0) for t in range(first, end)]


def test_memory_holds_only_the_latest_rows_and_the_disk_all(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path, "cpu", CpuSample)
    gathered.add(rows(0, 3))
    assert gathered.since(0) == (rows(0, 3), 3)
    assert gathered.since(3) == ([], 3)
    gathered.add(rows(3, 5))
    assert gathered.since(3) == (rows(3, 5), 5)
    gathered.add(rows(5, MOST_HELD + 10))
    assert gathered.since(5) == (rows(10, MOST_HELD + 10), MOST_HELD + 10)
    assert len(gathered.latest()) == MOST_HELD
    assert [row.t_ns for row in gathered.all()] == list(range(MOST_HELD + 10))
    gathered.close()


def test_a_killed_process_loses_no_row_of_the_turns_before(tmp_path: Path) -> None:
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
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpu.ndjson.gz").symlink_to("/dev/full")
    gathered = Gathered(tmp_path, "cpu", CpuSample)
    for _ in range(2):  # nothing after a partly written turn could be unpacked
        with pytest.raises(SourceError, match=r"no longer be written \(No space left on"):
            gathered.add(rows(0, 1))
    gathered.close()
