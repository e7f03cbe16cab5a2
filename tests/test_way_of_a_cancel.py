"""The table "one cancel" of docs/code.md: every function that it names takes part, leg by leg.

Each leg runs the real code with a made-up other side, and notes which functions were called.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from dashboards.sections.cancel import latency
from harness.analysis.summary import summarise
from harness.collect.lifecycle import LogFollower
from harness.collect.source import Notes
from harness.export.library import load_run
from harness.metrics import CANCEL_LATENCY
from harness.records import LifecycleEvent, Way
from reference_engine.faults import Faults
from tests.harness.client.asking import SPEC, Client, two_tokens
from tests.harness.client.conftest import ScriptedServer
from tests.harness.documents import ROOT
from tests.reference_engine.fake_worker import AsgiClient, FakeWorker, respond
from tests.reference_engine.serve.test_detection import FakeTransport
from tests.reference_engine.stepped_engine import Bench, abort, add

_ROW = re.compile(r"^\| [a-z ]+ \| \[[\w/.]+\]\(\.\./([\w/.]+)\) `([\w.]+)` \|", re.MULTILINE)
WAY = _ROW.findall((ROOT / "docs" / "code.md").read_text())
Called = set[tuple[str, str]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextmanager
def noted() -> Iterator[Called]:
    """The functions of ours that are called meanwhile, by file and name."""
    called: Called = set()
    root = f"{ROOT}/"

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            called.add((code.co_filename.removeprefix(root), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def leg(*rooms: str) -> Called:
    """The rows of the table whose file lies in these rooms."""
    return {row for row in WAY if row[0].startswith(rooms)}


def test_the_table_is_read() -> None:
    assert len(WAY) == 14
    assert {Path(file).parts[0] for file, _ in WAY} == {"harness", "reference_engine", "dashboards"}


def test_the_client_leaves() -> None:
    rule = replace(SPEC, planned_abandon=2, pause=0).leave_rule
    with (
        closing(ScriptedServer(two_tokens, host="127.0.0.1", tls=None)) as server,
        noted() as called,
    ):
        client = Client(server.url)
        client.ask(rule("none", client.client.step), Way.FIN)
        client.client.close()
    assert leg("harness/workload", "harness/client") - called == set()


@pytest.mark.anyio
async def test_the_server_sees_it_and_tells_the_worker() -> None:
    worker, transport = FakeWorker(), FakeTransport()
    client = AsgiClient(respond(worker), extensions=transport.extensions)
    with noted() as called:
        await worker.arrived.wait()
        transport.end()
        await worker.aborted.wait()
    await client.finished()
    assert leg("reference_engine/serve", "reference_engine/context") - called == set()


def test_the_worker_frees_the_request() -> None:
    bench = Bench(Faults())
    bench.step(add("a"))
    with noted() as called:
        bench.step(abort("a"))
    assert leg("reference_engine/worker", "reference_engine/core") - called == set()
    assert ("reference_engine/core/scheduler.py", "Scheduler.free") in called


def test_the_harness_reads_it_subtracts_and_draws(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "tests/golden/runs/clean", tmp_path / "clean")
    shutil.copy(ROOT / "tests/golden/expected/clean/summary.json", folder)
    page = httpx.MockTransport(lambda _: httpx.Response(200, headers=_EMPTY_LOG))
    with noted() as called, httpx.Client(transport=page) as client:
        LogFollower(
            client, "http://engine/log", LifecycleEvent, Notes(), keep=lambda _: None
        ).catch_up()
        run = load_run(folder)
        summarise(run.frames)
        latency(run)
    assert leg("harness/collect", "harness/analysis", "dashboards") - called == set()
    assert run.metrics[CANCEL_LATENCY].n > 0


_EMPTY_LOG: dict[str, Any] = {
    "x-walkaway-next-after": "0",
    "x-walkaway-dropped": "0",
    "x-walkaway-last": "0",
}
