"""The sources of a run, each polled in its own thread: servers, CPUs and GPUs."""

import os
import threading
from pathlib import Path

import httpx
import msgspec

from harness.collect.collector import Collector, PageUrls
from harness.collect.gpu import NvmlGpus
from harness.collect.machine import CpuSampler
from harness.collect.source import Notes
from tests.conftest import ServePages
from tests.e2e.running import wait_until
from tests.harness.collect.test_gpu import fake_nvml
from tests.made_up.rows import lifecycle_event


def test_cpu_rows_count_from_when_a_process_was_named() -> None:
    sampler = CpuSampler()
    sampler.watch("harness", os.getpid(), 0)
    sampler.watch("ghost", 2**22 + 1, 0)
    assert [row.process for row in sampler.sample(1_000_000_000)] == ["harness"]
    rows = {row.process: row for row in sampler.sample(2_000_000_000)}
    assert set(rows) == {"machine", "harness"}
    assert rows["harness"].rss_bytes > 1_000_000
    assert 0 <= rows["harness"].cores < 5


def test_a_reading_just_after_the_last_makes_no_row_of_impossible_cores() -> None:
    """Two ticks of the kernel's clock in 1.7 ms read as 11.5 cores."""
    sampler = CpuSampler()
    begun_s = sum(os.times()[:2])
    sampler.watch("load", os.getpid(), 0)
    while sum(os.times()[:2]) < begun_s + 0.05:  # CPU time: as long as it takes
        pass
    assert sampler.sample(1_700_000) == []
    (load, machine) = sorted(sampler.sample(250_000_000), key=lambda row: row.process)
    assert (load.process, machine.process) == ("load", "machine")
    assert 0.05 / 0.25 - 0.05 <= load.cores < 2  # and the time before it is not lost


def collector_of(rows_dir: Path, url: str, notes: Notes) -> Collector:
    return Collector(
        rows_dir=rows_dir,
        client=httpx.Client(trust_env=False),
        pages=PageUrls(metrics=[f"{url}/metrics"], logs=[url]),
        scrape_pause_s=lambda: 0.01,
        clock_ns=lambda: 0,
        notes=notes,
    )


def test_the_collector_keeps_all_from_its_first_turn_to_its_last(
    serve_pages: ServePages, tmp_path: Path
) -> None:
    """Rows logged before it began are not of this run; rows after its last turn are."""
    scraped = threading.Event()
    logged = [1]

    def script(path: str) -> tuple[int, dict[str, str], bytes]:
        if path == "/metrics":
            scraped.set()
            return 200, {}, b"a 1\n"
        if path.startswith("/walkaway/steps"):
            return 200, {"x-walkaway-next-after": "0"}, b""
        after = int(path.partition("after=")[2].partition("&")[0])
        rows = [lifecycle_event(seq, 1, "arrived", "s") for seq in logged if seq > after]
        content = msgspec.json.Encoder().encode_lines(rows)
        return 200, {"x-walkaway-next-after": str(logged[-1])}, content

    notes = Notes()
    collector = collector_of(tmp_path, serve_pages(script), notes)
    collector.watch_gpus(NvmlGpus(fake_nvml(), lambda: 0))
    with collector:
        scraped.wait()  # the collector's threads give way to busy ones
        wait_until(lambda: bool(collector.latest_scrape), "the scrape is read")
        logged += [2, 3]
    rows = collector.rows()
    assert [row.seq for row in rows.lifecycle] == [2, 3]
    assert {row.name for row in rows.server_metrics} == collector.names_seen == {"a"}
    assert {row.gpu for row in rows.gpu} == {0, 1}
    assert not notes.warnings()


def test_a_collector_without_a_server_ends_well_and_says_so(tmp_path: Path) -> None:
    notes = Notes()
    unread = "metrics at http://127.0.0.1:1/metrics could not be read"
    with collector_of(tmp_path, "http://127.0.0.1:1", notes):
        wait_until(lambda: any(unread in text for text in notes.warnings()), "it has scraped once")
    texts = " ".join(notes.warnings())
    assert "http://127.0.0.1:1/walkaway/steps could not be read" in texts
