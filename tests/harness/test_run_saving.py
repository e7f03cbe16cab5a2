"""A run that cannot be saved is no bug: it is said, with what to do."""

import errno
import os
from pathlib import Path

import pytest

from harness.errors import TargetError
from harness.run.pipeline import execute, why_not_saved
from harness.run.progress import Interruption, QuietProgress
from harness.run.run_config import RunConfig, resolve_run
from harness.store.run_folder import RunFolder


class FullDisk(QuietProgress):
    """Whatever comes next fails for want of room."""

    def phase(self, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_room(tmp_path: Path) -> None:
    order = RunConfig(workload="demo", target_url="http://127.0.0.1:1", out=tmp_path / "run")
    with pytest.raises(TargetError, match=r"could not be saved: No space left.*make room.*/run$"):
        execute(resolve_run(order), progress=FullDisk(), interruption=Interruption())
    assert (tmp_path / "run" / "manifest.json").exists()


def test_rows_of_the_load_that_are_on_the_disk_are_not_lost(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    (folder.shards / "process-here-7.ndjson").touch()
    words = why_not_saved(errno.ENOSPC, folder)
    assert "No space left" in words
    assert f"`walkaway collect {folder.shards} --out " in words
