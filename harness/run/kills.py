"""The director of planned kills: it ends processes of our own engine while the load runs.

The engine's launcher announces its processes on standard output, and starts a killed one again. A
process is killed only while another of its kind serves.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from harness.errors import TargetError
from harness.records import ProcessKind
from harness.store.manifest import Kill

BACK_S: Final = 60.0
_POLL_S: Final = 0.02


class AnnouncedFleet:
    """The processes of one kind, by what the launcher has announced. `pids`: of the processes that
    serve, by index."""

    def __init__(self, kind: ProcessKind) -> None:
        self.pids: dict[int, int] = {}
        self._kind = kind
        self._last = -1

    def take(self, message: dict[str, Any]) -> int | None:
        """Take one announcement in; returns the index of a process that is back."""
        if message.get("event") == "ready":
            self.pids = dict(enumerate(message.get(f"{self._kind}_pids") or []))
        elif message.get("event") == "restarted" and message.get("kind") == self._kind:
            index = int(message["index"])
            self.pids[index] = int(message["pid"])
            return index
        return None

    def next_victim(self) -> tuple[int, int] | None:
        """Index and pid of the next process by turns; None while fewer than two serve."""
        if len(self.pids) < 2:
            return None
        later = [index for index in sorted(self.pids) if index > self._last]
        self._last = later[0] if later else min(self.pids)
        return self._last, self.pids.pop(self._last)


class Killer:
    """Kills while it is entered; on exit it waits until every process serves again.

    `announced` gives the launcher's lines so far. Raises TargetError if one does not come back.
    """

    def __init__(
        self,
        kind: ProcessKind,
        *,
        every_s: float,
        name_of: Callable[[int], str],
        announced: Callable[[], Iterable[str]],
        kills: list[Kill],
        clock_ns: Callable[[], int],
    ) -> None:
        self._fleet = AnnouncedFleet(kind)
        self._kind: ProcessKind = kind
        self._name_of = name_of
        self._every_ns = int(every_s * 1e9)
        self._announced = announced
        self._num_read = 0
        self._kills = kills
        self._clock_ns = clock_ns
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._kill_on, name="killer")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        pause = threading.Event()
        until_ns = self._clock_ns() + int(BACK_S * 1e9)
        while self._are_away() and error == (None, None, None):
            if self._clock_ns() > until_ns:
                raise TargetError(f"a killed {self._kind} was not started again in {BACK_S:g} s")
            pause.wait(_POLL_S)

    def _kill_on(self) -> None:
        due_ns = self._clock_ns() + self._every_ns
        while not self._is_over.wait(_POLL_S):
            self._are_away()
            if self._clock_ns() < due_ns:
                continue
            due_ns += self._every_ns
            if (victim := self._fleet.next_victim()) is not None:
                index, pid = victim
                t_ns, name = self._clock_ns(), self._name_of(index)
                kill = Kill(t_ns=t_ns, kind=self._kind, index=index, name=name, pid=pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self._kills.append(kill)

    def _are_away(self) -> bool:
        """Whether any killed process does not serve yet, by the lines so far."""
        lines = list(self._announced())
        for line in lines[self._num_read :]:
            with suppress(ValueError):
                back = self._fleet.take(json.loads(line)) if line.startswith("{") else None
                for kill in self._kills:
                    if kill.index == back and kill.back_ns is None:
                        kill.back_ns = self._clock_ns()
        self._num_read = len(lines)
        return any(kill.back_ns is None for kill in self._kills)


def complete_lines(log: Path) -> list[str]:
    """The last line may still be being written."""
    return log.read_text(errors="replace").split("\n")[:-1]
