"""How the engine ends, and what it refuses to start with: no process left, no traceback."""

import signal
import socket
import subprocess
import sys

import pytest

from tests.reference_engine.running_engine import RunningEngine, post_raw, read_until

pytestmark = pytest.mark.e2e


def test_when_the_worker_dies_the_frontend_says_so_and_goes() -> None:
    engine = RunningEngine("--runner", "simulated")
    stream = post_raw(engine, "orphan", stream=True)
    read_until(stream, b'"text"')
    engine.worker.kill()
    read_until(stream, b"worker process has ended")
    stream.close()
    assert engine.process.wait(20) == 1
    engine.stop()


def test_when_the_frontend_is_killed_the_worker_goes() -> None:
    engine = RunningEngine("--runner", "simulated")
    engine.process.kill()
    engine.worker.wait(20)
    engine.stop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fault", "nonsense"], "unknown fault"),
        (["--num-blocks", "1"], "must hold one request"),
        (["--runner", "magic"], "invalid choice"),
        (["--port", "99999"], "from 0 to 65535"),
        (["--port", "-1"], "from 0 to 65535"),
        (["--sim-fixed-ms", "nan"], "must be finite"),
        (["--sim-fixed-ms", "inf"], "must be finite"),
        (["--runner", "simulated", "--device", "cuda"], "needs no device"),
        (["--fault", "delay-abort=1e300"], "from 0 to 3600"),
    ],
)
def test_settings_that_cannot_work_exit_2(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "reference_engine", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_worker_cannot_do_exits_2_too() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, "-m", "reference_engine", "--port", "0", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no CUDA device here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_signal_at_the_first_moment_ends_it(number: int, status: int) -> None:
    for _ in range(3):
        engine = RunningEngine("--runner", "simulated")
        engine.process.send_signal(number)
        assert engine.process.wait(20) == status
        engine.worker.wait(20)
        engine.stop()


def test_a_signal_ends_open_streams_with_a_word_and_no_noise() -> None:
    engine = RunningEngine("--runner", "simulated", stderr=subprocess.PIPE)
    stream = post_raw(engine, "open", stream=True)
    read_until(stream, b'"text"')
    engine.process.send_signal(signal.SIGTERM)
    read_until(stream, b"the server is shutting down")
    stream.close()
    assert engine.process.wait(20) == 143
    assert engine.process.stderr is not None
    assert engine.process.stderr.read() == b""
    engine.process.stderr.close()
    engine.stop()


def test_standard_input_that_has_ended_ends_it_whatever_it_is() -> None:
    command = [sys.executable, "-m", "reference_engine", "--port", "0", "--runner", "simulated"]
    done = subprocess.run(
        [*command, "--exit-with-stdin"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_host_that_is_not_ours_is_a_message() -> None:
    command = [sys.executable, "-m", "reference_engine", "--host", "256.0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot listen on 256.0.0.1" in done.stderr


def test_a_port_in_use_is_a_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "reference_engine", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
    assert "Traceback" not in done.stderr
