"""The server's process: a shell around it counts with its children; its log is read once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.search.process import Process

OPENS = "import os, sys; sys.stdin.readline(); a = [os.dup(0) for _ in range(40)]"
OPENS += "; b = bytearray(60 << 20); print(flush=True); sys.stdin.read()"


@pytest.fixture(name="shell")
def _shell() -> Iterator["subprocess.Popen[str]"]:
    """A server behind `sh -c`, which opens much when it gets a line."""
    command = ["sh", "-c", f"{sys.executable} -c '{OPENS}'; true"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def test_what_the_child_of_a_shell_keeps_is_seen(shell: "subprocess.Popen[str]") -> None:
    assert shell.stdin is not None
    assert shell.stdout is not None
    process = Process(lambda: shell.pid, None)
    process.begin()
    assert process.of_handles() is None
    shell.stdin.write("\n")
    shell.stdin.flush()
    shell.stdout.readline()
    handles, growth = process.of_handles(), process.of_growth()
    assert handles is not None
    assert growth is not None
    assert "MB more at rest" in growth.said
    shell.stdin.close()


def test_a_process_that_is_not_known_shows_nothing() -> None:
    process = Process(lambda: None, None)
    process.begin()
    assert process.of_handles() is process.of_growth() is process.of_log() is None


def test_only_what_comes_into_the_log_after_the_start_counts(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("Traceback (most recent call last):\n")
    process = Process(lambda: os.getpid(), log)
    process.begin()
    assert process.of_log() is None
    with log.open("a") as file:
        file.write("thread 'main' panicked at src/main.rs\n")
    found = process.of_log()
    assert found is not None
    assert "panicked at src/main.rs" in found.said
    assert process.of_log() is None
