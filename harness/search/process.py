"""The server's process, where it is on this machine: what it keeps open, how it grows, what it
logs."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from harness.conform.cases.leaks import Used, used_by
from harness.experiments.outcome import CannotDecideError
from harness.search.broken import Broken, Violation

_MORE_HANDLES: Final = 16  # which pools may take
_MORE_BYTES: Final = 32 << 20  # which caches and allocators may take
_LOG_SIGNS: Final = re.compile(
    r"Traceback \(most recent|panicked at|[Ss]egmentation fault|core dumped|AssertionError|"
    r"CUDA error|EngineDeadError|double free|heap-use-after-free"
)
_SHOWN: Final = 200  # characters


class Process:
    """`pid`: of the server, or of a shell that started it: its children are counted, too."""

    def __init__(self, pid: Callable[[], int | None], log: Path | None) -> None:
        self._pid, self._log = pid, log
        self._before: Used | None = None
        self._read_log = 0

    def begin(self) -> None:
        """Call it after a fresh start."""
        self._before = self._used()
        self._read_log = 0 if self._log is None else _size_of(self._log)

    def _used(self) -> Used | None:
        with suppress(CannotDecideError):
            if (pid := self._pid()) is not None:
                return used_by(pid)
        return None

    def of_handles(self) -> Violation | None:
        now, before = self._used(), self._before
        if now is None or before is None or now.handles <= before.handles + _MORE_HANDLES:
            return None
        evidence = {"before": before.handles, "now": now.handles}
        said = "the server had {before:g} open files and sockets, and has {now:g} at rest"
        return Violation(broken=Broken.HANDLES, said=said.format(**evidence), evidence=evidence)

    def of_growth(self) -> Violation | None:
        now, before = self._used(), self._before
        if now is None or before is None or now.bytes <= before.bytes + _MORE_BYTES:
            return None
        evidence = {"before": before.bytes, "now": now.bytes}
        said = f"the server's process has {(now.bytes - before.bytes) / 1e6:.0f} MB more at rest"
        return Violation(broken=Broken.GROWS, said=said, evidence=evidence)

    def of_log(self) -> Violation | None:
        """What stands in it since the last look."""
        if self._log is None:
            return None
        with suppress(OSError), self._log.open("rb") as file:
            file.seek(min(self._read_log, _size_of(self._log)))
            new = file.read()
            self._read_log = file.tell()
            lines = new.decode("utf-8", "replace").splitlines()
            if (sign := next(filter(_LOG_SIGNS.search, lines), None)) is not None:
                said = f"the server's log says: {sign.strip()[:_SHOWN]}"
                return Violation(broken=Broken.LOG, said=said)
        return None


def _size_of(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
