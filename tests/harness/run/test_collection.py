"""Shards of two machines, whose clocks begin anywhere, become one run."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from harness.collect.source import Gathered
from harness.errors import ConfigError
from harness.records import (
    ClientSample,
    LifecycleEvent,
    Outcome,
    ProcessMark,
    RequestRow,
    Role,
    WorkerSeen,
)
from harness.run.collection import collect
from harness.store.manifest import Window
from harness.store.run_folder import RunFolder
from harness.workload.arrivals import ConstantArrivals
from tests.harness.load.asking import plan_of
from tests.harness.told import summary_of
from tests.harness.workload.mixes import STAY, load_of
from tests.made_up.rows import request_row
from tests.made_up.run import RunBuilder

MS = 1_000_000
# One second of one machine, and the same of the other.
HERE_NS, THERE_NS = 5_000 * MS, 777_000_000 * MS


def lines(path: Path, *rows: msgspec.Struct) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def mark(
    host: str,
    event: Literal["began", "ended"],
    t_ns: int,
    second: int,
    *,
    clock: str | None = None,
    name: str = "",
) -> ProcessMark:
    return ProcessMark(
        event=event,
        host=host,
        pid=7,
        worker=0,
        clock=clock or f"clock of {host}",
        t_ns=t_ns,
        at=f"2026-11-21T10:00:{second:02}+00:00",
        url="http://server:1",
        model="m",
        name=name,
    )


def request(name: str, sent_ns: int) -> RequestRow:
    times = [sent_ns + 100 * MS, sent_ns + 110 * MS]
    return request_row(
        name,
        sent_ns=sent_ns,
        ended_ns=times[-1],
        outcome=Outcome.COMPLETED,
        token_times_ns=times,
        think_ns=4,
        max_tokens=2,
    )


def leave_shards(
    folder: Path,
    host: str,
    origin_ns: int,
    second: int,
    *,
    dies: bool = False,
    clock: str | None = None,
    name: str = "",
) -> Path:
    """What one load process leaves that begins at this second and asks once, a second later."""
    folder.mkdir()
    began = mark(host, "began", origin_ns, second, clock=clock, name=name)
    ended = mark(host, "ended", origin_ns + 1, 59, clock=clock, name=name)
    sent_ns = origin_ns + 1000 * MS
    tick = ClientSample(t_ns=sent_ns, pid=7, lag_ns=9, cpu_s=0.1, streams=1, host=host)
    lines(folder / f"process-{host}-7.ndjson", began, *([] if dies else [ended]))
    lines(folder / f"requests-{host}-7.ndjson", request(f"of-{host}", sent_ns))
    lines(folder / f"client-{host}-7.ndjson", tick)
    return folder


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    here = leave_shards(tmp_path / "a", "here", HERE_NS, 10)
    there = leave_shards(tmp_path / "b", "there", THERE_NS, 13, dies=True)
    folder = collect([there, here], tmp_path / "run", command=["walkaway", "collect"])
    assert (there / "requests-there-7.ndjson").exists()
    frames = folder.frames()
    by_host = frames.requests.set_index("request_id")
    assert by_host["sent_ns"].to_dict() == {
        "of-here": HERE_NS + 1000 * MS,
        "of-there": HERE_NS + 4000 * MS,
    }
    assert by_host["think_ns"].to_list() == [4, 4]
    assert list(by_host["token_times_ns"]["of-there"]) == [HERE_NS + 4100 * MS, HERE_NS + 4110 * MS]
    assert sorted(frames.client["t_ns"]) == [HERE_NS + 1000 * MS, HERE_NS + 4000 * MS]
    assert set(frames.client["lag_ns"]) == {9}
    return summary_of(frames)


def test_times_within_a_request_are_what_they_were(summary: dict[str, Any]) -> None:
    assert summary["outcomes"]["completed"] == 2
    assert summary["metrics"]["ttft_s"]["p50"] == pytest.approx(0.1)
    assert summary["metrics"]["goodput_rps"]["mean"] == pytest.approx(2 / 3.11)


def test_machines_of_one_name_have_clocks_of_their_own(tmp_path: Path) -> None:
    here = leave_shards(tmp_path / "a", "ubuntu", HERE_NS, 10, clock="A")
    there = leave_shards(tmp_path / "b", "ubuntu", THERE_NS, 13, clock="B")
    folder = collect([here, there], tmp_path / "run", command=[])
    frames, both = folder.frames(), {f"ubuntu, {here}", f"ubuntu, {there}"}
    assert {one["host"] for one in folder.read_manifest()["load_processes"]} == both
    assert set(frames.client["host"]) == both  # both processes have the same id
    assert sorted(frames.requests["sent_ns"]) == [HERE_NS + 1000 * MS, HERE_NS + 4000 * MS]
    assert summary_of(frames)["metrics"]["goodput_rps"]["mean"] == pytest.approx(2 / 3.11)


def test_rows_by_two_clocks_in_one_folder_are_refused(tmp_path: Path) -> None:
    shards = leave_shards(tmp_path / "a", "ubuntu", HERE_NS, 10, clock="A")
    lines(shards / "process-ubuntu-8.ndjson", mark("ubuntu", "began", THERE_NS, 13, clock="B"))
    with pytest.raises(ConfigError, match=r"ubuntu stamped by two clocks .* its own folder"):
        collect([shards], tmp_path / "run", command=[])


def test_a_worker_whose_rows_nobody_brought_is_named(tmp_path: Path) -> None:
    """The master saw both; of one the folder was not copied."""
    here = leave_shards(tmp_path / "a", "here", HERE_NS, 10, name="here_1")
    (master := tmp_path / "master").mkdir()
    lines(
        master / "workers-first-3.ndjson",
        *(WorkerSeen(name=name, at="2026-11-21T10:00:00+00:00") for name in ("here_1", "there_2")),
    )

    def said(*folders: Path) -> list[str]:
        folder = collect(folders, tmp_path / f"run-{len(folders)}", command=[])
        return [one["text"] for one in summary_of(folder.frames())["validity"]]

    (text,) = [text for text in said(here, master) if "there_2" in text]
    assert "left nothing in the folders that were collected: there_2;" in text
    assert any("the master's list of its workers is not in these folders" in t for t in said(here))


def test_a_masters_list_alone_is_no_load(tmp_path: Path) -> None:
    lines(tmp_path / "workers-first-3.ndjson", WorkerSeen(name="here_1", at=""))
    with pytest.raises(ConfigError, match="holds no shards of a load"):
        collect([tmp_path], tmp_path / "run", command=[])


def test_what_an_open_loop_never_sent_is_told(tmp_path: Path) -> None:
    """Ten requests were due, one in each 100 ms; one worker sent the first two, the other died."""
    shards = leave_shards(tmp_path / "a", "here", HERE_NS, 10)
    arrivals = ConstantArrivals(kind="constant", rate=10, seconds=1, max_streams=4)
    plan = plan_of("http://server:1", seed=3, load=load_of(STAY), arrivals=arrivals)
    began = mark("here", "began", HERE_NS, 10)
    began.open_plan = plan.model_dump(mode="json")
    lines(shards / "process-here-7.ndjson", began, mark("here", "ended", HERE_NS + 1, 59))
    rows = [request(f"r{n}", HERE_NS + 100 * n * MS) for n in range(2)]
    for number, row in enumerate(rows):
        row.user = number
    lines(shards / "requests-here-7.ndjson", *rows)

    folder = collect([shards], tmp_path / "run", command=[])
    summary = summary_of(folder.frames())
    assert summary["arrivals"] == {"planned": 10, "sent": 2}
    unsent = folder.read_manifest()["arrivals"]["unsent"]
    assert unsent == {"to_stay_s": [pytest.approx(0.01)], "to_leave_s": []}  # the others: not due
    assert any("8 of 10 requests of the sch" in one["text"] for one in summary["validity"])


def test_nothing_of_the_server_is_told(summary: dict[str, Any]) -> None:
    for name in ("cancel_latency_s", "wasted_tokens", "leaked_slots", "step_s"):
        assert name in summary["not_measurable"]


def test_it_says_what_it_is_and_who_died(summary: dict[str, Any]) -> None:
    text = " ".join(one["text"] for one in summary["validity"])
    assert "collected from shards" in text
    assert "several machines" in text
    assert "load process 0 (pid 7 on there) died 3.0 s into the load" in text
    assert "on here" not in text


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no shards of a load"):
        collect([tmp_path], tmp_path / "run", command=[])
    assert not (tmp_path / "run").exists()


def test_probes_are_told(tmp_path: Path) -> None:
    """A probe counts from the moment at which its own client left: one clock."""
    shards = leave_shards(tmp_path / "a", "there", THERE_NS, 13)
    left_ns = THERE_NS + 1200 * MS
    probe = msgspec.structs.replace(
        request("probe", THERE_NS + 1100 * MS),
        role=Role.PROBE,
        arm="abandon",
        trial=0,
        reference_ns=left_ns,
        first_token_ns=left_ns + 30 * MS,
        token_times_ns=[left_ns + 30 * MS, left_ns + 40 * MS],
        last_token_ns=left_ns + 40 * MS,
        ended_ns=left_ns + 40 * MS,
    )
    lines(shards / "requests-there-8.ndjson", probe)
    folder = collect([shards], tmp_path / "run", command=["walkaway", "collect"])
    metrics = summary_of(folder.frames())["metrics"]
    assert metrics["slot_recovery_s"]["p50"] == pytest.approx(0.030)


def test_of_a_run_whose_harness_was_killed_what_the_server_told_is_kept(tmp_path: Path) -> None:
    killed = RunFolder.create(tmp_path / "killed")
    run = RunBuilder(tmp_path)
    run.manifest.status, run.manifest.window = "interrupted", Window()
    run.abandon("a", t0=100, tokens=[50, 80])
    run.events("a", generated=3, arrived=5, admitted=10, first_token=50, disconnected=102)
    run.events("a", generated=3, abort_sent=103, removed=106, blocks_freed=107, finished=108)
    killed.write_manifest(run.manifest)
    lines(killed.shards / "process-here-7.ndjson", mark("here", "began", HERE_NS, 10))
    lines(killed.shards / "requests-here-7.ndjson", *run.requests)
    gathered = Gathered(killed.shards, "lifecycle", LifecycleEvent)
    gathered.add(run.lifecycle)
    gathered.close()

    folder = collect([killed.shards], tmp_path / "run", command=["walkaway", "collect"])
    summary = summary_of(folder.frames())
    assert summary["engine"] == "reference"
    assert summary["metrics"]["cancel_latency_s"]["p50"] == pytest.approx(0.007)
    assert summary["status"] == "interrupted"
    said = " ".join(one["text"] for one in summary["validity"])
    assert "its harness was killed, or the disk was full" in said
    assert folder.read_manifest()["run_id"] == "run"
    assert (killed.shards / "lifecycle.ndjson.gz").exists()
