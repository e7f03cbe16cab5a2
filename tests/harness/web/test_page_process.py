"""The process of `walkaway run --web`: its port, and the signals that end it.

Instead of Locust a few lines of Python run, which send the signals.
"""

import os
import socket
import sys
from pathlib import Path

import pytest

from harness.commands.web import PageProcess, serve_page
from harness.errors import ConfigError, InterruptedRunError, TargetError
from harness.run.process import check_can_listen
from harness.run.run_config import RunConfig

SIGNALS = """
import os, signal, sys
def send(*_):
    os.kill(os.getppid(), signal.{name})
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, {when_asked_to_end})
send()
while True:
    signal.pause()
"""


def run(script: str) -> int:
    reading, writing = os.pipe()
    try:
        return PageProcess().run([sys.executable, "-c", script], exit_with=reading)
    finally:
        os.close(writing)


def test_a_taken_port_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    config = RunConfig(workload="demo", settings=["engine.runner=simulated"], out=tmp_path / "runs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        who = (
            rf"^--web-port {port}: process {os.getpid()} \(.*listens there already; .* another port"
        )
        with pytest.raises(ConfigError, match=who):
            serve_page(config, port=port)
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_there_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="--web-port 99999: a port is a number"):
        check_can_listen("127.0.0.1", 99_999, flag="--web-port")


def test_an_interruption_however_sent_ends_it_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InterruptedRunError, match="the page has ended"):
        run(SIGNALS.format(name="SIGINT", when_asked_to_end="save"))
    assert capfd.readouterr().out == "saved\n"
    assert run(SIGNALS.format(name="SIGTERM", when_asked_to_end="save")) == 0
    assert capfd.readouterr().out == "saved\n"


def test_a_second_interruption_kills_it() -> None:
    """This one never ends by itself."""
    with pytest.raises(InterruptedRunError):
        run(SIGNALS.format(name="SIGINT", when_asked_to_end="send"))


def test_its_own_end_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("raise SystemExit(2)") == 2
    with pytest.raises(TargetError, match="was ended by signal 9"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
