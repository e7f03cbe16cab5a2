"""The disk is full at one step of a run after the other: the run ends with the true reason, and
keeps its rows.

A limit on the size of files stands for the disk: a write beyond it fails like one on a full disk.
"""

import os
import platform
import resource
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from harness.client.shards import ShardWriter
from harness.errors import StorageError, TargetError
from harness.records import ClientSample, Outcome, ProcessMark, RequestRow, Summary
from harness.run.measurement import Measurement
from harness.run.pipeline import FinishedRun, execute
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.rounds import complete_summary
from harness.run.run_config import RunConfig, resolve_run
from harness.store.run_folder import RunFolder
from harness.workload.plan import LoadPlan
from tests.conftest import ServePages
from tests.made_up.rows import request_row

PAGES = {
    "/v1/models": b'{"data": [{"id": "m"}]}',
    "/metrics": b"vllm:num_requests_running 0\nvllm:generation_tokens_total 5\n",
}
ROWS = 40
FULL = os.strerror(27)  # EFBIG
PID = 7


@contextmanager
def no_larger_files(size: int, pid: int = 0) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        if pid == 0:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


class Disk(Progress):
    """Fills when a phase begins, or when the line that repeats the run is asked for again."""

    def __init__(self, moment: str, room: int) -> None:
        self.moment, self.room = moment, room
        self.limits = ExitStack()
        self._asked = 0

    def phase(self, text: str) -> None:
        if text.startswith(self.moment):
            self._fill()

    def repeat(self) -> str:
        self._asked += 1
        self.phase(f"repeat {self._asked}")
        return shlex.join(["walkaway", "run", "demo"])

    def _fill(self) -> None:
        self.limits.enter_context(no_larger_files(self.room))
        for child in psutil.Process().children():
            self.limits.enter_context(no_larger_files(self.room, child.pid))


class WritesRows:
    """A load that keeps its rows as a load process does."""

    def prepare(self, *_: object, **__: object) -> None:
        """Needs no time."""

    def run(self, plan: LoadPlan, run: Measurement, **_: object) -> None:
        shards, now_ns = run.folder.shards, run.clock_ns
        at = {
            "host": platform.node(),
            "pid": PID,
            "worker": 0,
            "clock": "c",
            "url": plan.url,
            "model": "m",
        }
        with (
            ShardWriter(shards, ProcessMark, PID) as marks,
            ShardWriter(shards, RequestRow, PID) as rows,
            ShardWriter(shards, ClientSample, PID) as samples,
        ):
            stamp = {"t_ns": now_ns(), "at": "2026-11-21T10:00:00+00:00"}
            marks.write(ProcessMark(event="began", **stamp, **at))  # type: ignore[arg-type]
            samples.write(ClientSample(t_ns=now_ns(), pid=PID, lag_ns=1, cpu_s=0.1, streams=1))
            for number in range(ROWS):
                sent_ns = now_ns()
                more = {"planned_abandon": 1, "token_times_ns": [now_ns()], "plan": "tokens:1"}
                outcome = Outcome.ABANDONED
                row = request_row(
                    f"r{number}", sent_ns=sent_ns, ended_ns=now_ns(), outcome=outcome, **more
                )
                rows.write(row)
            marks.write(ProcessMark(event="ended", **stamp, **at))  # type: ignore[arg-type]


def run_on(disk: Disk, folder: Path, url: str) -> FinishedRun:
    config = RunConfig(
        workload="demo",
        settings=["settle.seconds=0"],
        target_url=url,
        engine="vllm",
        out=folder,
        command=["walkaway", "run", "demo"],
    )
    with disk.limits:
        return execute(
            resolve_run(config),
            progress=disk,
            interruption=Interruption(),
            load=WritesRows(),
            repeat=disk.repeat,
        )


@pytest.mark.parametrize(
    ("moment", "room", "has_rows"),
    [
        ("repeat 1", 0, False),  # the first manifest
        ("connecting", 0, False),
        ("load", 0, False),  # the load's plan, and all of its rows
        ("letting the server settle", 0, True),
        ("checking that the server", 0, True),
        ("writing what was collected", 0, True),  # the first table
        ("writing what was collected", 4000, True),  # a later one, or the manifest
        ("repeat 2", 0, True),  # the last manifest
        ("repeat 2", 6000, True),  # the summary
    ],
)
def test_a_full_disk_ends_the_run_with_its_reason_and_keeps_its_rows(
    serve_pages: ServePages, tmp_path: Path, moment: str, room: int, *, has_rows: bool
) -> None:
    url = serve_pages(lambda path: (200 if path in PAGES else 404, {}, PAGES.get(path, b"")))
    with pytest.raises(StorageError) as caught:
        run_on(Disk(moment, room), tmp_path / "run", url)
    assert str(caught.value).startswith(f"the run could not be saved: {FULL}; make room. All that")
    assert StorageError.exit_code == 5
    folder = RunFolder(tmp_path / "run")
    assert not (folder.path / "traceback.txt").exists()
    assert not (folder.path / "summary.json").exists()
    if not has_rows:
        return
    complete_summary(folder)  # there is room again
    summary = folder.read_summary()
    assert isinstance(summary, Summary)
    assert summary.outcomes["abandoned"] == ROWS


def test_a_report_that_has_no_room_is_a_failure_of_a_whole_run(
    serve_pages: ServePages, tmp_path: Path
) -> None:
    url = serve_pages(lambda path: (200 if path in PAGES else 404, {}, PAGES.get(path, b"")))
    finished = run_on(Disk("drawing the report", 10_000), tmp_path / "run", url)
    assert isinstance(finished.failure, TargetError)
    said = str(finished.failure)
    assert f"report.html: cannot be written: {FULL}; make room; the run is whole" in said
    assert f"walkaway report {tmp_path / 'run'} draws it again" in said
    assert isinstance(finished.summary, Summary)
    assert finished.summary.status == "complete"
    assert finished.report is None
