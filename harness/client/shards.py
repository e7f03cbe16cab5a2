"""Shards: rows on disk as the run goes, one JSON object a line, one file a host, process and kind.

A row is written with one system call, so a killed process loses at most that write. The harness
reads on while the file grows, and leaves half a last line alone.
"""

import errno
import os
import platform
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

import msgspec

from harness.records import ClientSample, ProcessMark, RequestRow, WorkerSeen

Row = TypeVar("Row", RequestRow, ClientSample, ProcessMark, WorkerSeen)

KINDS: Final[dict[type[msgspec.Struct], str]] = {
    RequestRow: "requests",
    ClientSample: "client",
    ProcessMark: "process",
    WorkerSeen: "workers",
}
_READ_BYTES: Final = 16 * 2**20


def _shard(rows_dir: Path, kind: str, host: str, pid: int) -> Path:
    return rows_dir / f"{kind}-{host}-{pid}.ndjson"


class ShardWriter(Generic[Row]):
    """The folder must exist. `_unwritten`, the rest of a write on a full disk, precedes the next
    write, which would otherwise continue half a line."""

    def __init__(self, rows_dir: Path, row_type: type[Row], pid: int) -> None:
        path = _shard(rows_dir, KINDS[row_type], platform.node(), pid)
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()
        self._unwritten = b""

    def write(self, *rows: Row) -> None:
        """Put rows on disk now. Raises OSError if there is no room for all of them."""
        lines = self._unwritten + self._encoder.encode_lines(rows)
        self._unwritten = lines[self._file.write(lines) :]
        if self._unwritten:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ShardReader(Generic[Row]):
    """Reads all shards of one kind in a folder, each row once. `_offsets` are always at the start
    of a line. `damaged`: the number of lines left out, such as a full disk leaves behind."""

    def __init__(self, rows_dir: Path, row_type: type[Row], *, host: str = "*") -> None:
        self._rows_dir = rows_dir
        self._host = host
        self._kind = KINDS[row_type]
        self._decoder: msgspec.json.Decoder[Row] = msgspec.json.Decoder(row_type)
        self._offsets: dict[Path, int] = {}
        self._num_read: Counter[Path] = Counter()
        self.damaged = 0

    def read_new(self) -> list[Row]:
        return [row for rows in self.read_in_parts() for row in rows]

    def read_in_parts(self) -> Iterator[list[Row]]:
        for path in sorted(self._rows_dir.glob(f"{self._kind}-{self._host}-*.ndjson")):
            yield from self._read_file(path)

    def num_read(self, host: str, pid: int) -> int:
        return self._num_read[_shard(self._rows_dir, self._kind, host, pid)]

    def _read_file(self, path: Path) -> Iterator[list[Row]]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            rest = b""
            while data := file.read(_READ_BYTES):
                complete, newline, rest = (rest + data).rpartition(b"\n")
                lines = (complete + newline).splitlines()
                self._offsets[path] = file.tell() - len(rest)
                rows = list(self._decoded(lines))
                self._num_read[path] += len(rows)
                yield rows

    def _decoded(self, lines: Sequence[bytes]) -> Iterator[Row]:
        for line in lines:
            try:
                yield self._decoder.decode(line)
            except ValueError:  # no JSON, no row, or torn inside a character
                self.damaged += 1


def most_at_once(times: Iterable[Sequence[int]]) -> int:
    """How many streams ran at once, by the times of their tokens: each from its first token to its
    last but one, since a busy client may read a last token after the first one of the stream
    admitted in its place."""
    spans = [(of_one[0], of_one[-2]) for of_one in times if len(of_one) > 1]
    starts, ends = sorted(first for first, _ in spans), sorted(last for _, last in spans)
    return max((i + 1 - bisect_right(ends, first) for i, first in enumerate(starts)), default=0)
