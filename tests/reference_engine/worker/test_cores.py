"""The step loop keeps off the frontend's core while it does not have to wait for another."""

import os
import threading
from collections.abc import Iterator

import pytest

from reference_engine.worker.service import is_crowded, keep_off_core

if not hasattr(os, "sched_getaffinity"):
    pytest.skip("needs processor affinity", allow_module_level=True)


class OverError(Exception):
    pass


@pytest.fixture
def idle_thread() -> Iterator[int]:
    over, ids = threading.Event(), list[int]()
    started = threading.Barrier(2)

    def idle() -> None:
        ids.append(threading.get_native_id())
        started.wait()
        over.wait()

    thread = threading.Thread(target=idle)
    thread.start()
    started.wait()
    yield ids[0]
    over.set()
    thread.join()


def test_a_loop_that_need_not_wait_stays_on_the_other_cores(idle_thread: int) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    seen: list[set[int]] = []

    def wait(seconds: float) -> None:
        seen.append(os.sched_getaffinity(idle_thread))
        if len(seen) == 3:
            raise OverError

    with pytest.raises(OverError):
        keep_off_core(idle_thread, min(cores), wait)
    assert seen == [cores - {min(cores)}] * 3
    assert os.sched_getaffinity(0) == cores, "only that thread's"


def test_a_loop_that_has_to_wait_may_go_anywhere() -> None:
    assert not is_crowded(run_ns=0, wait_ns=0)
    assert not is_crowded(run_ns=970_000_000, wait_ns=30_000_000)
    assert is_crowded(run_ns=800_000_000, wait_ns=200_000_000)
