"""The other sources: the engine's logs, the clock, CPU, GPU, and the thread that they share."""

import json
import math
import os
import random
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from harness.collect.clock import ClockReading, check_clock, judge_clock
from harness.collect.collector import Collector, Scraping
from harness.collect.cpu import CpuSampler
from harness.collect.gpu import NoGpu, NvmlSampler
from harness.collect.lifecycle import LogFollower
from harness.collect.source import Notes, SourceError, jittered, poll
from harness.records import LifecycleEvent
from tests.e2e.running import wait_until

Script = Callable[[str], tuple[int, dict[str, str], bytes]]
Serve = Callable[[Script], str]


def event(seq: int) -> bytes:
    fields = {
        "seq": seq,
        "t_ns": seq * 10,
        "event": "arrived",
        "request_id": f"s{seq}",
        "client_request_id": None,
        "step": None,
        "num_generated": 0,
        "num_blocks": 0,
        "reason": None,
    }
    return json.dumps(fields).encode() + b"\n"


def log_of(last: int, dropped: int = 0, most_rows: int = 10_000) -> Script:
    """A log of events 1 to `last`, paged like the engine's, with at most `most_rows` a page."""

    def script(path: str) -> tuple[int, dict[str, str], bytes]:
        query = parse_qs(urlsplit(path).query)
        after, limit = int(query["after"][0]), int(query["limit"][0])
        seqs = range(after + 1, min(after + min(limit, most_rows), last) + 1)
        headers = {
            "x-walkaway-next-after": str(seqs[-1] if seqs else after),
            "x-walkaway-dropped": str(dropped if after == 0 else 0),
            "x-walkaway-last": str(last),
        }
        return 200, headers, b"".join(event(seq) for seq in seqs)

    return script


@pytest.mark.parametrize(("last", "most_rows"), [(10_001, 10_000), (100, 7)])
def test_a_log_is_followed_over_pages_each_event_once(
    serve: Serve, last: int, most_rows: int
) -> None:
    url = serve(log_of(last, most_rows=most_rows))
    notes, kept = Notes(), list[LifecycleEvent]()
    with httpx.Client(trust_env=False) as client:
        follower = LogFollower(client, url, LifecycleEvent, notes, keep=kept.extend)
        follower.catch_up()
        follower.catch_up()
    assert [row.seq for row in kept] == list(range(1, last + 1))
    assert (notes.texts(), notes.warnings()) == ([], [])


def test_history_is_skipped_over_pages_of_any_size(serve: Serve) -> None:
    url = serve(log_of(100, most_rows=7))
    kept: list[LifecycleEvent] = []
    with httpx.Client(trust_env=False) as client:
        follower = LogFollower(client, url, LifecycleEvent, Notes(), keep=kept.extend)
        follower.skip_history()
        follower.catch_up()
    assert kept == []


def test_dropped_events_are_noted(serve: Serve) -> None:
    url = serve(log_of(2, dropped=7))
    notes, kept = Notes(), list[LifecycleEvent]()
    with httpx.Client(trust_env=False) as client:
        LogFollower(client, url, LifecycleEvent, notes, keep=kept.extend).catch_up()
    assert notes.warnings() == [f"{url}: 7 rows fell out of the engine's log unread"]


@pytest.mark.parametrize(
    "answer",
    [
        (404, {}, b""),
        (200, {"x-walkaway-next-after": "1"}, b"not json\n"),
        (200, {}, event(1)),
    ],
)
def test_a_log_that_cannot_be_read_is_a_source_error(
    serve: Serve, answer: tuple[int, dict[str, str], bytes]
) -> None:
    url = serve(lambda path: answer)
    kept: list[LifecycleEvent] = []
    with httpx.Client(trust_env=False) as client:
        follower = LogFollower(client, url, LifecycleEvent, Notes(), keep=kept.extend)
        with pytest.raises(SourceError, match="could not be read"):
            follower.catch_up()
    assert kept == []


@pytest.mark.parametrize(
    ("server_ns", "boot_id", "comparable"),
    [(15, "a", True), (10, "a", True), (9, "a", False), (21, "a", False), (15, "b", False)],
)
def test_clocks_compare_when_the_reading_fits_and_the_boot_is_ours(
    server_ns: int, boot_id: str, comparable: bool
) -> None:
    good = ClockReading(before_ns=0, server_ns=5, after_ns=40, boot_id="a")
    asked = ClockReading(before_ns=10, server_ns=server_ns, after_ns=20, boot_id=boot_id)
    check = judge_clock([good, asked], local_boot_id="a")
    assert check.comparable is comparable
    assert check.round_trip_ns == 10


def test_a_clock_is_asked_over_http(serve: Serve) -> None:
    body = json.dumps({"clock": "CLOCK_MONOTONIC", "now_ns": 5, "boot_id": "elsewhere"}).encode()
    url = serve(lambda path: (200, {}, body))
    with httpx.Client(trust_env=False) as client:
        check = check_clock(client, url, clock_ns=lambda: 5)
        assert not check.comparable
        assert check.round_trip_ns == 0
        broken = serve(lambda path: (200, {}, b"[]"))
        with pytest.raises(SourceError, match="could not be read"):
            check_clock(client, broken, clock_ns=lambda: 5)


def test_cpu_rows_come_from_the_second_sample_on() -> None:
    sampler = CpuSampler()
    sampler.watch("harness", os.getpid())
    assert sampler.sample(0) == []
    rows = {row.process: row for row in sampler.sample(1_000_000_000)}
    assert set(rows) == {"machine", "harness"}
    assert rows["harness"].rss_bytes > 1_000_000
    assert 0 <= rows["harness"].cores < 5


