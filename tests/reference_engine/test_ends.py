"""How the engine ends or refuses to start: no process left, no traceback."""

import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.reference_engine.running_engine import (
    RunningEngine,
    post_raw,
    read_until,
)

pytestmark = pytest.mark.e2e


def test_when_the_worker_dies_the_frontend_says_so_and_ends() -> None:
    engine = RunningEngine(
        "--runner", "simulated", "--fault", "die-on-abort", stderr=subprocess.PIPE
    )
    stream, whole = post_raw(engine, "stream", stream=True), post_raw(engine, "whole")
    engine.wait_for("first_token", "whole")
    post_raw(engine, "leaver").close()
    read_until(stream, b"the engine has lost its worker")
    assert b"503 Service Unavailable" in read_until(whole, b"lost its worker")
    stream.close()
    whole.close()
    assert engine.process.wait(20) == 1
    assert engine.process.stderr is not None
    assert engine.process.stderr.read().decode().splitlines() == [
        "walkaway engine: the worker process has ended (status 70); its last output, if any, "
        "is above"
    ]
    engine.process.stderr.close()
    engine.stop()


def test_when_the_frontend_is_killed_the_worker_goes() -> None:
    engine = RunningEngine("--runner", "simulated")
    stream = post_raw(engine, "orphan", stream=True)
    read_until(stream, b'"text"')
    engine.process.kill()
    engine.worker.wait(20)
    stream.close()
    engine.stop()


def ended(*flags: str, stdin: int | None = None) -> tuple[int, str]:
    """Its exit status and what it said, without a traceback."""
    command = [sys.executable, "-m", "reference_engine", *flags]
    done = subprocess.run(
        command, stdin=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_wrong_settings_exit_2_a_port_in_use_1_and_an_ended_standard_input_0() -> None:
    wrong = {("--num-blocks", "1"): "hold one request", ("--fault", "nonsense"): "unknown fault"}
    for flags, message in wrong.items():
        status, said = ended(*flags)
        assert (status, message in said) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said = ended("--port", str(taken.getsockname()[1]))
    assert status == 1
    assert "cannot listen" in said
    idle = ("--port", "0", "--runner", "simulated", "--exit-with-stdin")
    assert ended(*idle, stdin=subprocess.DEVNULL) == (0, "")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_signal_at_the_first_moment_ends_it(number: int, status: int) -> None:
    for _ in range(3):
        engine = RunningEngine("--runner", "simulated", stderr=subprocess.PIPE)
        engine.process.send_signal(number)
        engine.silenced(status)


def test_clients_that_leave_in_mid_body_or_speak_no_http_make_no_noise() -> None:
    engine = RunningEngine("--runner", "simulated", "--allow-faults", stderr=subprocess.PIPE)
    for line in (b"POST /v1/completions", b"PUT /walkaway/faults"):
        with socket.create_connection(engine.address) as client:
            client.sendall(line + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    with socket.create_connection(engine.address) as client:
        client.sendall(b"\x16\x03\x01 is TLS\r\n\r\n")
        assert b" 400 " in read_until(client, b"Invalid HTTP request")
    assert httpx.get(f"{engine.url}/health").status_code == 200
    engine.process.send_signal(signal.SIGTERM)
    engine.silenced(143)
