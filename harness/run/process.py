"""A child process that cannot outlive its run.

Each child is the leader of a session of its own, so a Ctrl-C in the terminal reaches only the
harness, which then ends its children in order: first by closing their standard input (they quit
on its end, and so they do when the harness is killed outright), then with SIGTERM, then with
SIGKILL to the group. Both output streams go to a log file.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from harness.errors import TargetError

QUIT_S = 10.0  # a child that was asked to quit writes its last rows within this
TERMINATE_S = 3.0
READY_POLL_S = 0.02
LOG_TAIL_LINES = 15


class Child:
    """One process, started on construction; leaving the `with` block ends it.

    It has `quit_s` to quit when its standard input ends, before it is sent a signal.
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
        """The exit code, or None when it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def say(self, line: bytes) -> None:
        """One line for its standard input; a process that has ended does not hear it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def ask_to_quit(self) -> None:
        """End its standard input, and do not wait for it."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def stop(self, *, terminate_s: float = TERMINATE_S) -> int:
        """End it, gently first. Stopping one that has ended only tells its exit code."""
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
        """The last line of its log: what it said before it gave up."""
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "(it said nothing)"

    def wait_until_ready(
        self, *, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Mapping[str, Any] | None:
        """Wait for the JSON line with `"event": "ready"` in its log; None when interrupted.

        Raises TargetError, with the log's end, when the child dies or takes too long.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def find_ready_line(log: str) -> dict[str, Any] | None:
    """The ready line among others, once it is complete."""
    for line in log.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and message.get("event") == "ready":
                return message
    return None


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module with this very interpreter."""
    return [sys.executable, "-m", module, *arguments]


def become(command: list[str]) -> NoReturn:
    """Replace this process by another program; its exit code is then ours."""
    sys.stdout.flush()
    os.execv(command[0], command)
