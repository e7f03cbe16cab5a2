"""Children end with the run: by the end of their input, else by a signal, at last by force."""

import signal
import sys
from pathlib import Path

import pytest

from harness.errors import InterruptedRunError, TargetError
from harness.run.process import Child, Interruption, find_ready_line

READY = '{"event":"ready","url":"http://127.0.0.1:1"}'
UNTIL_INPUT_ENDS = "import sys; sys.stdin.read(); print('bye')"
UNTIL_TERMINATED = "import signal; print('up', flush=True); signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + UNTIL_TERMINATED[15:]


def child(tmp_path: Path, script: str, quit_s: float = 10) -> Child:
    argv = [sys.executable, "-c", script]
    return Child("helper", argv, tmp_path / "helper.log", quit_s=quit_s)


def wait_for_a_line(process: Child, timeout_s: float = 10, *, interrupted: bool = False) -> str:
    interruption = Interruption()
    interruption.requested = interrupted
    return process.wait_until(
        lambda: process.log.read_text() or None, timeout_s=timeout_s, interruption=interruption
    )


def test_a_child_quits_when_its_input_ends(tmp_path: Path) -> None:
    with child(tmp_path, UNTIL_INPUT_ENDS) as process:
        assert process.wait(0) is None
    assert process.stop() == 0
    assert process.lines() == ["bye"]


@pytest.mark.parametrize(
    ("script", "ended_by"), [(UNTIL_TERMINATED, signal.SIGTERM), (DEAF, signal.SIGKILL)]
)
def test_a_child_that_reads_no_input_is_terminated_and_a_deaf_one_killed(
    tmp_path: Path, script: str, ended_by: signal.Signals
) -> None:
    process = child(tmp_path, script, quit_s=0.05)
    wait_for_a_line(process)
    assert process.stop(terminate_s=0.05 if script == DEAF else 10) == -ended_by


def test_reports_come_as_whole_lines_and_errors_go_to_the_log(tmp_path: Path) -> None:
    script = (
        "import sys; write = lambda text: (sys.stdout.write(text), sys.stdout.flush()); "
        "write('one\\ntw'); print('an error', file=sys.stderr); sys.stdin.readline(); "
        "write('o\\nunfinished')"
    )
    argv = [sys.executable, "-c", script]
    with Child("helper", argv, tmp_path / "helper.log", reports=True) as process:
        assert process.read_reports(10) == [b"one"]
        assert process.read_reports(0) == []
        process.say(b"go on")
        assert process.read_reports(10) == [b"two"]
        while (reports := process.read_reports(10)) is not None:
            assert reports == []
        assert process.wait(10) == 0
    assert process.lines() == ["an error"]


def test_a_child_does_not_outlive_an_error(tmp_path: Path) -> None:
    process = child(tmp_path, UNTIL_INPUT_ENDS)
    with pytest.raises(RuntimeError, match="ours"), process:
        raise RuntimeError("ours")
    assert process.wait(0) is not None


def test_a_child_that_dies_before_it_is_ready_shows_its_log(tmp_path: Path) -> None:
    script = "import sys; print('no such device', file=sys.stderr); sys.exit(3)"
    with (
        child(tmp_path, script) as process,
        pytest.raises(TargetError, match=r"helper ended with code 3:\n  helper: no such device"),
    ):
        process.wait_until(lambda: None, timeout_s=10, interruption=Interruption())


def test_waiting_for_a_child_ends_in_time_and_when_interrupted(tmp_path: Path) -> None:
    with child(tmp_path, UNTIL_INPUT_ENDS) as process:
        with pytest.raises(TargetError, match=r"was not ready in 0\.1 s"):
            wait_for_a_line(process, timeout_s=0.1)
        with pytest.raises(InterruptedRunError, match="interrupted while the helper was starting"):
            wait_for_a_line(process, interrupted=True)


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
def test_the_ready_line_is_found_among_others(log: str, url: str | None) -> None:
    ready = find_ready_line(log)
    assert (ready and ready["url"]) == url


def test_the_first_signal_asks_and_the_second_insists() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        interruption.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(InterruptedRunError):
            interruption.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
