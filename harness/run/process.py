"""A child process that cannot outlive its run.

Each child leads its own session, so a Ctrl-C in the terminal reaches only the harness, which ends
its children in order: it closes their standard input (they quit at its end, also if the harness is
killed), then sends SIGTERM, then SIGKILL to the group. Both output streams go to a log file.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

from harness.errors import TargetError

QUIT_S = 10.0  # a child that quits writes its last rows within this time
TERMINATE_S = 3.0
READY_POLL_S = 0.02
LOG_TAIL_LINES = 15


class Child:
    """One process, started on construction; leaving the `with` block ends it.

    After the end of its standard input it has `quit_s` to quit before it gets a signal.
    """

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, *, quit_s: float = QUIT_S
    ) -> None:
        self.name = name
        self.log = log
        self.quit_s = quit_s
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def say(self, line: bytes) -> None:
        """Write one line to its standard input, unless it has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def ask_to_quit(self) -> None:
        """Close its standard input; do not wait for it."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def stop(self, *, terminate_s: float = TERMINATE_S) -> int:
        """End it, gently first. Returns the exit code."""
        self.ask_to_quit()
        code = self.wait(self.quit_s)
        if code is None:
            self._process.terminate()
            code = self.wait(terminate_s)
        if code is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        return code

    def tail(self) -> str:
        """The last lines of its log, for an error message."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {self.name}: {line}" for line in lines[-LOG_TAIL_LINES:])

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "(its log is empty)"

    def wait_until_ready(
        self, *, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Mapping[str, Any] | None:
        """Wait for the JSON line with `"event": "ready"` in its log; None if interrupted.

        Raises TargetError, with the log's end, if the child dies or takes too long.
        """
        for _ in range(int(timeout_s / READY_POLL_S)):
            code = self.wait(READY_POLL_S)
            ready = find_ready_line(self.log.read_text(errors="replace"))
            if ready is not None:
                return ready
            if code is not None:
                raise TargetError(f"the {self.name} ended with code {code}:\n{self.tail()}")
            if interrupted():
                return None
        raise TargetError(f"the {self.name} was not ready in {timeout_s:.0f} s:\n{self.tail()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_ready_line(log: str) -> dict[str, Any] | None:
    for line in log.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and message.get("event") == "ready":
                return message
    return None


def free_port() -> int:
    """A port of 127.0.0.1 that is free now; another process may still take it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def python_module(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def become(command: list[str]) -> NoReturn:
    """Replace this process by another program, which gives the exit code."""
    sys.stdout.flush()
    os.execv(command[0], command)
