"""Shards of two machines, whose clocks begin anywhere, become one run."""

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from harness.errors import ConfigError
from harness.records import (
    ClientSample,
    Outcome,
    ProcessMark,
    RequestRow,
    Role,
    WorkerSeen,
)
from harness.run.collection import collect
from harness.store.run_folder import RunFolder
from harness.workload.arrivals import ConstantArrivals
from tests.harness.client.asking import plan_of
from tests.harness.told import summary_of
from tests.harness.workload.mixes import STAY, load_of
from tests.made_up.rows import request_row

MS = 1_000_000
# One second of one machine, and the same of the other.
HERE_NS, THERE_NS = 5_000 * MS, 777_000_000 * MS


def lines(path: Path, *rows: msgspec.Struct) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def mark(
    host: str, event: Literal["began", "ended"], t_ns: int, second: int, **more: Any
) -> ProcessMark:
    row = ProcessMark(
        event=event,
        host=host,
        pid=7,
        worker=0,
        clock=f"clock of {host}",
        t_ns=t_ns,
        at=f"2026-11-21T10:00:{second:02}+00:00",
        url="http://server:1",
        model="m",
    )
    return msgspec.structs.replace(row, **more)


def request(name: str, sent_ns: int, **more: Any) -> RequestRow:
    times = [sent_ns + 100 * MS, sent_ns + 110 * MS]
    row = request_row(
        name,
        sent_ns=sent_ns,
        ended_ns=times[-1],
        outcome=Outcome.COMPLETED,
        token_times_ns=times,
        think_ns=4,
        max_tokens=2,
    )
    return msgspec.structs.replace(row, **more)


def leave_shards(
    folder: Path, host: str, origin_ns: int, second: int, *, dies: bool = False, **marked: Any
) -> Path:
    """The shards of a load process that begins at this second and sends a request a second
    later."""
    folder.mkdir()
    began = mark(host, "began", origin_ns, second, **marked)
    ended = mark(host, "ended", origin_ns + 1, 59, **marked)
    sent_ns = origin_ns + 1000 * MS
    tick = ClientSample(t_ns=sent_ns, pid=7, lag_ns=9, cpu_s=0.1, streams=1, host=host)
    lines(folder / f"process-{host}-7.ndjson", began, *([] if dies else [ended]))
    lines(folder / f"requests-{host}-7.ndjson", request(f"of-{host}", sent_ns))
    lines(folder / f"client-{host}-7.ndjson", tick)
    return folder


def collected(tmp_path: Path, *shards: Path) -> RunFolder:
    return collect(shards, tmp_path / "run", command=["walkaway", "collect"])


def remarks(folder: RunFolder) -> list[str]:
    return [one["text"] for one in summary_of(folder.frames())["validity"]]


def test_the_rows_of_two_machines_are_put_on_one_clock(tmp_path: Path) -> None:
    here = leave_shards(tmp_path / "a", "here", HERE_NS, 10)
    there = leave_shards(tmp_path / "b", "there", THERE_NS, 13, dies=True)
    folder = collected(tmp_path, there, here)
    assert (there / "requests-there-7.ndjson").exists()
    frames = folder.frames()
    rows = frames.requests.set_index("request_id")
    assert rows["sent_ns"].to_dict() == {
        "of-here": HERE_NS + 1000 * MS,
        "of-there": HERE_NS + 4000 * MS,
    }
    assert rows["think_ns"].to_list() == [4, 4]
    assert list(rows["token_times_ns"]["of-there"]) == [HERE_NS + 4100 * MS, HERE_NS + 4110 * MS]
    assert sorted(frames.client["t_ns"]) == [HERE_NS + 1000 * MS, HERE_NS + 4000 * MS]
    assert set(frames.client["lag_ns"]) == {9}

    summary = summary_of(frames)
    assert summary["outcomes"]["completed"] == 2
    assert summary["metrics"]["ttft_s"]["p50"] == pytest.approx(0.1)
    assert summary["metrics"]["goodput_rps"]["mean"] == pytest.approx(2 / 3.11)
    for name in ("cancel_latency_s", "wasted_tokens", "leaked_slots", "step_s"):
        assert name in summary["not_measurable"]
    text = " ".join(remarks(folder))
    assert "collected from shards" in text
    assert "several machines" in text
    assert "load process 0 (pid 7 on there) died 3.0 s into the load" in text
    assert "on here" not in text


def test_machines_of_one_name_are_told_apart_by_their_clocks(tmp_path: Path) -> None:
    here = leave_shards(tmp_path / "a", "ubuntu", HERE_NS, 10, clock="A")
    there = leave_shards(tmp_path / "b", "ubuntu", THERE_NS, 13, clock="B")
    folder = collected(tmp_path, here, there)
    frames, both = folder.frames(), {f"ubuntu, {here}", f"ubuntu, {there}"}
    assert {one["host"] for one in folder.read_manifest()["load_processes"]} == both
    assert set(frames.client["host"]) == both  # both processes have the same id
    assert sorted(frames.requests["sent_ns"]) == [HERE_NS + 1000 * MS, HERE_NS + 4000 * MS]

    lines(here / "process-ubuntu-8.ndjson", mark("ubuntu", "began", THERE_NS, 13, clock="B"))
    with pytest.raises(ConfigError, match=r"ubuntu stamped by two clocks .* its own folder"):
        collect([here], tmp_path / "again", command=[])


