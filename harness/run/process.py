"""Child processes that cannot outlive their run, and the signals that interrupt it.

Each child leads its own session, so a Ctrl-C in the terminal reaches only the harness, which ends
its children in order: it closes their standard input (they quit at its end, also if the harness is
killed), then sends SIGTERM, then SIGKILL to the group. Both output streams go to a log file, unless
the child reports on its standard output.
"""

import errno
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

from harness.errors import ConfigError, InterruptedRunError, TargetError, in_words
from harness.store.output import why_no_room

T = TypeVar("T")
LAST_PORT = 65_535
HANDLED = (signal.SIGINT, signal.SIGTERM)
QUIT_S = 10.0  # a child that quits writes its last rows within this time
TERMINATE_S = 3.0
READY_POLL_S = 0.02
LOG_TAIL_LINES = 15
REPORT_BYTES = 1 << 16  # read at once


class Interruption:
    """Handles the two signals inside its `with` block (main thread only).

    `requested` is a plain attribute rather than an event: the handler runs on the main thread,
    which may hold the event's lock at that moment.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: list[object] = []

    def handle(self, _signum: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def check(self, where: str = "") -> None:
        if self.requested:
            raise InterruptedRunError(f"interrupted{where}")

    def pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def __enter__(self) -> Self:
        self._previous = [signal.signal(number, self.handle) for number in HANDLED]
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in zip(HANDLED, self._previous, strict=True):
            signal.signal(number, previous)  # type: ignore[arg-type]


class Child:
    """One process, started on construction; leaving the `with` block ends it.

    After the end of its standard input it has `quit_s` to quit before it gets a signal. With
    `reports` its standard output is a pipe, for `read_reports`; only the errors go to the log.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        quit_s: float = QUIT_S,
        reports: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self.quit_s = quit_s
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if reports else output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._unfinished = b""

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def wait_until(
        self,
        ready: Callable[[], T | None],
        *,
        timeout_s: float,
        interruption: Interruption,
        poll_s: float = READY_POLL_S,
        setting: str = "",
    ) -> T:
        """Wait until `ready` returns a value; `setting` names the source of the limit.

        Raises TargetError, with the log's end, if the child ends first or takes too long, and
        InterruptedRunError.
        """
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            code = self.wait(poll_s)
            if (found := ready()) is not None:
                return found
            if code is not None:
                raise TargetError(f"the {self.name} ended with code {code}:\n{self.tail()}")
            interruption.check(f" while the {self.name} was starting")
        limit = f"{timeout_s:g} s{setting}"
        raise TargetError(f"the {self.name} was not ready in {limit}:\n{self.tail()}")

    def say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def read_reports(self, timeout_s: float) -> list[bytes] | None:
        """The next complete lines of its standard output, as soon as there are any; none after
        `timeout_s`. None: it has closed the pipe, and all of it is read."""
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], timeout_s)[0]:
            return []
        read = os.read(output.fileno(), REPORT_BYTES)
        if not read:
            return None
        *lines, self._unfinished = (self._unfinished + read).split(b"\n")
        return lines

    def ask_to_quit(self) -> None:
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
            os.killpg(self.pid, signal.SIGKILL)
            code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def tail(self) -> str:
        """The end of its log. On a full disk it may have had no room for its last words."""
        why = why_no_room(self.log.parent)
        lines = [*self.lines()[-LOG_TAIL_LINES:], *([] if why is None else [why])]
        return "\n".join(f"  {self.name}: {line}" for line in lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_ready_line(log: str) -> Mapping[str, Any] | None:
    for line in log.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            with suppress(ValueError):
                message = json.loads(line)
                if message.get("event") == "ready":
                    return dict(message)
    return None


def free_port() -> int:
    """A port of 127.0.0.1 that is free now; another process may still take it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def check_can_listen(host: str, port: int, *, flag: str) -> None:
    """Raise ConfigError, which names the `flag` and, if it may be seen, who is there."""
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"{flag} {port}: a port is a number from 1 to {LAST_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except PermissionError as error:
        raise ConfigError(
            f"{flag} {port}: this user may not listen there; name a port from 1024 on"
        ) from error
    except OSError as error:
        why = in_words(error)
        if error.errno == errno.EADDRINUSE:
            why = f"{_listener(port)} listens there already; end it, or name another port"
        raise ConfigError(f"{flag} {port}: {why}") from error


def _listener(port: int) -> str:
    import psutil  # each command imports this module

    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            is_there = one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,)
            if is_there and one.pid is not None:
                return f"process {one.pid} ({shlex.join(psutil.Process(one.pid).cmdline())[:80]})"
    return "another program"


def python_module(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def become(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], command)
