"""Planned kills: of a real process, as a launcher's announcements name them."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from harness.errors import TargetError
from harness.run.kills import AnnouncedFleet, Killer
from harness.store.manifest import Kill

NOBODY = 2**22 + 1  # no process has so large a number
READY = {"event": "ready", "worker_pids": [11, 12, 13]}


def test_victims_go_by_turns_and_one_always_serves() -> None:
    fleet = AnnouncedFleet("worker")
    assert fleet.next_victim() is None, "before the ready line"
    fleet.take(READY)
    assert [fleet.next_victim() for _ in range(3)] == [(0, 11), (1, 12), None]
    assert fleet.take({"event": "restarted", "kind": "frontend", "index": 1, "pid": 9}) is None
    assert fleet.take({"event": "restarted", "kind": "worker", "index": 0, "pid": 21}) == 0
    assert [fleet.next_victim(), fleet.next_victim()] == [(2, 13), None]
    fleet.take({"event": "restarted", "kind": "worker", "index": 1, "pid": 22})
    assert fleet.next_victim() == (0, 21), "the turns begin again"


def killer_of(lines: list[str], kills: list[Kill], clock_ns: object = None) -> Killer:
    return Killer(
        "worker",
        every_s=0.01,
        name_of="worker-{}".format,
        announced=lambda: lines,
        kills=kills,
        clock_ns=time.perf_counter_ns if clock_ns is None else clock_ns,  # type: ignore[arg-type]
    )


def test_a_process_is_killed_and_awaited() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:
        kills: list[Kill] = []
        lines = ["plain text", json.dumps({**READY, "worker_pids": [victim.pid, NOBODY]})]
        with killer_of(lines, kills):
            assert victim.wait(30) == -signal.SIGKILL
            # Worker 1 is alone now, so it stays.
            back = {"event": "restarted", "kind": "worker", "index": 0, "pid": NOBODY}
            threading.Timer(0.05, lines.append, [json.dumps(back)]).start()
    (kill,) = (one for one in kills if one.pid == victim.pid)
    assert kill.index == 0
    assert kill.back_ns is not None
    assert kill.back_ns > kill.t_ns


def test_a_process_that_never_comes_back_ends_the_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:
        lines = [json.dumps({**READY, "worker_pids": [victim.pid, NOBODY]})]
        times = iter(range(0, 10**15, 10**9))  # each look takes a second
        killer = killer_of(lines, [], lambda: next(times))
        with pytest.raises(TargetError, match="a killed worker was not started again"), killer:
            victim.wait(30)
