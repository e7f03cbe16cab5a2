"""The command line on real processes: exit codes, messages, files and processes left behind."""

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from harness.analysis.summary import summarise
from harness.store.run_folder import RunFolder
from tests.e2e.running import Run, wait_until, wait_until_gone

# The simulated engine with short steps and few abandons: a run takes seconds.
QUICK = ("--set", "engine.runner=simulated", "--set", "engine.sim_fixed_ms=2")
SMALL = (
    *QUICK,
    *("--set", "load.stop_after_abandons=20", "--set", "load.abandon_after_tokens=[0,1,4]"),
)


TEMPLATE = Path("harness/workload_template.toml")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`walkaway` in a folder of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, *arguments)
    try:
        stdout, stderr = process.communicate(timeout=100)
        return process.returncode, stdout, stderr
    finally:
        process.kill()


@pytest.mark.e2e
def test_the_demo_is_a_whole_run_with_probes_after_its_load(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, stdout, stderr = run(tmp_path, "demo", *SMALL, "--out", str(out))
    assert code == 0, stderr
    assert "cancel_latency_s" in stdout
    assert f"report: {out / 'report.html'}" in stdout
    assert "walkaway: starting the reference engine (simulated runner)" in stderr
    assert (out / "report.html").stat().st_size > 1000
    folder = RunFolder(out)
    manifest, frames = folder.read_manifest(), folder.frames()
    assert manifest["status"] == "complete"
    assert manifest["repeat"].startswith("walkaway demo --set ")
    assert str(out) not in manifest["repeat"]
    assert manifest["clock"]["comparable"] is True
    assert manifest["target"]["started_by_us"] is True
    assert manifest["window"]["settled_ns"] > manifest["window"]["load_ended_ns"]
    assert manifest["idle"]["before"]["running"] == manifest["idle"]["after"]["running"] == 0
    assert (frames.requests["outcome"] == "abandoned").sum() >= 20
    assert {"arrived", "blocks_freed"} <= set(frames.lifecycle["event"])
    assert not frames.steps.empty
    assert "vllm:num_requests_running" in set(frames.server_metrics["name"])
    assert {"machine", "frontend", "worker"} <= set(frames.cpu["process"])
    assert not frames.client.empty
    assert not (out / "shards").exists()
    wait_until_gone(Run(out).pids())
    check_probe_phase(out)


def check_probe_phase(out: Path) -> None:
    """The probes give slot recovery and no other figure, also when the run is judged again."""
    before, frames = (out / "summary.json").read_bytes(), RunFolder(out).frames()
    summary = json.loads(before)
    assert frames.probe_phase is not None
    assert len(frames.requests) == sum(summary["outcomes"].values())
    assert not set(frames.requests["request_id"]) & set(frames.probe_phase["request_id"])
    last_ns = RunFolder(out).read_manifest()["window"]["settled_ns"]
    assert frames.probe_phase["sent_ns"].min() > last_ns > frames.lifecycle["t_ns"].max()
    alone = json.loads(msgspec.json.encode(summarise(replace(frames, probe_phase=None)).metrics))
    more = {"slot_recovery_s", "probe_ttft_unloaded_s", "probe_ttft_control_s"}
    assert summary["metrics"].keys() - alone.keys() == more
    assert {name: summary["metrics"][name] for name in alone} == alone
    (out / "summary.json").unlink()
    (out / "report.html").unlink()
    code, _, stderr = run(out.parent, "report", str(out))
    assert code == 0, stderr
    assert (out / "summary.json").read_bytes() == before
    assert (out / "report.html").exists()


@pytest.mark.e2e
def test_json_is_all_that_stands_on_standard_output(tmp_path: Path) -> None:
    flags = ("--json", "--quiet", "--no-scrape")
    code, stdout, stderr = run(tmp_path, "run", "cancel_steps", *SMALL, *flags)
    assert code == 0, stderr
    assert stderr == ""
    summary = json.loads(stdout)
    (out,) = (tmp_path / "results").iterdir()
    assert summary == json.loads((out / "summary.json").read_text())
    assert RunFolder(out).read_manifest()["scrape_interval_s"] is None
    assert RunFolder(out).frames().server_metrics.empty
    # Outside the load the page is still read: a control arm has exact counts too.
    assert summary["metrics"]["wasted_tokens"]["others"]["counter"]["method"] == "counter"
    assert summary["metrics"]["leaked_slots"]["mean"] == 0


@pytest.mark.e2e
@pytest.mark.slow
def test_a_second_interruption_does_without_the_report(tmp_path: Path) -> None:
    out = tmp_path / "run"
    endless = ("--set", "load.stop_after_abandons=1000000")
    process = start(tmp_path, "run", "cancel_steps", *QUICK, *endless, "--out", str(out))
    try:
        wait_until(
            lambda: any(one.stat().st_size for one in out.glob("shards/requests-*")), "it loads"
        )
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("drawing the report" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read()  # not communicate(): the reader may hold some of it already
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()
    assert stderr == f"error: interrupted; what was saved is in {out}\n"
    assert not RunFolder(out).frames().requests.empty
    assert not (out / "report.html").exists()


@pytest.mark.e2e
def test_too_few_file_handles_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    command = 'ulimit -n 64 && exec "$0" -m harness run demo --set run.users=40 --out run'
    shell = ["sh", "-c", command, sys.executable]
    ended = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: 40 streams at once need about 140 open files")
    assert not (tmp_path / "run").exists()


@pytest.mark.e2e
def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "run"
    target = ("--target", "http://127.0.0.1:1")
    code, stdout, stderr = run(tmp_path, "run", "demo", *target, "--out", str(out))
    assert (code, stdout) == (5, "")
    assert "error: cannot reach http://127.0.0.1:1" in stderr
    assert "Traceback" not in stderr
    assert not out.exists(), "the same command can be typed again"


@pytest.mark.e2e
def test_a_setting_that_the_engine_refuses_is_one_line(tmp_path: Path) -> None:
    settings = ("--set", "engine.num_blocks=3", "--set", "engine.runner=simulated")
    code, _, stderr = run(tmp_path, "run", "demo", "--quiet", *settings)
    assert code == 2
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    assert "num_blocks x block_size (3 x 16) must hold one request" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
def test_wrong_usage_leaves_nothing_behind(tmp_path: Path) -> None:
    code, stdout, stderr = run(tmp_path, "run", "dmeo")
    assert (code, stdout) == (2, "")
    assert "unknown workload `dmeo`" in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


INTERRUPTED_WHILE_LOADING = """
import builtins, os, signal, sys
import harness.cli
load = builtins.__import__
def interrupted(name, *rest):
    if name == "harness.commands.index":
        os.kill(os.getpid(), signal.SIGINT)
    return load(name, *rest)
builtins.__import__ = interrupted
sys.argv = ["walkaway", "workloads"]
harness.cli.main()
"""


def test_an_interruption_while_libraries_are_loaded_is_a_message() -> None:
    command = [sys.executable, "-c", INTERRUPTED_WHILE_LOADING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["init mine.toml --force", "init -", "run dmeo"])
def test_a_closed_stream_is_as_a_null_device(tmp_path: Path, closed: str, command: str) -> None:
    """What is printed goes into no file that the command opens."""
    shell = ["sh", "-c", f'exec "$0" -m harness {command} {closed}', sys.executable]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == (2 if command == "run dmeo" else 0)
    assert b"Traceback" not in done.stderr
    if ">" not in closed.replace("2>", ""):
        assert (done.stdout != b"") == (command != "run dmeo")
    mine = tmp_path / "mine.toml"
    assert not mine.exists() or mine.read_text() == TEMPLATE.read_text()


@pytest.mark.slow
@pytest.mark.e2e
def test_a_metrics_page_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1/metrics"
    out = tmp_path / "run"
    arguments = ("--header", "X-Key=secret", "--metrics-url", url, "--json", "--out", str(out))
    code, stdout, stderr = run(tmp_path, "run", "cancel_steps", *SMALL, *arguments)
    assert code == 0, stderr
    warnings = [said["text"] for said in json.loads(stdout)["validity"] if said["level"] != "info"]
    assert f"metrics at {url} could not be read (no connection)" in warnings
    assert stat.S_IMODE((out / "load_plan.json").stat().st_mode) == 0o600
    for file in out.iterdir():
        assert b"secret" not in file.read_bytes(), file


@pytest.mark.parametrize(
    ("arguments", "is_heard"),
    [(("targets", "--json"), True), (("init", "-"), True), (("targets",), False)],
)
def test_an_output_without_a_reader_is_a_failure_in_one_line(
    arguments: tuple[str, ...], *, is_heard: bool
) -> None:
    """As `| head -1` leaves it; with standard error closed, too, nothing can be said."""
    reading, writing = os.pipe()
    os.close(reading)
    errors = subprocess.PIPE if is_heard else writing
    command = [sys.executable, "-m", "harness", *arguments]
    ended = subprocess.run(command, stdout=writing, stderr=errors, check=False)
    os.close(writing)
    assert ended.returncode == 5
    if is_heard:
        said = b"error: standard output was closed before all was written to it\n"
        assert ended.stderr == said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("targets", "--json"), ("targets",), ("init", "-")])
def test_an_output_on_a_full_disk_is_a_failure_in_one_line(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "harness", *arguments]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 5
    why = b"standard output cannot be written: No space left on device; make room"
    assert ended.stderr == b"error: %s\n" % why


@pytest.mark.parametrize("where", ["--out", "folder"])
def test_a_name_that_is_no_text_is_refused_in_one_line(tmp_path: Path, where: str) -> None:
    name = os.fsdecode(b"\xff\xfe")
    folder, out = tmp_path, name
    if where == "folder":
        (folder := tmp_path / name).mkdir()
        out = "run"
    code, _, stderr = run(folder, "run", "demo", "--quiet", "--out", out)
    assert code == 2
    assert r"\xff\xfe" in stderr
    assert stderr.endswith("this name holds bytes that are not text in UTF-8; take another name\n")
    assert not list(folder.iterdir())
