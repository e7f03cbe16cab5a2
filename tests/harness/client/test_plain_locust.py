"""Plain Locust, without `walkaway run`: the same users by its own options."""

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from harness.client.shards import ShardReader
from harness.records import Outcome, RequestRow
from harness.run.collection import collect
from harness.run.load_process import together
from harness.run.process import free_port
from tests.harness.client.asking import engine
from tests.harness.client.conftest import Exchange, Secrets, Serve
from tests.harness.client.load_process import master_on, run_locust, worker_on

pytestmark = pytest.mark.e2e

HEADLESS = ("--headless", "--only-summary")


def ended(process: subprocess.Popen[str], *, code: int = 0) -> str:
    """Its standard error; it must end with this code."""
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("processes", "users"), [(1, {0, 1}), (2, {0, 1_000_000})], ids=["alone", "master and workers"]
)
def test_plain_locust_makes_a_plan_of_its_options(
    serve: Serve, tmp_path: Path, processes: int, users: set[int]
) -> None:
    """The server answers no user before both have asked."""
    both = threading.Barrier(2)

    def script(x: Exchange) -> None:
        if both.n_waiting or not is_begun.is_set():
            both.wait(30)
            is_begun.set()
        engine(x)

    is_begun = threading.Event()
    process = run_locust(
        *(*HEADLESS, "-u", "2", "-r", "2", "-t", "60", "--host", serve(script).url),
        *("--walkaway-tokens", "2", "--walkaway-stay-share", "0", "--walkaway-stop-after", "9"),
        *("--walkaway-rows", str(tmp_path / "rows")),
        *(together(processes) if processes > 1 else ()),
    )
    ended(process)
    rows = ShardReader(tmp_path / "rows", RequestRow).read_new()
    assert {row.user for row in rows} == users
    assert {row.outcome for row in rows} - {Outcome.CUT_OFF} == {Outcome.ABANDONED}
    assert {row.planned_abandon for row in rows} == {2}


def test_without_a_host_no_load_is_sent() -> None:
    err = ended(run_locust(*HEADLESS, "-t", "1"), code=2)
    assert "walkaway: no server is named" in err


def test_a_page_on_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        err = ended(run_locust("--web-host", "127.0.0.1", "--web-port", port), code=2)
    last = err.splitlines()[-1]
    assert last.startswith(f"walkaway: --web-port {port}: process {os.getpid()} (")
    assert last.endswith("listens there already; end it, or name another port")


def test_failed_requests_end_a_master_with_1_as_locust_does() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    process = run_locust(
        *(*HEADLESS, "-u", "2", "-r", "2", "-t", "2", "--host", nobody), *together(2)
    )
    assert "connection refused" in ended(process, code=1)


@pytest.mark.slow
def test_it_reaches_a_server_behind_tls_and_a_key(
    serve: Serve, secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY_OF_TESTS", "sk-1")
    server = serve(engine, tls=secrets.server)
    process = run_locust(
        *(*HEADLESS, "-u", "1", "-t", "60", "--host", server.url, "--walkaway-stop-after", "1"),
        *("--walkaway-tokens", "2", "--walkaway-rows", str(tmp_path)),
        *("--walkaway-stay-share", "0"),
        *("--walkaway-ca-file", secrets.ca_file, "--walkaway-api-key-env", "A_KEY_OF_TESTS"),
        *("--walkaway-header", "X-Tenant=a=b", "--walkaway-header", "X-More=1"),
    )
    ended(process)
    rows = ShardReader(tmp_path, RequestRow).read_new()
    assert {row.error for row in rows} == {None}
    sent = server.exchanges[rows[0].request_id].headers
    assert (sent["authorization"], sent["x-tenant"], sent["x-more"]) == ("Bearer sk-1", "a=b", "1")


@pytest.mark.slow
def test_workers_in_several_folders_give_together_what_clients_saw(
    serve: Serve, tmp_path: Path
) -> None:
    server, port = serve(engine), free_port()
    ours = ("--host", server.url, "--walkaway-tokens", "2", "--walkaway-stay-tokens", "4")
    folders = [tmp_path / "here", tmp_path / "there"]
    workers = [
        run_locust(*worker_on(port), *ours, "--walkaway-rows", str(folder)) for folder in folders
    ]
    master = run_locust(
        *(*master_on(port, workers=2), *HEADLESS, *ours),
        *("--users", "4", "--spawn-rate", "4", "--run-time", "2"),
        *("--walkaway-rows", str(tmp_path / "master")),
    )
    for process in (master, *workers):
        ended(process)
    of_each = [ShardReader(folder, RequestRow).read_new() for folder in folders]
    assert all(of_each)
    alone = collect([folders[0], tmp_path / "master"], tmp_path / "alone", command=[])
    assert len(alone.read_manifest()["absent_workers"]) == 1
    folder = collect([*folders, tmp_path / "master"], tmp_path / "run", command=[])
    assert folder.read_manifest()["absent_workers"] == []
    assert len(folder.frames().requests) == sum(map(len, of_each))


@pytest.mark.slow
def test_a_master_whose_workers_sent_nothing_fails(serve: Serve) -> None:
    """The worker has no run time, and so nothing of a schedule that is as long as that."""
    server, port = serve(engine), free_port()
    ours = ("--host", server.url, "--walkaway-arrivals", "constant", "--walkaway-rate", "10")
    worker = run_locust(*worker_on(port), *ours)
    master = run_locust(*master_on(port, workers=1), *HEADLESS, *ours, "--run-time", "1")
    err = ended(master, code=5)
    _, of_worker = worker.communicate(timeout=60)
    assert "need an end: give --run-time" in of_worker
    assert "the load made no request: check that each worker has" in err
    assert not server.exchanges
