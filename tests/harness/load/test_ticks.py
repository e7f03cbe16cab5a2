"""Ticks come through a descriptor, each of them, and say when they were due."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from harness.load.ticks import KernelAlarm, KernelTicks, ThreadTicks, Ticks

INTERVAL_NS = 2_000_000


class _OverError(Exception):
    """The test is over; so is the thread."""


@pytest.fixture(params=["kernel", "thread"])
def ticks(request: pytest.FixtureRequest) -> Iterator[Ticks]:
    is_over = threading.Event()

    def sleep(seconds: float) -> None:
        if is_over.wait(seconds):
            raise _OverError

    def start(tick: Callable[[], None], _arguments: tuple[()]) -> None:
        def run() -> None:
            with contextlib.suppress(_OverError):
                tick()

        threads.append(threading.Thread(target=run))
        threads[0].start()

    threads: list[threading.Thread] = []
    yield (
        KernelTicks(INTERVAL_NS)
        if request.param == "kernel"
        else ThreadTicks(INTERVAL_NS, start_thread=start, sleep=sleep)
    )
    is_over.set()
    for thread in threads:
        thread.join()


def take_one_read(ticks: Ticks) -> list[int]:
    assert select.select([ticks.descriptor], [], [], 30)[0]
    return list(ticks.take())


def test_ticks_are_evenly_spaced_and_none_comes_early(ticks: Ticks) -> None:
    due_ns: list[int] = []
    while len(due_ns) < 5:
        due_ns += take_one_read(ticks)
        assert due_ns[-1] <= time.perf_counter_ns()
    assert {later - earlier for earlier, later in pairwise(due_ns)} == {INTERVAL_NS}


def test_ticks_that_nobody_took_are_all_told_later(ticks: Ticks) -> None:
    first = take_one_read(ticks)
    while time.perf_counter_ns() < first[-1] + 4 * INTERVAL_NS:
        select.select([], [], [], INTERVAL_NS / 1e9)
    late: list[int] = []
    while len(late) < 3:
        late += take_one_read(ticks)
    assert late[0] == first[-1] + INTERVAL_NS


def test_a_descriptor_of_the_kernels_ticks_is_not_inherited() -> None:
    assert not os.get_inheritable(KernelTicks(INTERVAL_NS).descriptor)


def test_an_alarm_goes_off_at_its_time_and_not_before_and_can_be_set_again() -> None:
    alarm = KernelAlarm()
    try:
        for _ in range(2):
            at_ns = time.perf_counter_ns() + INTERVAL_NS
            alarm.set(at_ns)
            assert select.select([alarm.descriptor], [], [], 30)[0]
            assert time.perf_counter_ns() >= at_ns
        alarm.set(time.perf_counter_ns() + 3_600_000_000_000)
        assert not select.select([alarm.descriptor], [], [], 0)[0]
        alarm.set(1)  # long past
        assert select.select([alarm.descriptor], [], [], 30)[0]
    finally:
        alarm.close()
