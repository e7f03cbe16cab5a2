"""Children end with the run: by the end of their input, else by a signal, at last by force."""

import signal
import sys
from pathlib import Path

import pytest

from harness.errors import TargetError
from harness.run.process import Child, find_ready_line, python_module

READY = '{"event":"ready","url":"http://127.0.0.1:1"}'
UNTIL_INPUT_ENDS = "import sys; sys.stdin.read(); print('bye')"
UNTIL_TERMINATED = "import signal; print('up', flush=True); signal.pause()"
DEAF = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    f"print('{READY}', flush=True); signal.pause()"
)


def child(tmp_path: Path, script: str, quit_s: float = 10) -> Child:
    argv = [sys.executable, "-c", script]
    return Child("helper", argv, tmp_path / "helper.log", quit_s=quit_s)


def is_gone(process: Child) -> bool:
    return process.wait(0) is not None


def test_a_child_quits_when_its_input_ends(tmp_path: Path) -> None:
    with child(tmp_path, UNTIL_INPUT_ENDS) as process:
        assert process.wait(0) is None
    assert process.stop() == 0
    assert (tmp_path / "helper.log").read_text() == "bye\n"


def test_a_child_that_reads_no_input_is_terminated(tmp_path: Path) -> None:
    process = child(tmp_path, UNTIL_TERMINATED, quit_s=0.05)
    assert process.stop() == -signal.SIGTERM


def test_a_deaf_child_is_killed(tmp_path: Path) -> None:
    process = child(tmp_path, DEAF, quit_s=0.05)
    process.wait_until_ready(timeout_s=10, interrupted=lambda: False)
    assert process.stop(terminate_s=0.05) == -signal.SIGKILL


def test_a_child_does_not_outlive_an_error(tmp_path: Path) -> None:
    process = child(tmp_path, UNTIL_INPUT_ENDS)
    with pytest.raises(RuntimeError, match="ours"), process:
        raise RuntimeError("ours")
    assert is_gone(process)


def test_the_ready_line_is_found_among_others(tmp_path: Path) -> None:
    script = f"import sys; print('warming up'); print('{READY}', flush=True); sys.stdin.read()"
    with child(tmp_path, script) as process:
        ready = process.wait_until_ready(timeout_s=10, interrupted=lambda: False)
    assert ready is not None
    assert ready["url"] == "http://127.0.0.1:1"


def test_a_child_that_dies_before_it_is_ready_shows_its_log(tmp_path: Path) -> None:
    script = "import sys; print('no such device', file=sys.stderr); sys.exit(3)"
    with (
        child(tmp_path, script) as process,
        pytest.raises(TargetError, match=r"helper ended with code 3:\n  helper: no such device"),
    ):
        process.wait_until_ready(timeout_s=10, interrupted=lambda: False)


def test_what_a_child_said_last(tmp_path: Path) -> None:
    script = "print('usage: helper'); print('helper: error: no such model')"
    with child(tmp_path, script) as process:
        process.stop()
        assert process.last_line() == "helper: error: no such model"


def test_a_child_that_is_never_ready_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with (
        child(tmp_path, UNTIL_INPUT_ENDS) as process,
        pytest.raises(TargetError, match="was not ready"),
    ):
        process.wait_until_ready(timeout_s=0.1, interrupted=lambda: False)


def test_waiting_ends_when_interrupted(tmp_path: Path) -> None:
    with child(tmp_path, UNTIL_INPUT_ENDS) as process:
        assert process.wait_until_ready(timeout_s=10, interrupted=lambda: True) is None


@pytest.mark.parametrize(
    ("log", "url"),
    [
        ("", None),
        (READY, None),  # the line is not complete
        (READY + "\n", "http://127.0.0.1:1"),
        ("x\n{broken\n" + READY + "\nmore\n", "http://127.0.0.1:1"),
        ('{"event":"other"}\n', None),
    ],
)
def test_what_counts_as_the_ready_line(log: str, url: str | None) -> None:
    ready = find_ready_line(log)
    assert (ready and ready["url"]) == url


def test_modules_are_run_by_this_interpreter() -> None:
    assert python_module("json.tool", "-h") == [sys.executable, "-m", "json.tool", "-h"]
