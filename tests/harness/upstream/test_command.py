"""`walkaway upstream` as a process: its ready line, its log, its end, and wrong usage."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.index import app
from harness.errors import ConfigError
from harness.upstream.orders import Order
from tests.harness.upstream.behind import Caller


@contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process, and its port."""
    command = [sys.executable, "-m", "harness", "upstream", *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            ready = next(one for one in map(json.loads, process.stdout) if one["event"] == "ready")
            assert ready["pid"] == process.pid
            yield process, int(ready["url"].rpartition(":")[2])
        finally:
            process.kill()


@pytest.mark.e2e
def test_an_interrupt_ends_it_with_what_it_saw(tmp_path: Path) -> None:
    log = tmp_path / "new" / "log.jsonl"
    with started("--log", str(log), "--step-ms", "1") as (process, port):
        whole = Caller(port, Order(id="whole", tokens=2))
        whole.until(b"[DONE]")
        opened = Caller(port, Order(id="open", act="silent"))
        opened.until(b"\r\n\r\n")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130
        assert said.splitlines()[1:] == [
            "walkaway: 2 requests came; why they stopped: stop 1, shutdown 1",
            "error: interrupted",
        ]
        whole.close()
        opened.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert (lines[0]["event"], lines[0]["settings"]["step_ms"]) == ("upstream", 1.0)
    over = {line["id"]: line["why"] for line in lines if line["event"] == "over"}
    assert over == {"whole": "stop", "open": "shutdown"}


@pytest.mark.e2e
def test_it_may_end_with_its_standard_input() -> None:
    with started("--exit-with-stdin") as (process, _):
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0
        assert said.endswith("walkaway: 0 requests came\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_log_that_cannot_be_written_ends_it() -> None:
    command = [sys.executable, "-m", "harness", "upstream", "--log", "/dev/full"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 5
    assert ended.stderr.splitlines()[-1].startswith("error: /dev/full: cannot be written: No space")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--headers soon", "--headers soon: must be early or late"),
        ("--half-close ask", "--half-close ask: must be stop or keep"),
        ("--host nowhere.invalid", "--port 0: "),
        ("--log {folder}", "it is a folder"),
        ("--log {folder}/mine.txt", "is no earlier output of this command"),
        ("--log {folder}/mine.txt/log", "cannot be written"),
    ],
)
def test_wrong_usage_is_one_sentence(tmp_path: Path, flags: str, said: str) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    words = flags.format(folder=tmp_path).split()
    result = CliRunner().invoke(app, ["upstream", *words])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_port_that_is_taken_is_named_with_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        result = CliRunner().invoke(app, ["upstream", "--port", port])
    assert isinstance(result.exception, ConfigError)
    assert f"--port {port}: process " in str(result.exception)
