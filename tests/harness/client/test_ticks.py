"""The kernel's timer goes off through a descriptor, not before its time, and counts."""

import os
import select
import time
from collections.abc import Iterator

import pytest

from harness.client.ticks import KernelTimer

INTERVAL_NS = 2_000_000


@pytest.fixture
def timer() -> Iterator[KernelTimer]:
    made = KernelTimer()
    yield made
    made.close()


def wait_for(timer: KernelTimer) -> int:
    assert select.select([timer.descriptor], [], [], 30)[0]
    return timer.take()


def test_it_goes_off_again_after_each_interval_and_counts_what_nobody_took(
    timer: KernelTimer,
) -> None:
    first_ns = time.perf_counter_ns() + INTERVAL_NS
    timer.set(first_ns, INTERVAL_NS)
    count = 0
    while count < 5:
        count += wait_for(timer)
        assert time.perf_counter_ns() >= first_ns + (count - 1) * INTERVAL_NS
    while time.perf_counter_ns() < first_ns + (count + 3) * INTERVAL_NS:
        select.select([], [], [], INTERVAL_NS / 1e9)
    assert wait_for(timer) >= 3


def test_its_descriptor_is_not_inherited(timer: KernelTimer) -> None:
    assert not os.get_inheritable(timer.descriptor)


def test_it_can_be_set_again_and_goes_off_at_once_if_its_time_is_past(timer: KernelTimer) -> None:
    for _ in range(2):
        at_ns = time.perf_counter_ns() + INTERVAL_NS
        timer.set(at_ns)
        assert wait_for(timer) == 1
        assert time.perf_counter_ns() >= at_ns
    timer.set(time.perf_counter_ns() + 3_600_000_000_000)
    assert not select.select([timer.descriptor], [], [], 0)[0]
    timer.set(1)
    assert wait_for(timer) == 1
