"""The server's keeper: it starts the server afresh, so that each try of a schedule meets the same
server.

The command either stays in the foreground for as long as the server lives, and then the keeper ends
it before it starts it again; or it restarts the server somewhere else (a container, a service) and
returns.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import gevent

from harness.experiments.outcome import CannotDecideError

READY_S: Final = 300.0  # a model may have to be loaded
_POLL_S: Final = 0.2
_TERMINATE_S: Final = 10.0


class ServerKeeper:
    """`command` None: the server cannot be started afresh. `is_ready`: whether it serves now."""

    def __init__(
        self, command: Sequence[str] | None, log: Path, *, is_ready: Callable[[], bool]
    ) -> None:
        self.command = command
        self._log = log
        self._is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def can_start(self) -> bool:
        return self.command is not None

    @property
    def pid(self) -> int | None:
        """Of the server, if the command stays in the foreground."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """End the server that was started before, start one, and wait until it serves. Raises
        CannotDecideError."""
        assert self.command is not None
        self.end()
        with self._log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise CannotDecideError(
                    f"--restart {self.command[0]}: cannot be started: {error.strerror}"
                ) from error
        self.starts += 1
        until_s = time.monotonic() + READY_S
        while not self._is_ready():
            code = self._process.poll()
            if code:
                raise CannotDecideError(f"the server's command ended with code {code}: {self._log}")
            if time.monotonic() > until_s:
                raise CannotDecideError(f"the server did not serve {READY_S:g} s after its start")
            gevent.sleep(_POLL_S)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        for number, wait_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
                return
