"""What a source has gathered: all of it on disk as it comes, and the latest rows in memory.

So a run takes no more memory the longer it lasts, and a harness that is killed loses what came
since its source's last turn. The shards are those of the load (`harness.load.rows`).
"""

import os
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Generic, NamedTuple

from harness.collect.source import SourceError
from harness.load.rows import Row, ShardReader, ShardWriter

MOST_HELD: Final = 10_000


class News(NamedTuple, Generic[Row]):
    """Rows that came since `seen` were known; so many are now."""

    rows: list[Row]
    seen: int


class Gathered(Generic[Row]):
    """The rows of one kind. `add` belongs to the source's thread, the others may be asked by any.

    Its state, under the lock: the latest rows, and how many there have been.
    """

    def __init__(self, rows_dir: Path, row_type: type[Row]) -> None:
        self._rows_dir = rows_dir
        self._row_type = row_type
        self._writer = ShardWriter(rows_dir, row_type, os.getpid())
        self._lock = threading.Lock()
        self._latest: deque[Row] = deque(maxlen=MOST_HELD)
        self._count = 0

    def add(self, rows: list[Row]) -> None:
        """Keep these rows. Raises SourceError where there is no room for them on the disk."""
        with self._lock:
            self._latest.extend(rows)
            self._count += len(rows)
        try:
            self._writer.write(*rows)
        except OSError as error:
            raise SourceError(
                f"what is collected can no longer be written ({error.strerror}): make room"
            ) from error

    def since(self, seen: int) -> News[Row]:
        """What came after the first `seen` rows, if it is still held."""
        with self._lock:
            new = min(self._count - seen, len(self._latest))
            return News(list(islice(self._latest, len(self._latest) - new, None)), self._count)

    def latest(self) -> list[Row]:
        """The rows that are held."""
        return self.since(0).rows

    def all(self) -> Iterator[Row]:
        """Every row, read back from the disk part by part."""
        for part in ShardReader(self._rows_dir, self._row_type).read_in_parts():
            yield from part

    def close(self) -> None:
        """Nothing is added any more; doing it twice is fine."""
        self._writer.close()