def test_a_worker_whose_rows_are_missing_is_named(tmp_path: Path) -> None:
    """The master saw two workers; the folder of one was not copied."""
    here = leave_shards(tmp_path / "a", "here", HERE_NS, 10, name="here_1")
    (master := tmp_path / "master").mkdir()
    seen = [WorkerSeen(name=name, at="2026-11-21T10:00:00+00:00") for name in ("here_1", "there_2")]
    lines(master / "workers-first-3.ndjson", *seen)
    with pytest.raises(ConfigError, match="holds no shards of a load"):
        collected(tmp_path, master)
    assert not (tmp_path / "run").exists()
    (text,) = [text for text in remarks(collected(tmp_path, here, master)) if "there_2" in text]
    assert "left nothing in the folders that were collected: there_2;" in text
    alone = collect([here], tmp_path / "alone", command=[])
    assert any(
        "the master's list of its workers is not in these" in text for text in remarks(alone)
    )


def test_unsent_requests_of_an_open_loop_are_counted(tmp_path: Path) -> None:
    """Ten requests were due, one in each 100 ms; one worker sent the first two, the other died."""
    arrivals = ConstantArrivals(kind="constant", rate=10, seconds=1, max_streams=4)
    plan = plan_of("http://server:1", seed=3, load=load_of(STAY), arrivals=arrivals)
    kept = plan.model_dump(mode="json")
    shards = leave_shards(tmp_path / "a", "here", HERE_NS, 10, open_plan=kept)
    rows = [request(f"r{n}", HERE_NS + 100 * n * MS, user=n) for n in range(2)]
    lines(shards / "requests-here-7.ndjson", *rows)
    folder = collected(tmp_path, shards)
    assert summary_of(folder.frames())["arrivals"] == {"planned": 10, "sent": 2}
    manifest = folder.read_manifest()
    unsent = {"to_stay_s": [pytest.approx(0.01)], "to_leave_s": []}  # the others: not due
    assert manifest["arrivals"]["unsent"] == unsent
    assert manifest["seed"] == 3
    assert any("8 of 10 requests of the sch" in text for text in remarks(folder))


def test_a_plan_of_the_first_release_is_read(tmp_path: Path) -> None:
    """It has the 316 requests of the shipped workload `open_loop`."""
    kept = json.loads((Path(__file__).parent / "plan-0.1.0.json").read_text())
    shards = leave_shards(tmp_path / "a", "here", HERE_NS, 10, open_plan=kept)
    assert collected(tmp_path, shards).read_manifest()["arrivals"]["planned"] == 316


def test_a_plan_before_the_first_release_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    older = {"url": "http://server:1", "open_loop": {"schedule": {}, "max_streams": 7}}
    shards = leave_shards(tmp_path / "a", "here", HERE_NS, 10, open_plan=older)
    with pytest.raises(ConfigError, match=r"^process-here-7.ndjson: the key `model` .* older than"):
        collected(tmp_path, shards)
    assert not (tmp_path / "run").exists()


def test_damaged_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    shards = leave_shards(tmp_path / "a", "here", HERE_NS, 10)
    for kind in ("process", "requests", "client"):
        with (shards / f"{kind}-here-7.ndjson").open("ab") as file:
            file.write(b'{"half\n')
    said = collected(tmp_path, shards).read_manifest()["warnings"]
    assert said == ["3 rows of the load were damaged and are left out"]


def test_a_probe_counts_from_the_moment_at_which_its_own_client_left(tmp_path: Path) -> None:
    shards = leave_shards(tmp_path / "a", "there", THERE_NS, 13)
    left_ns = THERE_NS + 1200 * MS
    times = [left_ns + 30 * MS, left_ns + 40 * MS]
    probe = request(
        "probe",
        THERE_NS + 1100 * MS,
        role=Role.PROBE,
        arm="abandon",
        trial=0,
        reference_ns=left_ns,
        first_token_ns=times[0],
        token_times_ns=times,
        last_token_ns=times[1],
        ended_ns=times[1],
    )
    lines(shards / "requests-there-6.ndjson", probe)
    folder = collected(tmp_path, shards)
    metrics = summary_of(folder.frames())["metrics"]
    assert metrics["slot_recovery_s"]["p50"] == pytest.approx(0.030)
    window = folder.read_manifest()["window"]
    assert window["load_started_ns"] == THERE_NS + 1000 * MS
    assert window["load_ended_ns"] == times[1]