def test_cpu_leaves_out_a_process_that_is_not_there() -> None:
    sampler = CpuSampler()
    sampler.watch("ghost", 2**22 + 1)
    sampler.sample(0)
    assert {row.process for row in sampler.sample(10)} == {"machine"}


class FakeNvml:
    """One GPU that does not tell its power."""

    class NVMLError(Exception):
        pass

    class Readings:
        gpu = 50
        used = 1024

    is_lost = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "Fake GPU"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Readings:  # noqa: N802
        if self.is_lost:
            raise self.NVMLError("lost")
        return self.Readings()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Readings:  # noqa: N802
        return self.Readings()

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        raise self.NVMLError("not supported")


def test_nvml_readings_become_rows_with_power_missing() -> None:
    nvml = FakeNvml()
    sampler = NvmlSampler(nvml)
    assert sampler.names == ["Fake GPU"]
    (row,) = sampler.sample(7)
    assert (row.t_ns, row.gpu, row.utilisation, row.memory_bytes) == (7, 0, 0.5, 1024)
    assert row.power_w is None
    nvml.is_lost = True
    with pytest.raises(SourceError, match="GPU counters could not be read: lost"):
        sampler.sample(8)


def test_a_failing_source_is_noted_once_and_asked_again() -> None:
    stop, notes = threading.Event(), Notes()
    turns = []

    def tick() -> None:
        turns.append(1)
        if len(turns) == 3:
            stop.set()
        raise SourceError("no answer")

    poll(tick, pause_s=lambda: 0, stop=stop, notes=notes)
    assert len(turns) == 3
    assert (notes.warnings(), notes.texts()) == (["no answer"], [])


def test_pauses_are_uniform_around_the_interval_and_follow_from_the_seed() -> None:
    def draw(seed: int) -> list[float]:
        pause_s = jittered(0.4, random.Random(seed))
        return [pause_s() for _ in range(2000)]

    found = draw(1)
    assert 0.3 <= min(found) < 0.301
    assert 0.499 < max(found) <= 0.5
    assert statistics.fmean(found) == pytest.approx(0.4, rel=0.01)
    assert statistics.pstdev(found) == pytest.approx(0.2 / math.sqrt(12), rel=0.05)
    assert found == draw(1)
    assert found != draw(2)


@pytest.mark.parametrize(
    ("interval_s", "least_s", "most_s"),
    [(2.0, 1.5, 2.5), (1.2, 1.1, 1.3), (1.1, 1.1, 1.1), (0.4, 0.3, 0.5)],
)
def test_a_jittered_pause_is_never_closer_than_the_server_bears_unless_asked_for(
    interval_s: float, least_s: float, most_s: float
) -> None:
    pause_s = jittered(interval_s, random.Random(1), shortest_s=1.1)
    found = [pause_s() for _ in range(2000)]
    assert min(found) == pytest.approx(least_s, rel=0.001)
    assert max(found) == pytest.approx(most_s, rel=0.001)


def test_a_source_is_looked_at_after_each_pause() -> None:
    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            if len(waited) == 3:
                self.set()
            return False

    waited: list[float | None] = []
    pauses = iter([0.1, 0.3, 0.2])
    poll(lambda: None, pause_s=lambda: next(pauses), stop=Stop(), notes=Notes())
    assert waited == [0.1, 0.3, 0.2]


def collector_of(rows_dir: Path, url: str, notes: Notes) -> Collector:
    return Collector(
        rows_dir=rows_dir,
        client=httpx.Client(trust_env=False),
        scraping=Scraping([f"{url}/metrics"], lambda: 0.01),
        lifecycle_url=url,
        gpu=NoGpu("none here"),
        clock_ns=lambda: 0,
        notes=notes,
    )


def test_history_is_skipped(serve: Serve) -> None:
    last = [10_002]
    url = serve(lambda path: log_of(last[0], dropped=3)(path))
    notes, kept = Notes(), list[LifecycleEvent]()
    with httpx.Client(trust_env=False) as client:
        follower = LogFollower(client, url, LifecycleEvent, notes, keep=kept.extend)
        follower.skip_history()
        last[0] += 2
        follower.catch_up()
    assert [row.seq for row in kept] == [10_003, 10_004]
    assert (notes.texts(), notes.warnings()) == ([], [])


def test_the_collector_keeps_what_came_last(serve: Serve, tmp_path: Path) -> None:
    """What was logged before it began is not of this run; what came after its last turn is."""
    scraped = threading.Event()
    last = [1]

    def script(path: str) -> tuple[int, dict[str, str], bytes]:
        if path == "/metrics":
            scraped.set()
            return 200, {}, b"a 1\n"
        if path.startswith("/walkaway/steps"):
            return 200, {"x-walkaway-next-after": "0"}, b""
        return log_of(last[0])(path)

    notes = Notes()
    with collector_of(tmp_path, serve(script), notes) as collector:
        scraped.wait()  # the collector gives way to whoever is busy
        last[0] = 3
    rows = collector.rows()
    assert [row.seq for row in rows.lifecycle] == [2, 3]
    assert list(rows.server_metrics)
    assert (notes.texts(), notes.warnings()) == ([], [])


def test_a_collector_without_a_server_ends_well_and_says_so(tmp_path: Path) -> None:
    notes = Notes()
    unread = "metrics at http://127.0.0.1:1/metrics could not be read"
    with collector_of(tmp_path, "http://127.0.0.1:1", notes):
        wait_until(lambda: any(unread in text for text in notes.warnings()), "it has scraped once")
    texts = " ".join(notes.warnings())
    assert "http://127.0.0.1:1/walkaway/steps could not be read" in texts
