"""The upstream's log, followed while it is written: what the far side of a gateway saw.

The upstream writes each event as a line at once, and with the last event of a request its whole
record (harness/upstream/truth.py). Times are on the clock of this process's own rows.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import gevent
import msgspec

from harness.experiments.outcome import HarnessError

_LOOK_S: Final = 0.01  # between two looks at the file
_READ_BYTES: Final = 1 << 20
_SHOWN: Final = 80


class UpstreamRequest(msgspec.Struct, frozen=True):
    """A request as the upstream saw it: a part of the upstream's own record."""

    id: str | None
    is_stream: bool
    arrived_ns: int
    tokens: int
    token_times_ns: list[int]
    has_left: bool
    why: str | None
    first_token_ns: int | None = None
    stopped_ns: int | None = None
    closed: str | None = None
    closed_ns: int | None = None
    unsent_bytes: int | None = None  # that the kernel had not taken when the connection was closed


class _Line(msgspec.Struct):
    event: str
    t_ns: int
    id: str | None = None
    request: int = 0


_line: Final = msgspec.json.Decoder(_Line).decode
_request: Final = msgspec.json.Decoder(UpstreamRequest).decode


class Ledger:
    """Requests by their id; several with the same id are in the order in which they came."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY)
        self._unfinished = b""
        self._events = defaultdict[str, dict[int, dict[str, int]]](dict)
        self._over: dict[int, UpstreamRequest] = {}
        self._follower = gevent.spawn(self._follow)

    def close(self) -> None:
        self._follower.kill()
        os.close(self._descriptor)

    def arrivals(self, name: str) -> list[int]:
        """The arrival time of each request with this id."""
        return [events["arrived"] for events in self._events[name].values()]

    def time_of(self, name: str, event: str) -> int | None:
        """The time of this event of the first request with this id."""
        first: dict[str, int] = next(iter(self._events[name].values()), {})
        return first.get(event)

    def wait(
        self, name: str, event: str, longest_s: float, is_vain: Callable[[], bool] = lambda: False
    ) -> bool:
        """Waits for this event of the first request with this id. Returns whether it came."""
        until_s = time.monotonic() + longest_s
        self._check()
        while (is_missing := self.time_of(name, event) is None) and time.monotonic() < until_s:
            if is_vain():
                break
            gevent.sleep(_LOOK_S)
        return not is_missing

    def over(self, name: str, longest_s: float) -> list[UpstreamRequest]:
        """The requests with this id that are over within this time."""
        until_s = time.monotonic() + longest_s
        self._check()
        while any(number not in self._over for number in self._events[name]):
            if time.monotonic() > until_s:
                break
            gevent.sleep(_LOOK_S)
        return [self._over[number] for number in self._events[name] if number in self._over]

    def _check(self) -> None:
        """Raises HarnessError if the log is not followed any more."""
        if self._follower.ready():
            raise HarnessError(f"the upstream's log cannot be read: {self._follower.exception}")

    def _follow(self) -> None:
        while True:
            read = os.read(self._descriptor, _READ_BYTES)
            *lines, self._unfinished = (self._unfinished + read).split(b"\n")
            for line in lines:
                self._take(line)
            gevent.sleep(0 if len(read) == _READ_BYTES else _LOOK_S)

    def _take(self, text: bytes) -> None:
        try:
            line = _line(text)
            if line.event == "over":
                self._over[line.request] = _request(text)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{text[:_SHOWN]!r}: {error}") from error
        if line.id is not None:
            events = self._events[line.id].setdefault(line.request, {})
            events.setdefault(line.event, line.t_ns)
