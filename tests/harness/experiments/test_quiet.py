"""When a server's processor is at rest again, and when it has no rest that could be seen."""

import os

import numpy as np
import pytest

from harness.collect.source import SourceError
from harness.experiments.quiet import ProcessTree, Rest, find_rest, gpu_meter, quiet_after_s
from harness.experiments.readings import Reading
from harness.records import GpuSample


def read(*values: float) -> list[Reading]:
    return [Reading(0.1 * (number + 1), value) for number, value in enumerate(values)]


def test_a_server_is_quiet_from_the_first_of_three_readings_at_rest() -> None:
    busy_then_quiet = read(0.9, 0.8, 0.85, 0.1, 0.7, 0.02, 0.01, 0.03, 0.01)
    assert quiet_after_s(busy_then_quiet, 0.15, 0.2) == pytest.approx(0.45)
    assert quiet_after_s(busy_then_quiet[:7], 0.15, 0.2) is None
    assert quiet_after_s([*busy_then_quiet, Reading(1.0, 0.9)], 0.15, 0.2) is None


def test_rest_lies_between_what_was_seen_idle_and_busy() -> None:
    rng = np.random.default_rng(1)
    found = find_rest(list(rng.uniform(0, 0.1, 10)), list(rng.uniform(0.5, 0.7, 10)))
    assert isinstance(found, Rest)
    assert 0.1 < found.limit < 0.5


@pytest.mark.parametrize(
    ("idle", "busy"),
    [
        ([1.0] * 10, [1.02] * 10),  # it waits for work in a busy loop
        ([0.0] * 10, [0.01] * 10),  # one stream costs all but nothing
        ([0.0] * 9 + [0.6], [0.5] * 10),  # something else ran
    ],
)
def test_a_server_that_is_as_busy_at_rest_has_no_rest(idle: list[float], busy: list[float]) -> None:
    assert find_rest(idle, busy) is None


def test_processor_time_of_a_tree_is_that_of_its_processes() -> None:
    tree = ProcessTree(os.getpid())
    tree.cores()
    spent_s = sum(os.times()[:2]) + 0.2
    while sum(os.times()[:2]) < spent_s:
        pass
    assert tree.cores() > 0.2
    with pytest.raises(SourceError, match="cannot be watched"):
        ProcessTree(2**22 + 1)


class Gpus:
    interval_s = 0.1

    def __init__(self, *shares: float | None) -> None:
        self.names = ["GPU"] * len(shares)
        self.shares = shares

    def sample(self) -> list[GpuSample]:
        return [
            GpuSample(
                t_ns=0,
                gpu=number,
                utilisation=share,
                memory_bytes=None,
                power_w=None,
                energy_j=None,
            )
            for number, share in enumerate(self.shares)
        ]

    def close(self) -> None: ...


def test_the_busiest_gpu_counts() -> None:
    assert gpu_meter(Gpus(0.1, 0.7, None)).busy() == 0.7
    with pytest.raises(SourceError, match="does not show"):
        gpu_meter(Gpus(None)).busy()
