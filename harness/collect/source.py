"""The common part of all sources: polled in a thread, with rows written to a shard.

A failing source does not end the run: its `SourceError` becomes a warning (once), and it is polled
again. Any other exception is a bug: it ends the source's thread and is raised when the collector
stops.

A function draws the pause between two polls, so that polls do not keep in step with the server.
"""

import errno
import os
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

JITTER: Final = 0.25  # of the interval: enough to drift against any step within a few turns


class SourceError(Exception):
    """A source could not be read this time; the message says which and why."""


class Notes:
    """Remarks of a run, each kept once, in order, from several threads.

    A text is for information; a warning says that something was lost.
    """

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}
        self._warnings: dict[str, None] = {}

    def add(self, text: str) -> None:
        self._texts[text] = None

    def warn(self, text: str) -> None:
        self._warnings[text] = None

    def texts(self) -> list[str]:
        return list(self._texts)

    def warnings(self) -> list[str]:
        return list(self._warnings)


def jittered(
    interval_s: float, rng: random.Random, *, shortest_s: float | None = None
) -> Callable[[], float]:
    """Pauses uniform within 25 % around the interval.

    If the interval is at least `shortest_s`, so is each pause; the range stays symmetrical.
    """
    width_s = JITTER * interval_s
    if shortest_s is not None and interval_s >= shortest_s:
        width_s = min(width_s, interval_s - shortest_s)
    return lambda: rng.uniform(interval_s - width_s, interval_s + width_s)


def poll(
    tick: Callable[[], None],
    *,
    pause_s: Callable[[], float],
    stop: threading.Event,
    complain: Callable[[str], None],
) -> None:
    while not stop.is_set():
        try:
            tick()
        except SourceError as error:
            complain(str(error))
        stop.wait(pause_s())


MOST_HELD: Final = 10_000
_GZIP: Final = 16 + zlib.MAX_WBITS
_QUICK: Final = 1
_READ_BYTES: Final = 1 << 16

Row = TypeVar("Row", bound=msgspec.Struct)


def gathered_path(rows_dir: Path, kind: str) -> Path:
    return rows_dir / f"{kind}.ndjson.gz"


class News(NamedTuple, Generic[Row]):
    """New rows, and the number of all rows so far."""

    rows: list[Row]
    seen: int


class Gathered(Generic[Row]):
    """The rows of one kind. Only the source's thread calls `add`; other methods are for any thread.

    The lock guards the latest rows and their count. `_lost`: why no more rows can be written, as
    nothing after a partly written turn could be unpacked.
    """

    def __init__(self, rows_dir: Path, kind: str, row_type: type[Row]) -> None:
        self.kind = kind
        self.row_type = row_type
        self._path = gathered_path(rows_dir, kind)
        self._file = self._path.open("ab", buffering=0)
        self._packer = zlib.compressobj(_QUICK, wbits=_GZIP)
        self._encoder = msgspec.json.Encoder()
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._latest: deque[Row] = deque(maxlen=MOST_HELD)
        self._count = 0

    def add(self, rows: list[Row]) -> None:
        """Keep these rows. Raises SourceError if the disk is full."""
        with self._lock:
            self._latest.extend(rows)
            self._count += len(rows)
        packed = self._packer.compress(self._encoder.encode_lines(rows))
        packed += self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._lost = self._lost or self._write(packed)
        if self._lost is not None:
            raise SourceError(f"collected rows can no longer be written ({self._lost})")

    def since(self, count: int) -> News[Row]:
        """Rows after the first `count`, if still in memory."""
        with self._lock:
            new = min(self._count - count, len(self._latest))
            return News(list(islice(self._latest, len(self._latest) - new, None)), self._count)

    def latest(self) -> list[Row]:
        return self.since(0).rows

    def all(self) -> Iterator[Row]:
        return read_gathered(self._path, self.row_type)

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> str | None:
        try:
            is_whole = self._file.write(data) == len(data)
        except OSError as error:
            return error.strerror
        return None if is_whole else os.strerror(errno.ENOSPC)


def read_gathered(path: Path, row_type: type[Row]) -> Iterator[Row]:
    """The rows in a file of `Gathered`, part by part; a partly written last turn is ignored."""
    decoder = msgspec.json.Decoder(row_type)
    unpacker = zlib.decompressobj(_GZIP)
    rest = b""
    with path.open("rb") as file:
        while packed := file.read(_READ_BYTES):
            complete, newline, rest = (rest + unpacker.decompress(packed)).rpartition(b"\n")
            yield from decoder.decode_lines(complete + newline)
