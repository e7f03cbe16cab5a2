"""Shards: rows on disk as the run goes, one JSON object a line, one file a process and kind.

The load process writes each row with one system call, so a killed process loses at most the row
that it was writing; the harness reads on while the file grows and leaves half a last line alone.
"""

from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from harness.records import ClientSample, RequestRow

Row = TypeVar("Row", RequestRow, ClientSample)


def _prefix(row_type: type[RequestRow] | type[ClientSample]) -> str:
    return "requests" if row_type is RequestRow else "client"


class ShardWriter(Generic[Row]):
    """Appends the rows of one process. The folder must exist."""

    def __init__(self, rows_dir: Path, row_type: type[Row], pid: int) -> None:
        path = rows_dir / f"{_prefix(row_type)}-{pid}.ndjson"
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def write(self, row: Row) -> None:
        """Put one row on disk now."""
        self._file.write(self._encoder.encode(row) + b"\n")

    def close(self) -> None:
        """Release the file; doing it twice is fine."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class ShardReader(Generic[Row]):
    """Reads all shards of one kind in a folder, each row once.

    Its state is the offset reached in each file, always at the start of a line. A fresh reader
    therefore reads everything, and asking it again brings only what is new.
    """

    def __init__(self, rows_dir: Path, row_type: type[Row]) -> None:
        self._rows_dir = rows_dir
        self._pattern = f"{_prefix(row_type)}-*.ndjson"
        self._decoder: msgspec.json.Decoder[Row] = msgspec.json.Decoder(row_type)
        self._offsets: dict[Path, int] = {}

    def read_new(self) -> list[Row]:
        """The rows that were completed since the last call, file by file."""
        rows: list[Row] = []
        for path in sorted(self._rows_dir.glob(self._pattern)):
            rows.extend(self._read_file(path))
        return rows

    def _read_file(self, path: Path) -> list[Row]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(complete)
        return [self._decoder.decode(line) for line in complete.splitlines()]
