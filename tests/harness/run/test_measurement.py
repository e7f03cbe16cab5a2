"""What a measurement says of the server that it was taken on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from harness.run.measurement import Measurement
from harness.run.pipeline import begin_manifest
from harness.run.progress import Interruption, QuietProgress
from harness.run.run_config import RunConfig, resolve_run
from harness.store.run_folder import RunFolder

if TYPE_CHECKING:
    from tests.conftest import Serve
import errno
import os

import pytest

from harness.errors import TargetError
from harness.run.pipeline import execute, why_not_saved

PAGES = {
    "/v1/models": b'{"data": [{"id": "m"}]}',
    "/metrics": b"vllm:num_requests_running 0\nvllm:generation_tokens_total 5\n",
}


class NoPauses(Interruption):
    """Nothing here needs time to pass."""

    def pause(self, seconds: float) -> None:
        """At once."""


class NoLoad:
    """Sends nothing."""

    def prepare(self, *_: object, **__: object) -> None:
        """Needs no time."""

    def run(self, *_: object, **__: object) -> None:
        """Over at once."""


def page(path: str) -> tuple[int, dict[str, str], bytes]:
    return (200, {}, PAGES[path]) if path in PAGES else (404, {}, b"")


def test_metrics_that_are_missing_are_named_also_where_nothing_was_scraped(
    serve: Serve, tmp_path: Path
) -> None:
    settings = ["collect.scrape=false", "settle.seconds=0"]
    order = RunConfig(workload="demo", settings=settings, engine="vllm", target_url=serve(page))
    resolved = resolve_run(order)
    manifest = begin_manifest(resolved, run_id="r")
    measurement = Measurement(
        resolved,
        RunFolder.create(tmp_path / "r"),
        manifest,
        QuietProgress(),
        NoPauses(),
        load=NoLoad(),
    )
    with ExitStack() as children:
        measurement.take(children, when_loaded=lambda: None)
    measurement.rows()
    assert manifest.idle.after == {"running": 0.0, "generated_tokens": 5.0}
    (note,) = [text for text in measurement.notes.texts() if "shows no metric" in text]
    assert "vllm:num_requests_waiting (waiting)" in note
    assert "vllm:num_requests_running" not in note


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
