"""A process that owns a connection, so that it can be killed: the client whose program crashes.

It is `cat`, with the connection as its standard input: its user has read what `cat` has read. No
other process holds the connection, so when `cat` is killed the kernel ends it.
"""

import contextlib
import os
import signal
import socket
from typing import Final

PROGRAM: Final = "cat"


class ClientProcess:
    """`output` is our end of the pair. The process owns `sock` from now on. Raises OSError if no
    process can be started; `sock` is closed then."""

    def __init__(self, sock: socket.socket) -> None:
        self.output, theirs = socket.socketpair()
        with sock, theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self.output.close)
            for end in (sock, theirs):  # ours may be non-blocking, which `cat` does not expect
                os.set_blocking(end.fileno(), True)
            self._pid: int | None = os.posix_spawnp(
                PROGRAM,
                [PROGRAM],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, sock.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 1),
                ],
            )
            on_failure.pop_all()

    def kill(self) -> None:
        pid, self._pid = self._pid, None
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # gevent may have reaped it already
            os.waitpid(pid, 0)
