"""A measurement without a load, and a run that cannot be saved."""

import errno
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.errors import PlanError, TargetError
from harness.records import Outcome, Summary
from harness.run.pipeline import conclude, discard_if_empty, execute, why_not_saved
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.run_config import RunConfig, resolve_run
from harness.store.manifest import Window
from harness.store.run_folder import RunFolder, RunRows
from tests.conftest import ServePages
from tests.harness.run.conftest import Begin, NoLoad
from tests.made_up.rows import at, made_up_manifest, request_row

PAGES = {
    "/v1/models": b'{"data": [{"id": "m"}]}',
    "/metrics": b"vllm:num_requests_running 0\nvllm:generation_tokens_total 5\n",
}


def test_missing_metrics_are_named_also_if_nothing_was_scraped(
    serve_pages: ServePages, begin: Begin
) -> None:
    url = serve_pages(lambda path: (200 if path in PAGES else 404, {}, PAGES.get(path, b"")))
    settings = ["collect.scrape=false", "settle.seconds=0"]
    run = begin(settings=settings, engine="vllm", target_url=url)
    with ExitStack() as children:
        run.take(children, when_loaded=lambda: None)
    run.rows()
    assert run.manifest.idle.after == {"running": 0.0, "generated_tokens": 5.0}
    (note,) = [text for text in run.notes.texts() if "shows no metric" in text]
    assert "vllm:num_requests_waiting (waiting)" in note
    assert "vllm:num_requests_running" not in note


def test_all_of_a_run_goes_to_the_address_that_its_first_request_reached(
    serve_pages: ServePages, begin: Begin
) -> None:
    url = serve_pages(lambda path: (200 if path in PAGES else 404, {}, PAGES.get(path, b"")))
    named = url.replace("127.0.0.1", "localhost")
    run = begin(settings=["settle.seconds=0"], engine="vllm", target_url=named)
    assert run.resolved.place is not None
    run.resolved.place.addresses = ["127.0.0.9", "127.0.0.1"]  # nobody is at the first
    with ExitStack() as children:
        run.take(children, when_loaded=lambda: None)
    assert isinstance(run.load, NoLoad)
    (plan,) = run.load.plans
    assert (plan.url, plan.address) == (named, "127.0.0.1")
    assert run.manifest.target is not None
    assert (run.manifest.target.url, run.manifest.target.address) == (named, "127.0.0.1")
    run.check_server()
    run.resolved.place.address = "127.0.0.9"
    with pytest.raises(TargetError, match=r"is gone: no server listens at localhost"):
        run.check_server()


class FullDisk(Progress):
    def phase(self, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_run_with_a_message(tmp_path: Path) -> None:
    config = RunConfig(workload="demo", target_url="http://127.0.0.1:1", out=tmp_path / "run")
    with pytest.raises(TargetError, match=r"could not be saved: No space left.*make room.*/run$"):
        execute(resolve_run(config), progress=FullDisk(), interruption=Interruption())
    kept = RunFolder(tmp_path / "run").read_manifest()
    assert kept["status"] == "interrupted", "it does not look complete"
    folder = RunFolder(tmp_path / "run")
    folder.shards.mkdir(exist_ok=True)
    (folder.shards / "process-here-7.ndjson").touch()
    assert f"`walkaway collect {folder.shards} --out " in why_not_saved(errno.ENOSPC, folder)


class Phases(Progress):
    def __init__(self) -> None:
        self.told: list[str] = []

    def phase(self, text: str) -> None:
        self.told.append(text)


def test_a_run_that_reaches_nobody_keeps_nothing_and_claims_nothing(tmp_path: Path) -> None:
    config = RunConfig(
        workload="demo", target_url="http://127.0.0.1:1", engine="vllm", out=tmp_path / "run"
    )
    progress = Phases()
    with pytest.raises(TargetError, match="no server listens at"):
        execute(resolve_run(config), progress=progress, interruption=Interruption())
    assert progress.told == ["connecting to http://127.0.0.1:1"]
    assert not (tmp_path / "run").exists()


def test_only_a_run_without_a_load_is_discarded(tmp_path: Path) -> None:
    for started_ns in (None, 7):
        folder = RunFolder.create(tmp_path / f"run-{started_ns}")
        manifest = made_up_manifest(window=Window(load_started_ns=started_ns))
        assert discard_if_empty(folder, manifest) == (started_ns is None)
        assert folder.path.exists() == (started_ns is not None)


@pytest.mark.parametrize("tokens_planned", [None, 5])
def test_a_run_that_nobody_could_leave_is_whole_and_a_failure(
    begin: Begin, tokens_planned: int | None
) -> None:
    run = begin()
    row = request_row(
        "a",
        sent_ns=at(0),
        ended_ns=at(90),
        outcome=Outcome.COMPLETED,
        token_times_ns=[at(50)],
        completion_tokens=9,
        planned_abandon=tokens_planned,
    )
    run.folder.write_rows(RunRows(requests=[row]))
    run.manifest.window = Window(load_started_ns=at(0), load_ended_ns=at(90))
    finished = conclude(run, None, None)
    assert isinstance(finished.summary, Summary)
    is_failure = tokens_planned is not None
    assert isinstance(finished.failure, PlanError) == is_failure
    assert (finished.summary.plan_failed is not None) == is_failure
    assert str(finished.failure) == str(finished.summary.plan_failed)
    assert finished.summary.status == "complete"
    assert PlanError.exit_code == 5
