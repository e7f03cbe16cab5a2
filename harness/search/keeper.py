"""The server's keeper: it starts the server afresh, so that each try of a schedule meets the same
server.

The command either stays in the foreground for as long as the server lives, and then the keeper ends
it before it starts it again; or it restarts the server somewhere else (a container, a service) and
returns. A server that still answers when no command of the keeper's runs is of the second kind: it
is asked again only when the command has returned.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import gevent

from harness.errors import in_words
from harness.experiments.outcome import CannotDecideError
from harness.place import Place

READY_S: Final = 300.0  # a model may have to be loaded
TERMINATE_S: Final = 10.0
_POLL_S: Final = 0.2
_KNOCK_S: Final = 1.0


class ServerKeeper:
    """`command` None: the server cannot be started afresh. `is_up`: whether anything listens at its
    address; `is_ready`: whether it serves now."""

    def __init__(
        self,
        command: Sequence[str] | None,
        log: Path,
        *,
        is_up: Callable[[], bool],
        is_ready: Callable[[], bool],
        longest_s: float = READY_S,
    ) -> None:
        self.command = command
        self._log = log
        self._is_up, self._is_ready = is_up, is_ready
        self._longest_s = longest_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def can_start(self) -> bool:
        return self.command is not None

    @property
    def pid(self) -> int | None:
        """The server's process id, if the command stays in the foreground."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """End the server that was started before, start one, and wait until it serves. Raises
        CannotDecideError."""
        self.end()
        is_elsewhere = self._is_up()
        process = self._spawn()
        until_s = time.monotonic() + self._longest_s
        while True:
            code = process.poll()
            if code:
                raise CannotDecideError(
                    f"the command that starts the server ended with code {code}: see {self._log}"
                )
            if not (is_elsewhere and code is None) and self._is_ready():
                return
            if time.monotonic() > until_s:
                raise CannotDecideError(
                    f"the server did not serve {self._longest_s:g} s after its start"
                )
            gevent.sleep(_POLL_S)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        assert self.command is not None
        if self._is_closed:
            raise CannotDecideError("the search has ended")
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
                    f"--restart {self.command[0]}: {in_words(error)}"
                ) from error
        return self._process

    def close(self) -> None:
        """End the server for good."""
        self._is_closed = True
        self.end()

    def end(self) -> None:
        """What the command has left behind in its group ends, too."""
        if (process := self._process) is None:
            return
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(TERMINATE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None


def listens(place: Place) -> bool:
    def connect(address: str) -> socket.socket:
        return socket.create_connection((address, place.port), timeout=_KNOCK_S)

    try:
        place.reach(place.port, connect, (OSError,)).close()
    except OSError:
        return False
    return True
