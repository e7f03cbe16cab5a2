"""The load's own lag: a busy loop finds all ticks that it missed. (Nothing is patched here.)"""

import select
from itertools import pairwise
from pathlib import Path

import pytest
from gevent.event import Event  # noqa: TID251

from harness.client.lag import LagWatch
from harness.client.shards import ShardReader
from harness.records import ClientSample


def test_ticks_that_were_missed_are_noticed_late_and_each_once(tmp_path: Path) -> None:
    noticed = Event()

    def open_streams() -> int:
        noticed.set()
        return 3

    watch = LagWatch(open_streams=open_streams, give_up=pytest.fail)
    watch.begin(tmp_path)
    select.select([], [], [], 0.15)  # keeps the loop busy
    assert noticed.wait(30)
    watch.end()
    samples = ShardReader(tmp_path, ClientSample).read_new()
    assert len(samples) >= 7
    assert {sample.streams for sample in samples} == {3}
    due_ns = [sample.t_ns - sample.lag_ns for sample in samples]
    assert {b - a for a, b in pairwise(due_ns)} == {20_000_000}
    at_once = [sample.lag_ns for sample in samples if sample.t_ns == samples[0].t_ns]
    assert at_once[0] > 100_000_000
    assert at_once[-1] < 20_000_000
    watch._watcher.stop()
    watch._watcher.close()
