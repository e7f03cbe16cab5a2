"""Rows come back from parquet as they were, missing values stay missing, folders do not mix."""

import errno
import json
from collections.abc import Generator
from pathlib import Path, PosixPath
from typing import Any, Self

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from harness.errors import ConfigError
from harness.records import ClientSample, CpuSample, GpuSample, MetricSample, Outcome, RequestRow
from harness.store.manifest import ClockCheck
from harness.store.parquet import schema_of
from harness.store.run_folder import RECORDS, OtherVersionError, RunFolder, RunRows, open_run
from tests.made_up.rows import lifecycle_event, made_up_manifest, request_row, step_row

LARGE_NS = 2**53 + 1  # a float would lose its last digit


def a_request(name: str, outcome: Outcome = Outcome.ABANDONED, **more: Any) -> RequestRow:
    return request_row(
        name,
        sent_ns=LARGE_NS + 1,
        ended_ns=LARGE_NS + 9,
        outcome=outcome,
        token_times_ns=[LARGE_NS + 2, LARGE_NS + 3],
        **{"planned_abandon": 4, "abandoned_ns": None, **more},
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(made_up_manifest(seed=1))
    return folder


def test_an_empty_run_has_every_column(folder: RunFolder) -> None:
    folder.write_rows(RunRows())
    frames = folder.frames()
    for name, record in RECORDS.items():
        frame = getattr(frames, name)
        assert frame.empty
        assert list(frame.columns) == schema_of(record).names
    assert "request_ids" in frames.steps.columns
    assert "scheduled" not in frames.steps.columns


def test_rows_come_back_as_they_were(folder: RunFolder) -> None:
    left = a_request("r1", abandoned_ns=LARGE_NS + 5)
    stayed = a_request("r2", Outcome.COMPLETED, planned_abandon=None)
    folder.write_rows(
        RunRows(
            requests=[left, stayed],
            lifecycle=[lifecycle_event(1, 5, "arrived", "r1")],
            steps=[step_row(1, 10, 20, {"a": 32, "b": 1}, sampled={"b": 1})],
            server_metrics=[MetricSample(t_ns=1, duration_ns=2, name="m", labels="{}", value=3.5)],
            cpu=[CpuSample(t_ns=1, process="machine", cores=0.5, rss_bytes=7)],
            gpu=[GpuSample(t_ns=1, gpu=0, utilisation=0.25, memory_bytes=9, power_w=None)],
            client=[ClientSample(t_ns=1, pid=2, lag_ns=3, cpu_s=0.1, streams=4)],
        )
    )
    frames = folder.frames()
    requests = frames.requests
    assert list(requests["request_id"]) == ["r1", "r2"]
    assert list(requests["outcome"]) == ["abandoned", "completed"]
    assert requests["sent_ns"].dtype == np.int64
    assert requests["abandoned_ns"].dtype == pd.Int64Dtype()
    assert int(requests["abandoned_ns"][0]) == LARGE_NS + 5
    assert requests["abandoned_ns"][1] is pd.NA
    assert list(requests["token_times_ns"][0]) == [LARGE_NS + 2, LARGE_NS + 3]
    assert "token_times_ns" not in folder.frames(with_tokens=False).requests.columns
    step = frames.steps.iloc[0]
    assert list(step["request_ids"]) == ["cmpl-a", "cmpl-b"]
    assert list(step["scheduled_tokens"]) == [32, 1]
    assert list(step["sampled_tokens"]) == [0, 1]
    assert frames.lifecycle["event"][0] == "arrived"
    assert frames.lifecycle["step"][0] is pd.NA
    assert frames.server_metrics["value"][0] == 3.5
    assert frames.cpu["cores"][0] == 0.5
    assert pd.isna(frames.gpu["power_w"][0])
    assert frames.client["lag_ns"][0] == 3


def test_rows_come_one_by_one_and_are_written_in_parts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.store.parquet.ROWS_AT_ONCE", 3)
    names = [f"r{number}" for number in range(8)]
    folder.write_rows(RunRows(requests=(a_request(name) for name in names)))
    assert list(folder.frames().requests["request_id"]) == names
    file = pq.ParquetFile(folder.path / "requests.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [3, 3, 2]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"requests\.parquet: cannot be read"):
        RunFolder(tmp_path).frames()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"is not empty; name a new folder with --out"):
        RunFolder.create(tmp_path)
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder.create(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "kept"


def test_the_manifest_is_replaced_whole(folder: RunFolder) -> None:
    folder.write_manifest(made_up_manifest(clock=ClockCheck(comparable=True, round_trip_ns=5)))
    written = json.loads((folder.path / "manifest.json").read_text())
    assert written["clock"] == {"name": "CLOCK_MONOTONIC", "comparable": True, "round_trip_ns": 5}
    assert written["idle"] == {"before": {}, "after": {}, "later": {}, "loops": []}
    assert not list(folder.path.glob("*.part"))


def test_a_run_before_the_first_release_is_refused(folder: RunFolder) -> None:
    folder.write_manifest(made_up_manifest())
    content = folder.read_manifest()
    del content["kills"]
    (folder.path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(OtherVersionError, match=r"manifest.json: was written before version 0.1.0"):
        folder.load_manifest()


def test_a_column_that_is_newer_than_the_run_holds_its_default(folder: RunFolder) -> None:
    folder.write_rows(RunRows(requests=[a_request("r", Outcome.COMPLETED)]))
    table = folder.path / "requests.parquet"
    pq.write_table(pq.read_table(table).drop_columns(["frontend", "unread"]), table)
    row = folder.frame("requests").iloc[0]
    assert (row["frontend"], row["unread"]) == (0, None)


def test_a_run_is_written_into_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, why in (
        (tmp_path / "file", "is a file; name a new folder"),
        (tmp_path / "file" / "below", "cannot be made: Not a directory"),
        (tmp_path, "is not empty"),
        (tmp_path / "-", "is no name for a folder"),
    ):
        with pytest.raises(ConfigError, match=why):
            RunFolder.claim(place)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


class Locked(PosixPath):
    """In a folder that this user may not look into."""

    def iterdir(self) -> Generator[Self, None, None]:
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_folder_that_may_not_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}: cannot be read: Permission denied$"):
        open_run(Locked(tmp_path))
